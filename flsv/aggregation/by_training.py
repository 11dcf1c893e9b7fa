"""Aggregators whose weights are made of how and on what clients have trained.

FedNova: averages updates per local step, so that clients with more steps do not dominate.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020,
equations 4 to 6 and section 4.

Departures:

- p_i is the client's share of the *cohort's* samples, as in FedAvg here.
- tau_eff is the paper's default, sum_i p_i |a_i|; its other choices are a factor on ``FedNova(server_lr=...)``.
- Of the local solvers, SGD and SGD with momentum; not the proximal one.

FedBuff: the server steps when K updates have arrived, each trained from a possibly older model.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1, with the
staleness weights of its experiments.

A simulation of it in rounds. A round is a full buffer: its cohort are the K clients whose updates have arrived, drawn
by the sampler. Each of them has trained from the model that it downloaded when its update before this one arrived; in
between, the server has made tau steps. Where the paper draws the durations of training, here the sampler decides: a
client that is drawn rarely is a slow one. Training itself happens in the round of arrival, which changes nothing but
the clock; everybody's first update starts from the current model.

DivergenceWeighted: weights by number of samples, less for clients with skewed labels.

Guo et al., "A Fair Contribution Measurement Method for Federated Learning", Sensors 24(15), 2024, equations 5 to 7.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.aggregation.base import Aggregator
from flsv.core import LocalData, Round
from flsv.core.strategy import Contributions, Federation
from flsv.functional.divergences import Divergence, divergence_weights, label_divergence
from flsv.personalization import Personalizer
from flsv.personalization.base import Starts
from flsv.utilities.declared import NonNegative, Positive
from flsv.utilities.errors import ConfigurationError


class FedNova(Aggregator):
    r"""x + tau_eff sum_i p_i (x_i - x) / |a_i|, with tau_eff = sum_i p_i |a_i|.

    After tau_i steps of SGD with momentum rho from an empty buffer, x_i - x = -lr sum_k a_ik g_ik with
    a_ik = (1 - rho^(tau_i - k)) / (1 - rho), k = 0 .. tau_i - 1: |a_i|, their sum, is tau_i without momentum. Rho is
    read off the clients' optimizer. Clients with equal numbers of steps are averaged as by FedAvg. The learning rate is
    taken to be the same for all steps of a round, and ``FederatedLoop(optimizer_state="reset")``, the default, to be
    left alone.

    Buffers (BatchNorm's statistics) are averaged in proportion to p_i / |a_i|.

    Raises:
        ConfigurationError: before training, another optimizer than SGD, Nesterov momentum or dampening; a client
            algorithm, which changes what a local step is.

    Example:
        >>> FedNova()
        FedNova()
        >>> step_norm(torch.tensor([1, 2, 3]), momentum=0.5)
        tensor([1.0000, 2.5000, 4.2500], dtype=torch.float64)
    """

    momentum = 0.0
    of_clients = True

    def begin(self, federation: Federation) -> None:
        self.resume(federation)

    def resume(self, federation: Federation) -> None:
        groups = [group for optimizer in federation.optimizers for group in optimizer.param_groups]
        sgd = [type(optimizer) for optimizer in federation.optimizers] == [torch.optim.SGD]
        if not sgd or any(g["nesterov"] or g["dampening"] for g in groups) or len({g["momentum"] for g in groups}) > 1:
            raise ConfigurationError(
                f"{self!r} must know what a local step adds to an update: it needs one torch.optim.SGD, momentum "
                f"or not, without nesterov and dampening, and the module configures {list(federation.optimizers)}."
            )
        algorithm = federation.strategies.get("client_algorithm")
        if getattr(algorithm, "changes_steps", False):
            raise ConfigurationError(
                f"{self!r} divides by the number of plain SGD steps, and {algorithm!r} changes the steps. Leave "
                "client_algorithm out."
            )
        self.momentum = float(groups[0]["momentum"])

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        assert round.num_steps is not None
        share = round.num_samples.double() / round.num_samples.sum()
        norms = step_norm(round.num_steps, self.momentum)
        return (share * norms).sum() * share / norms.clamp_min(1)  # without a step there is no update to weigh


def step_norm(num_steps: Tensor, momentum: float) -> Tensor:
    """float64 ``[k]``: |a_i|, the weights of a client's gradients in its update, added up, for ``num_steps [k]``."""
    steps = num_steps.double()
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class FedBuff(Aggregator):
    """x + 1/K sum_i s(tau_i) d_i over the cohort's updates d_i, with s(tau) = 1 / (1 + tau)^exponent.

    The weights do not sum to 1, as in the paper: what is stale moves the model less. Buffers (BatchNorm's statistics)
    are averaged with weights that do. ``server_lr`` is the paper's server learning rate. It goes with
    :class:`StaleStarts`, which gives the clients their old models: ``configs/fedbuff.yaml``.

    Args:
        exponent: how much staleness counts; the paper's is 0.5, and with 0 it does not.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: a negative exponent; before training, another personalizer.

    Example:
        >>> FedBuff()
        FedBuff()
    """

    of_clients = True
    saved = ("_versions",)

    def __init__(self, exponent: NonNegative = 0.5, *, server_lr: Positive = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.exponent = exponent
        self._versions: dict[int, int] = {}

    def begin(self, federation: Federation) -> None:
        self.resume(federation)
        self._versions = {}

    def resume(self, federation: Federation) -> None:
        if not isinstance(federation.strategies.get("personalizer"), StaleStarts):
            raise ConfigurationError(
                f"{self!r}: clients would start from the current model, and not from the one that they downloaded when "
                "they sent their last update. Set personalizer: flsv.aggregation.StaleStarts."
            )

    def staleness(self, round: Round) -> Tensor:
        """int64 ``[k]``: how many steps the server has made since each client downloaded its model."""
        now, ids = round.round_index, round.client_ids.tolist()
        # Who has sent nothing yet started from the current model.
        steps = [now - self._versions.get(client, now) for client in ids]
        return torch.tensor(steps, device=round.client_ids.device)

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        return (1.0 + self.staleness(round).double()).pow(-self.exponent) / len(round)

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        weights = self.weights(round, contributions).to(round.client_vectors)
        vector, cut = round.combine(weights), round.space.num_parameters  # its buffers are those of the next model
        vector[:cut] = round.global_vector[:cut] + round.matrix.combine(weights, cut)
        return vector, weights

    def end_round(self, round: Round) -> None:
        self._versions.update(dict.fromkeys(round.client_ids.tolist(), round.round_index + 1))


class StaleStarts(Personalizer):
    """Starts each client from the global model of the round in which its last update arrived.

    The server holds these models, one for every client that has been in a cohort.

    Example:
        >>> StaleStarts()
        StaleStarts()
    """

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        assert round.server_vector is not None
        return dict.fromkeys(round.client_ids.tolist(), round.server_vector)


class DivergenceWeighted(Aggregator):
    """Weights proportional to N_k - a F_k + b; see :func:`flsv.functional.divergence_weights`.

    N_k is the client's share of the cohort's samples and F_k the divergence of its label distribution. Every client
    works F_k out itself: its class histogram stays where it is, and one number crosses to the server.

    Args:
        a: how much divergence counts against a client.
        b: what everybody gets.
        kind: of the divergence, ``"kl"`` (nats) or ``"l2"``.
        reference: what labels are compared with: ``"uniform"``, as in the paper, or ``"global"``, the whole
            federation's label counts, which clients are then told (as secure aggregation would give them).
        normalize_divergence: make the cohort's F sum to 1; with raw ones most of the paper's own weights are negative.
        server_lr: see :class:`flsv.aggregation.Aggregator`.

    Raises:
        ConfigurationError: another kind or reference; a or b not finite.

    Example:
        >>> DivergenceWeighted(a=0.5)
        DivergenceWeighted(a=0.5)
    """

    reports = ("label_divergence",)
    needs_classes = True

    def __init__(
        self,
        a: float = 0.6,
        b: float = 0.1,
        kind: Divergence = "kl",
        reference: Literal["uniform", "global"] = "uniform",
        normalize_divergence: bool = True,
        *,
        server_lr: Positive = 1.0,
    ) -> None:
        super().__init__(server_lr=server_lr)
        self.a = a
        self.b = b
        self.kind = kind
        self.reference = reference
        self.normalize_divergence = normalize_divergence

    def report(self, local: LocalData) -> dict[str, float]:
        reference: Literal["uniform"] | Tensor = local.population if self.reference == "global" else "uniform"
        return {"label_divergence": float(label_divergence(local.class_counts, self.kind, reference))}

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        if "label_divergence" not in round.reports:
            raise RuntimeError(f"{self!r}: the clients have not reported their label_divergence.")
        divergence = round.reports["label_divergence"]
        return divergence_weights(round.num_samples, divergence, self.a, self.b, self.normalize_divergence)
