"""FedBary: valuation of clients and samples before training, by Wasserstein distances."""
# Li et al., "Data Valuation and Detections in Federated Learning", CVPR 2024: Algorithm 1 for clients, section 4.3 for
# samples.
# Departures: the distance has a term for labels (`label_weight`), without which label noise stays undetected.
# Potentials are those of debiased entropic transport, not of a linear program. A sample is compared with its own class
# (`calibration`), and `rule` has a second choice. Without validation data the clients' barycenter is computed first and
# then used as the target.

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from flsv.core import Client, LocalData, Split, map_clients
from flsv.data.splits import SampleFilter
from flsv.functional import TransportServer, contribution_shares, wasserstein_barycenter
from flsv.functional.transport.cost import check_support, safe_support
from flsv.functional.transport.potentials import Part
from flsv.utilities.declared import Count, NonNegative, Positive, ValidatedArguments
from flsv.utilities.errors import ConfigurationError, listed, need_classes
from flsv.utilities.seeding import generator_for
from flsv.valuation import client_functions
from flsv.valuation.client_functions import Covariance, FirstResponse, Rule
from flsv.valuation.features import Features, make_features

DEFAULT_SUPPORT = 100  # number of support points, if all clients have enough samples for it


@dataclass(frozen=True)
class Valuation:
    """Result of :meth:`FedBary.value`, a valuation of k clients.

    Args:
        clients: ids of the k clients. All other entries are in this order.
        samples: int64 ``[k]``, number of each client's training samples that took part.
        broken: int64 ``[k]``, number of each client's training samples that did not take part, because they or their
            features are not finite.
        distances: ``[k]``, each client's distance W_i from the target, in units of the features. NaN for a client
            without finite samples.
        flagged: int64 ``[k]``, number of each client's training samples that are flagged or not finite. If samples were
            not valued, of those that are not finite.
        support: S, the number of points that clients and server exchanged.
    """

    clients: tuple[int, ...]
    samples: Tensor
    broken: Tensor
    distances: Tensor
    flagged: Tensor
    support: int

    @property
    def shares(self) -> Tensor:
        """Contribution shares (1/W_i) / sum_j (1/W_j) ``[k]`` of the distances W. NaN where the distance is NaN."""
        return contribution_shares(self.distances)

    @property
    def flagged_shares(self) -> Tensor:
        """Fraction of each client's samples that are flagged, ``[k]``. NaN without samples."""
        return self.flagged / (self.samples + self.broken)


class FedBary(ValidatedArguments, SampleFilter):
    """Valuation of clients and samples by Wasserstein distances.

    A client is valued by the distance of its data from the server's validation set or, without one, from the clients'
    barycenter. A sample is valued by this distance's gradient.

    Clients send only interpolants (points between their data and the server's) and distances and, if samples are
    valued, the number of flagged samples. Interpolants are means of a client's samples, of the fewer
    the larger ``support`` is. Clients work in a thread pool.

    Args:
        features: features in which samples are compared: ``"pixels"``, ``"pca"``, ``"penultimate"`` (in a
            :class:`flsv.FederatedLoop` only), or a :class:`flsv.valuation.features.Features`.
        support: S, the number of points of the interpolating measures, the same for all clients. Fewer points cost
            less, reveal less of each client, and bias distances upwards. None: 100, or as many points as the smallest
            client can safely send (:func:`flsv.functional.transport.cost.safe_support`).
        iterations: number of exchanges between the server and each client. Each one halves the error approximately.
        label_weight: weight of the label term of the distance relative to the features. 0: labels are ignored.
        covariance: covariance of a class in the label term: ``"diag"``, ``"none"``, or ``"full"`` for up to 64
            features.
        p: exponent of the Wasserstein distance.
        calibration: samples with which a sample's gradient is compared: the other samples of its ``"class"``, or all
            samples of the ``"client"`` (equation 11 of the paper). With ``"client"`` a gradient also depends on how
            often a class occurs, which hides wrong labels. With ``"class"`` a class that is bad as a whole is not
            detected.
        rule: rule that flags samples, see :func:`flsv.valuation.flag_samples`.
        blur: regularization of the transport, see :func:`flsv.functional.client_values`.
        part: part of a sample that is valued: its ``"features"``, its ``"labels"`` or ``"both"``, see
            ``flsv.functional.transport.potentials``. Valuing the part that is noisy alone finds more bad samples.
        chunk: largest number of samples that a client values at once, since the costs form a matrix.
        workers: number of threads. None: as many as there are cores.
        allow_reconstruction: whether to accept a ``support`` of half a client's number of samples or more, from which
            the server can reconstruct the samples (``docs/results/fedbary.md``).

    Raises:
        ConfigurationError: an argument is out of range. From :meth:`value`: participants have different numbers of
            features, no client has samples, or a client has too few samples for ``support``.

    Example:
        >>> from flsv.valuation import clients_of, server_of
        >>> draw = lambda shift, seed: torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)) + shift
        >>> y = torch.zeros(40, dtype=torch.long)
        >>> clients = clients_of([(draw(0.0, 1), y), (draw(2.0, 2), y)])
        >>> found = FedBary().value(clients, server_of(draw(0.0, 3), y), torch.Generator().manual_seed(0))
        >>> found.shares.round(decimals=1), found.support
        (tensor([0.8000, 0.2000]), 19)
    """

    rules = (
        (
            lambda arguments: arguments.part != "labels" or arguments.label_weight > 0,
            "expected a label_weight above 0.",
        ),
    )

    def __init__(
        self,
        features: str | Features = "pixels",
        support: Count | None = None,
        iterations: Count = 10,
        label_weight: NonNegative = 1.0,
        covariance: Covariance = "diag",
        p: Annotated[float, Ge(1)] = 2.0,
        calibration: Literal["class", "client"] = "class",
        rule: Rule = "outlier",
        blur: Positive = 0.1,
        part: Part = "both",
        chunk: Count = 2000,
        workers: Count | None = None,
        allow_reconstruction: bool = False,
    ) -> None:
        self.features = make_features(features)
        self.support = support
        self.iterations = iterations
        self.label_weight = label_weight
        self.covariance = covariance
        self.p = p  # the paper's letter
        self.calibration = calibration
        self.rule = rule
        self.blur = blur
        self.part = part
        self.chunk = chunk
        self.workers = workers
        self.allow_reconstruction = allow_reconstruction

    def support_for(self, samples: Mapping[int, int]) -> int:
        """Return the number of support points for clients with ``{id: number of samples}``."""
        support = DEFAULT_SUPPORT if self.support is None else self.support
        clients_by_size = {size: client for client, size in samples.items() if size}
        if self.allow_reconstruction or not clients_by_size:
            return support

        # With too many support points, a client's samples could be reconstructed.
        fewest_samples = min(clients_by_size)
        largest_safe_support = safe_support(fewest_samples)
        if self.support is None and largest_safe_support:
            support = min(support, largest_safe_support)
        check_support(support, fewest_samples, f"client {clients_by_size[fewest_samples]}")
        return support

    def value(
        self,
        clients: Sequence[Client],
        server: LocalData | None,
        generator: torch.Generator | None,
        vector: Tensor | None = None,
        values_samples: bool = True,
        others: Mapping[int, int] | None = None,
    ) -> Valuation:
        """Value clients and, with ``values_samples``, their samples.

        Args:
            clients: the k clients.
            server: the server's data with the validation set. None: the target is the clients' barycenter.
            generator: random generator. None: torch's default generator.
            vector: the current global model ``[P]``, for features that need it. None: there is no model yet.
            values_samples: whether the clients also value their samples.
            others: ``{client id: number of samples}`` of clients that are valued at other times. They, too, limit the
                default number of support points: distances with different numbers of points are not comparable.

        Returns:
            The clients' distances and, with ``values_samples``, numbers of flagged samples.
        """
        key = object()  # of what this valuation stores in the clients' memory
        seed = int(torch.randint(2**62, (1,), generator=generator))
        server_samples = None if server is None else server.samples("val")
        server_inputs = None if server_samples is None else server_samples[0]
        self.features.fit(server_inputs, clients)
        embed = partial(_embed, features=self.features, vector=vector)
        enter = partial(client_functions.enter, key=key, embed=embed, valuer=self)
        try:
            # One client after the other: all use the features' network, which uses all cores itself.
            first_responses = map_clients(clients, lambda client: client.request(enter))
            response_by_client = dict(zip(clients, first_responses))
            sizes = {client.id: reply.samples for client, reply in response_by_client.items()}
            support = self.support_for({**(others or {}), **sizes})
            exchange = _Exchange(key, seed, support)
            responses = {
                client: reply for client, reply in response_by_client.items() if reply.samples
            }
            if server is None or server_samples is None:
                target = self._barycenter(responses, exchange)
            else:
                x, y = server_samples
                target = self._server_points(embed(server, x), y, responses)

            value_client = partial(
                self._value_client, target=target, exchange=exchange, values_samples=values_samples
            )
            with ThreadPoolExecutor(self.workers or os.cpu_count()) as pool:
                values = map_clients(list(responses), value_client, pool.map)
        finally:
            map_clients(clients, lambda client: client.request(client_functions.leave, key))
        value_by_client = dict(zip(responses, values))
        return _valuation(clients, first_responses, value_by_client, support)

    def _barycenter(
        self,
        responses: Mapping[Client, FirstResponse],
        exchange: _Exchange,
    ) -> Tensor:
        self._check_features(responses)
        barycenter_clients = []
        num_samples = []
        for client, response in responses.items():
            barycenter_clients.append(_BarycenterClient(client, exchange.key, response.dim))
            num_samples.append(float(response.samples))
        barycenter = wasserstein_barycenter(
            barycenter_clients,
            support=exchange.support,
            iterations=self.iterations,
            weights=torch.tensor(num_samples),
            # Another name would draw other numbers.
            generator=generator_for(exchange.seed, "barycentre"),
            p=self.p,
        )
        return barycenter.support_points

    def unflagged(self, data: Any, generator: torch.Generator) -> list[Tensor]:
        """Value the samples of a data module's clients, and return which of them are not flagged.

        Args:
            data: a :class:`flsv.FederatedDataModule` after ``setup``.
            generator: generator of all random numbers.

        Returns:
            For each client which of its m training samples are not flagged, bool ``[m]``.

        Raises:
            ConfigurationError: see :meth:`value`.
        """
        clients, server = participants_of(data)
        self.value(clients, server, generator)
        return [client.request(_unflagged_samples) for client in clients]

    def _server_points(
        self,
        features: Tensor,
        y: Tensor,
        responses: Mapping[Client, FirstResponse],
    ) -> Tensor:
        """Return the server's samples as points ``[m', d']``: those with ``features [m, d]`` and classes ``y [m]`` that
        are finite, with their classes embedded. Check that the clients have as many features.
        """
        x = features.detach().float().cpu()
        is_finite = x.isfinite().all(1)
        if not is_finite.any():
            raise ConfigurationError("no sample of the server's validation set is finite.")
        labels = y.cpu()[is_finite]
        points, _statistics = client_functions.embed_labels(x[is_finite], labels, self)
        self._check_features(responses, features.shape[1])
        return points

    def _check_features(
        self,
        responses: Mapping[Client, FirstResponse],
        num_server_features: int | None = None,
    ) -> None:
        """Raise ConfigurationError if no client has samples, or if participants have different numbers of features."""
        if not responses:
            raise ConfigurationError(
                "no client has a sample that is finite, so there is nothing to value."
            )
        features_by_owner = {
            f"client {client.id}": response.features for client, response in responses.items()
        }
        if num_server_features is not None:
            features_by_owner["the server"] = num_server_features
        if len(set(features_by_owner.values())) > 1:
            counts = listed(f"{name} has {count}" for name, count in features_by_owner.items())
            raise ConfigurationError(
                f"{self.features!r}: all samples need the same number of features, but {counts}. Give all inputs one "
                "shape."
            )

    def _value_client(
        self,
        client: Client,
        target: Tensor,
        exchange: _Exchange,
        values_samples: bool,
    ) -> tuple[Tensor, int | None]:
        """Compute one client's distance and, if wanted, how many samples it flags, by exchanges with the client."""
        # The paper's letters: gamma are points that the client gets, eta points between gamma and one side's samples.
        server = TransportServer(target, p=self.p)
        generator = generator_for(exchange.seed, "support", client.id)
        gamma = server.start(exchange.support, generator)
        for _ in range(self.iterations):
            eta, distance = client.request(client_functions.respond, exchange.key, gamma)
            gamma = server.step(eta, distance)
        if not values_samples:
            return server.distance, None

        assert server.eta is not None
        num_flagged = client.request(
            client_functions.value_samples, exchange.key, server.eta, self, exchange.seed
        )
        return server.distance, num_flagged


@dataclass(frozen=True)
class _Exchange:
    """Key, seed and number of support points of a valuation, the same in the exchanges with all clients."""

    key: object
    seed: int
    support: int


@dataclass(frozen=True)
class _BarycenterClient:
    """Adapter of a client for :func:`flsv.functional.wasserstein_barycenter`."""

    client: Client
    key: object
    dim: int

    def respond(self, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return self.client.request(client_functions.respond, self.key, gamma)


def _valuation(
    clients: Sequence[Client],
    first_responses: Sequence[FirstResponse],
    value_by_client: Mapping[Client, tuple[Tensor, int | None]],
    support: int,
) -> Valuation:
    no_value = (torch.tensor(torch.nan), None)
    distances = []
    flagged_counts = []
    for client, response in zip(clients, first_responses):
        distance, flagged_count = value_by_client.get(client, no_value)
        if flagged_count is None:  # the samples were not valued
            flagged_count = response.broken
        distances.append(distance)
        flagged_counts.append(flagged_count)
    return Valuation(
        clients=tuple(client.id for client in clients),
        samples=torch.tensor([response.samples for response in first_responses]),
        broken=torch.tensor([response.broken for response in first_responses]),
        distances=torch.stack(distances),
        flagged=torch.tensor(flagged_counts),
        support=support,
    )


def _embed(
    local: LocalData,
    x: Tensor,
    features: Features,
    vector: Tensor | None,
) -> Tensor:
    module = None
    if features.needs_model and vector is not None:
        module = local.module(vector)
    return features(x, module)


def clients_of(
    sets: Sequence[tuple[Tensor, Tensor]], num_classes: int | None = None
) -> list[Client]:
    """Make one client from each pair of samples and their classes.

    Args:
        sets: samples ``[m, ...]`` and classes ``[m]`` of each client, which may have none.
        num_classes: number of classes. None: the largest class plus one.

    Example:
        >>> (client,) = clients_of([(torch.zeros(3, 2), torch.tensor([0, 1, 1]))])
        >>> client.request(lambda local: local.class_counts)
        tensor([1, 2])
    """
    labels_by_client = [y.long().cpu() for _x, y in sets]
    if not num_classes:
        all_labels = torch.cat(labels_by_client)
        num_classes = int(all_labels.max()) + 1 if len(all_labels) else 1
    counts_by_client = [labels.bincount(minlength=num_classes) for labels in labels_by_client]
    class_counts = torch.stack(counts_by_client)  # [n, M]

    return [
        _client(client_id, partial(_train_only, x, y), class_counts)
        for client_id, (x, y) in enumerate(sets)
    ]


def server_of(x: Tensor, y: Tensor) -> LocalData:
    """Make the server's data with validation samples ``[m, ...]`` of classes ``[m]``."""
    batches = []
    num_classes = 1
    if len(y):
        batches = [(x, y)]
        num_classes = int(y.max()) + 1
    no_training_samples = torch.zeros(num_classes, dtype=torch.long)
    return LocalData(
        "the server",
        lambda split: batches,
        no_training_samples,
        no_training_samples,
        guarded=False,
    )


def _unflagged_samples(local: LocalData) -> Tensor:
    values = client_functions.sample_values(local)
    return ~values.flagged


def participants_of(
    data: Any, device: str | torch.device = "cpu"
) -> tuple[list[Client], LocalData | None]:
    """Return a data module's clients, and the server's data, which are None without a validation set.

    Args:
        data: a :class:`flsv.FederatedDataModule` after ``setup``.
        device: device to which samples are moved, and on which their features are computed. Transport runs on the CPU.

    Raises:
        ConfigurationError: the samples have no classes.
    """
    why_no_classes = getattr(data, "no_classes", None)
    if why_no_classes is not None:
        raise need_classes(
            "samples are valued together with their classes",
            why_no_classes,
            "leave the valuation out",
        )

    def batches_of_client(client_id: int, split: Split) -> Iterable[Any]:
        return _moved(data.client_loader(client_id, split, shuffle=False), device)

    clients = []
    for client_id in range(data.num_clients):
        batches = partial(batches_of_client, client_id)
        clients.append(_client(client_id, batches, data.class_counts))
    return clients, _server_with(data, device)


def _moved(batches: Iterable[Any], device: str | torch.device) -> Iterable[Any]:
    return (move_data_to_device(batch, torch.device(device)) for batch in batches)


def _server_with(data: Any, device: str | torch.device) -> LocalData | None:
    validation_loader = data.val_dataloader()
    if not validation_loader:
        return None
    no_samples = torch.zeros_like(data.class_counts[0])  # of the training set
    return LocalData(
        "the server",
        lambda split: _moved(validation_loader, device),
        class_counts=no_samples,
        federation_class_counts=no_samples,
        guarded=False,
    )


def _client(
    client_id: int,
    batches: Callable[[Split], Iterable[Any]],
    class_counts: Tensor,
) -> Client:
    local = LocalData(f"client {client_id}", batches, class_counts[client_id], class_counts.sum(0))
    return Client(client_id, local)


def _train_only(
    x: Tensor,
    y: Tensor,
    split: Split,
) -> list[tuple[Tensor, Tensor]]:
    if split == "train" and len(y):
        return [(x, y)]
    return []
