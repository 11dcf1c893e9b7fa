"""FedBary: valuation of clients and samples before any training, from interpolants and distances.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, Algorithm 1 with the server's
validation set, or with the clients' Wasserstein barycenter in its place where there is none; section 4.3 for samples.

Departures from the paper: labels enter with a weight (``label_weight``), without which label noise stays invisible;
potentials are debiased entropic ones and not the linear program's (see ``flsv.functional.transport.potentials``); a
sample is compared with its own class (``calibration``), and the rule that flags samples is a choice (``rule``). Without
validation data the barycenter is computed first and the protocol run against it, so that clients are valued in the same
way in both cases.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from flsv.core import Client, LocalData, map_clients
from flsv.functional import TransportServer, contribution_shares, wasserstein_barycenter
from flsv.functional.transport.checks import check_support, safe_support
from flsv.functional.transport.fedbary import Part
from flsv.utilities import progress
from flsv.utilities.declared import Count, NonNegative, Positive, ValidatedArguments
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from flsv.valuation import questions
from flsv.valuation.features import Features, make_features
from flsv.valuation.questions import Covariance, FirstAnswer, Judging, Labels, Verdict

LARGEST = 100  # the default S for large clients
FEW = 10  # points, below which distances are too coarse


@dataclass(frozen=True)
class Valuation:
    """Result of a valuation of k clients, as the server has it.

    Args:
        clients: the clients' numbers.
        samples: int64 ``[k]``, training samples that took part.
        broken: int64 ``[k]``, training samples that did not, because they are not finite.
        distances: ``[k]``, distances from the target, in feature units; NaN for a client without samples.
        verdicts: each client's verdict on its samples; None for a client without samples, or without judging.
        support: S, the number of points sent.
    """

    clients: tuple[int, ...]
    samples: Tensor
    broken: Tensor
    distances: Tensor
    verdicts: tuple[Verdict | None, ...]
    support: int

    @property
    def shares(self) -> Tensor:
        """Contribution shares ``[k]``: (1/W_i) / sum_j (1/W_j); NaN for a client without samples."""
        return contribution_shares(self.distances)

    @property
    def flagged(self) -> Tensor:
        """Numbers of suspicious samples, int64 ``[k]``; all broken ones are counted."""
        counts = [b if v is None else v.flagged for v, b in zip(self.verdicts, self.broken.tolist())]
        return torch.tensor(counts, dtype=torch.long)

    @property
    def flagged_shares(self) -> Tensor:
        """Flagged samples as a share of all samples, ``[k]``; NaN for a client without samples."""
        return self.flagged / (self.samples + self.broken)


class FedBary(ValidatedArguments):
    """Valuation of clients by the Wasserstein distance of their data from the server's, and of samples by gradients.

    Clients send only interpolants and distances, and for samples a count and a histogram. Interpolants are means of a
    client's samples, and of too few samples if S is large: see ``allow_reconstruction``. Clients work in a thread pool.

    Args:
        features: features in which samples are compared: ``"pixels"``, ``"pca"``, ``"penultimate"`` (in a loop only),
            or a :class:`flsv.valuation.features.Features`.
        support: S, points of the interpolating measures, the same for all clients. Fewer cost less, reveal less of
            each client, and bias distances upwards. None: 100, or as many as the smallest client can safely send
            (:func:`flsv.functional.transport.checks.safe_support`).
        iterations: K. The error about halves with each.
        label_weight: w of the label term of the distance, in units of the features'; 0 for none.
        covariance: a class's spread in the label term: ``"diag"``, ``"none"``, or ``"full"`` for up to 64 features.
        t: position of the interpolants between both measures, in (0, 1).
        p: exponent of the distance.
        calibration: reference of a sample's gradient: the other samples of its ``"class"``, or all of the ``"client"``
            (equation 11). The latter also depends on how often a class occurs, which hides wrong labels; the former
            does not notice that a whole class is bad.
        rule: rule that flags samples, see :func:`flsv.valuation.flag_samples`.
        blur: see :func:`flsv.functional.client_values`.
        scaling: likewise.
        part: part of a sample that is judged: its ``"features"``, its ``"labels"`` or ``"both"``, see
            ``flsv.functional.transport.fedbary``. If the kind of noise is known, its part alone finds more of it.
        chunk: samples that are valued at once.
        workers: threads; None: as many as there are cores.
        allow_reconstruction: accept S of half a client's samples and more, from which the server can reconstruct them
            (``docs/results/fedbary_reconstruction.md``).

    Raises:
        ConfigurationError: arguments out of range; from :meth:`value`, clients or a server of different features, no
            client with samples, or one with too few for S.

    Example:
        >>> from flsv.valuation import clients_of, server_of
        >>> draw = lambda shift, seed: torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)) + shift
        >>> y = torch.zeros(40, dtype=torch.long)
        >>> clients = clients_of([(draw(0.0, 1), y), (draw(2.0, 2), y)])
        >>> found = FedBary().value(clients, server_of(draw(0.0, 3), y), torch.Generator().manual_seed(0))
        >>> found.shares.round(decimals=1), found.support
        (tensor([0.8000, 0.2000]), 19)
    """

    rules = ((lambda given: given.part != "labels" or given.label_weight > 0, "expected a label_weight above 0."),)

    def __init__(
        self,
        features: str | Features = "pixels",
        support: Count | None = None,
        iterations: Count = 10,
        label_weight: NonNegative = 1.0,
        covariance: Covariance = "diag",
        t: Annotated[float, Gt(0), Lt(1)] = 0.5,
        p: Annotated[float, Ge(1)] = 2.0,
        calibration: Literal["class", "client"] = "class",
        rule: Literal["outlier", "positive"] = "outlier",
        blur: Positive = 0.1,
        scaling: Annotated[float, Gt(0), Lt(1)] = 0.7,
        part: Part = "both",
        chunk: Count = 2000,
        workers: Count | None = None,
        allow_reconstruction: bool = False,
    ) -> None:
        self.features = make_features(features)
        self.support, self.iterations, self.t, self.p = support, iterations, t, p
        self.labels = Labels(covariance, label_weight)
        self.judging = Judging(blur, scaling, part, chunk, calibration, rule)
        self.workers, self.allow_reconstruction = workers, allow_reconstruction

    def support_for(self, samples: Mapping[int, int]) -> int:
        """Choose S for clients of these sizes, by number; clients without samples take no part.

        Raises:
            ConfigurationError: a client has too few samples for S, or for any S.
        """
        sizes = {client: size for client, size in samples.items() if size}
        support = LARGEST if self.support is None else self.support
        if self.allow_reconstruction or not sizes:
            return support
        smallest = min(sizes, key=sizes.__getitem__)
        safe = safe_support(sizes[smallest])
        if self.support is None and safe:
            support = min(support, safe)
        check_support(support, sizes[smallest], f"client {smallest}")
        if self.support is None and support < FEW:
            warnings.warn(
                f"FedBary: client {smallest} has {sizes[smallest]} samples, which allow support={support} for all, and "
                "distances from so few points are coarse. Leave small clients out, or set support and "
                "allow_reconstruction=True.",
                stacklevel=1,  # one place, so that the same warning is shown once
            )
        return support

    def value(
        self,
        clients: Sequence[Client],
        server: LocalData | None,
        generator: torch.Generator | None,
        vector: Tensor | None = None,
        judge: bool = True,
        others: Mapping[int, int] | None = None,
    ) -> Valuation:
        """Run the protocol.

        Args:
            clients: the k clients.
            server: holds the validation set; None: the target is the clients' barycenter.
            generator: source of randomness; None: torch's default.
            vector: ``[P]``, the current global model, for features that need it.
            judge: whether the clients value their samples, too.
            others: numbers of samples of further clients, by client, which limit a default S as well, because
                distances with different S are not comparable.

        Returns:
            The clients' distances and, if ``judge``, their verdicts.
        """
        key = object()
        seed = int(torch.randint(2**62, (1,), generator=generator))
        own = None if server is None else server.samples("val")
        self.features.fit(None if own is None else own[0], clients)
        embed = partial(_embed, features=self.features, vector=vector)
        enter = partial(questions.enter, key=key, embed=embed, labels=self.labels, t=self.t, p=self.p)
        enter = partial(enter, allow_reconstruction=self.allow_reconstruction)
        try:
            # One after the other: all share the features' network, which uses the cores itself.
            present = map_clients(clients, lambda client: client.ask(enter))
            there = {client: presence for client, presence in zip(clients, present) if presence.samples}
            sizes = {client.id: presence.samples for client, presence in zip(clients, present)}
            support = self.support_for({**(others or {}), **sizes})
            points = None if server is None or own is None else self._points(embed(server, own[0]), own[1])
            self._check_features(there, points)
            target = self._barycenter(there, key, seed, support) if points is None else points[0]
            progress.start("clients", len(there))
            run = partial(self._value_client, target=target, key=key, seed=seed, judge=judge, support=support)
            with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
                results = dict(zip(there, map_clients(list(there), run, pool.map)))
        finally:
            progress.finish()
            map_clients(clients, lambda client: client.ask(questions.leave, key))
        missing = (torch.tensor(torch.nan), None)
        distances, verdicts = zip(*(results.get(client, missing) for client in clients))
        return Valuation(
            tuple(client.id for client in clients),
            torch.tensor([presence.samples for presence in present]),
            torch.tensor([presence.broken for presence in present]),
            torch.stack(distances),
            verdicts,
            support,
        )

    def _points(self, features: Tensor, y: Tensor) -> tuple[Tensor, int]:
        """Compute the target's points ``[m2, d']`` from the server's samples; return also d."""
        x = features.detach().float().cpu()
        whole = x.isfinite().all(1)
        if not whole.any():
            raise ConfigurationError("no sample of the server's validation set is finite.")
        return questions.embed_labels(x[whole], y.cpu()[whole], self.labels)[0], x.shape[1]

    def _check_features(self, there: Mapping[Client, FirstAnswer], points: tuple[Tensor, int] | None) -> None:
        if not there:
            raise ConfigurationError("no client has a sample that is finite, so there is nothing to value.")
        dims = {f"client {client.id}": presence.features for client, presence in there.items()}
        dims |= {} if points is None else {"the server": points[1]}
        first, dim = next(iter(dims.items()))
        for name, other in dims.items():
            if other != dim:
                raise ConfigurationError(
                    f"{first} has {dim} features and {name} has {other} ({self.features!r}): samples can be compared "
                    "in the same features only. Bring all inputs to one shape."
                )

    def _barycenter(self, there: Mapping[Client, FirstAnswer], key: object, seed: int, support: int) -> Tensor:
        """Compute the clients' barycenter ``[S, d']``, the target where the server has no samples."""
        found = wasserstein_barycenter(
            [_BarycenterClient(client, key, presence.dim) for client, presence in there.items()],
            support=support,
            iterations=self.iterations,
            weights=torch.tensor([float(presence.samples) for presence in there.values()]),
            generator=generator_for(seed, "barycentre"),  # another name would draw other numbers
            p=self.p,
        )
        return found.support_points

    def _value_client(
        self, client: Client, target: Tensor, key: object, seed: int, judge: bool, support: int
    ) -> tuple[Tensor, Verdict | None]:
        """Run the server's side of one client's valuation; return its distance and verdict."""
        server = TransportServer(target, t=self.t, p=self.p)
        gamma = server.start(support, generator=generator_for(seed, "support", client.id))
        for _ in range(self.iterations):
            gamma = server.step(*client.ask(questions.answer, key, gamma))
        verdict = None
        if judge:
            assert server.eta is not None
            verdict = client.ask(questions.judge, key, server.eta, self.labels, self.judging, seed)
        progress.advance()
        return server.distance, verdict

    def __repr__(self) -> str:
        return (
            f"FedBary(features={self.features!r}, support={self.support}, iterations={self.iterations}, "
            f"label_weight={self.labels.weight})"
        )


@dataclass(frozen=True)
class _BarycenterClient:
    """Client of the barycenter's protocol."""

    client: Client
    key: object
    dim: int

    def answer(self, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return self.client.ask(questions.answer, self.key, gamma)


def _embed(local: LocalData, x: Tensor, features: Features, vector: Tensor | None) -> Tensor:
    module = local.module(vector) if features.needs_model and vector is not None else None
    return features(x, module)
