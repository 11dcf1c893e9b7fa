"""FedFomo: every client weighs the others' models by how much they lower its own validation loss.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021, equation 3, and section
3.2 for which models a client downloads.

Where the paper is silent, or we depart:

- The affinities P are running sums of equation 3's weights before negative ones are cut off, scaled so that one
  round's magnitudes sum to 1: otherwise the first rounds, whose losses fall the fastest, would outweigh all later ones.
- Distances are taken over the parameters; BatchNorm's statistics are averaged with the same weights.
- A client downloads the last upload of an absent client.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import Client, FederationState, LocalData, Round
from flsv.core.strategy import Contributions, Federation
from flsv.functional.common_entries import keep_common
from flsv.games.performance import Mode, ModelScore, performance_of
from flsv.personalization.base import OWN_MODEL, Personalized, Starts
from flsv.personalization.upload_keeper import UploadKeeper, check_validation, judged
from flsv.utilities.declared import Count, NonNegative, Share
from flsv.utilities.seeding import generator_for


class FedFomo(UploadKeeper):
    """Client i continues from sum_j w_ij x_j over its own model and the downloaded ones.

    With theta_i the model that the client started this round from and L_i its validation loss (equation 3),

        w_ij = max((L_i(theta_i) - L_i(x_j)) / |x_j - theta_i|, 0),  normalized to sum to 1;

    if no model is better than theta_i, the client keeps theta_i. Downloads are chosen by affinity, ties at random; each
    of them is instead any other client's with a probability that falls from round to round. A client outside the cohort
    keeps the model it has.

    The round's ``peer_values`` are the weights before negative ones are cut off, in [-1, 1].

    Args:
        num_downloads: M, other clients' models that a client downloads per round.
        epsilon: chance that a download is a random one, in the first round.
        epsilon_decay: by how much ``epsilon`` falls per round.
        performance: minus L_i: the cross-entropy's, or for other tasks a value that the module logs when it validates
            (``"val_loss"``) or a torchmetrics metric; see :mod:`flsv.games.performance`.
        mode: whether less (``"min"``) or more of a logged value is better.

    Raises:
        ConfigurationError: a wrong argument; before training, a client without validation samples, or a value that is
            not logged.

    Example:
        >>> FedFomo(num_downloads=3)
        FedFomo(num_downloads=3)
    """

    gives_peer_values = True
    saved = ("_uploads", "_affinity")

    evaluates = True

    def __init__(
        self,
        num_downloads: Count = 5,
        epsilon: Share = 0.3,
        epsilon_decay: NonNegative = 0.05,
        performance: str | Metric = "negative_loss",
        mode: Mode | None = None,
    ) -> None:
        super().__init__()
        self.num_downloads = num_downloads
        self.epsilon = epsilon
        self.epsilon_decay = epsilon_decay
        self.performance = performance_of(self, performance, mode)
        self._affinity = torch.zeros(0, 0)

    def begin(self, federation: Federation) -> None:
        check_validation(self, federation)
        super().begin(federation)
        self._affinity = torch.zeros(federation.num_clients, federation.num_clients, dtype=torch.float64)

    def resume(self, federation: Federation) -> None:
        super().resume(federation)
        self._affinity = self._affinity.cpu()

    def start(self, client: int, state: FederationState) -> Tensor | None:
        # Who has uploaded has mixed a model of its own since.
        return None if client in self._uploads else state.model()

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Personalized:
        before = self.take(round)
        question = partial(mix_models, performance=self.performance)

        def mix(client: Client) -> tuple[list[int], Tensor | None]:
            chosen = self._choose(client.id, round)
            others = [self._uploads[other].to(round.client_vectors) for other in chosen]
            return chosen, judged(client, question, others, round.space.num_parameters)

        nothing = torch.full((len(round), len(self._affinity)), float("nan"), dtype=torch.float64)
        values = self.judge_all(nothing, round, mix, before)
        self._affinity = self._affinity.index_add(0, round.client_ids.cpu(), values.nan_to_num(0.0))
        return Personalized(peer_values=values.to(round.client_ids.device))

    def _choose(self, client: int, round: Round) -> list[int]:
        """Whose models the client downloads."""
        draw = generator_for(round.seed, "fedfomo", round.round_index, client)
        epsilon = self.epsilon - self.epsilon_decay * round.round_index
        others = sorted(other for other in self._uploads if other != client)
        shuffled = [others[place] for place in torch.randperm(len(others), generator=draw).tolist()]
        ranked = sorted(shuffled, key=lambda other: -float(self._affinity[client, other]))
        chosen: list[int] = []
        while ranked and len(chosen) < self.num_downloads:
            explore = float(torch.rand((), generator=draw)) < epsilon
            chosen.append(ranked.pop(int(torch.randint(len(ranked), (), generator=draw)) if explore else 0))
        return chosen


def mix_models(
    local: LocalData, others: list[Tensor], num_parameters: int, performance: str | ModelScore = "negative_loss"
) -> Tensor:
    """At the client: signed weights ``[1 + s]`` of its own and of the s others' models. It keeps its next model."""
    assert local.model is not None
    assert local.start is not None
    start = local.start
    models = torch.stack([local.model, *others])
    losses = -local.utility(torch.cat([start[None], models]), performance)
    distances = torch.linalg.vector_norm((models - start)[:, :num_parameters], dim=1)
    signed = first_order_weights(losses[0], losses[1:], distances.to(losses))
    weights = signed.clamp_min(0)
    shares = (weights / weights.sum()).to(models)
    mixed = keep_common(shares @ models, models) if weights.sum() > 0 else start.clone()
    local.state[OWN_MODEL] = mixed
    return signed / signed.abs().sum().clamp_min(torch.finfo(signed.dtype).tiny)


def first_order_weights(start_loss: Tensor, losses: Tensor, distances: Tensor) -> Tensor:
    """Equation 3 with its sign: (L(theta) - L(x_j)) / |x_j - theta|; 0 for the model theta itself and a broken one.

    Args:
        start_loss: L(theta), a scalar.
        losses: ``[s]``, L(x_j).
        distances: ``[s]``, |x_j - theta|.

    Example:
        >>> first_order_weights(torch.tensor(2.0), torch.tensor([1.0, 2.5, 2.0]), torch.tensor([4.0, 0.5, 0.0]))
        tensor([ 0.2500, -1.0000,  0.0000])
    """
    weights = (start_loss - losses) / distances
    return torch.where((distances > 0) & weights.isfinite(), weights, 0.0)
