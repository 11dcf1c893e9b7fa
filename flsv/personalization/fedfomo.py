"""FedFomo: every client weights the other clients' models by how much they reduce its own validation loss.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021, equation 3, and section
3.2 for the choice of downloads.

Departures, and choices that the paper leaves open:

- The affinities P are running sums of the signed weights of equation 3, whose magnitudes are scaled to sum to 1 in each
  round: otherwise the first rounds, in which losses fall fastest, would outweigh all later rounds.
- Distances are computed over the parameters. BatchNorm's statistics are averaged with the same weights.
- If a client is absent, others download the model that it sent last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.core import (
    Client,
    FederationState,
    LocalData,
    Numbers,
    RespondingClient,
    Round,
    declare_response,
)
from flsv.core.strategy import Contributions, FederationInfo
from flsv.functional.common_columns import keep_common
from flsv.personalization.base import OWN_MODEL, Personalized, Starts
from flsv.personalization.upload_keeper import UploadKeeper, check_validation, request_model_values
from flsv.scores.performance import Measure, Mode, performance_of
from flsv.utilities.declared import Count, NonNegative, Share
from flsv.utilities.seeding import generator_for


class FedFomo(UploadKeeper):
    """Personalizer in which clients mix their own and downloaded models. Client i starts its next round from sum_j w_ij
    x_j.

    With L_i the loss on the client's validation samples and theta_i its start point of this round (equation 3),

        w_ij = max((L_i(theta_i) - L_i(x_j)) / |x_j - theta_i|, 0), normalized to sum to 1.

    If no model is better than theta_i, the client keeps theta_i. A client downloads the models that had the largest sum
    of weights so far (affinity), ties in random order. Each download is instead a random client's model with
    probability ``epsilon``, which falls from round to round. A client outside the cohort keeps its model.

    The ``peer_values`` of the round are the signed weights: without the maximum, and with magnitudes that sum to 1.

    Args:
        num_downloads: number of other clients' models that a client downloads per round.
        epsilon: probability in the first round that a download is random.
        epsilon_decay: decrease of ``epsilon`` per round.
        performance: score that takes the place of -L_i. By default minus the cross-entropy. For tasks other than
            classification, it is the name of a value that the module logs in validation (``"val_loss"``) or a
            torchmetrics metric. See :mod:`flsv.scores.performance`.
        mode: whether lower (``"min"``) or higher (``"max"``) values of ``performance`` are better.

    Raises:
        ConfigurationError: at construction: an argument is out of range. Before training: a client has no validation
            samples, or ``performance`` is not logged.

    Example:
        >>> FedFomo(num_downloads=3)
        FedFomo(num_downloads=3)
    """

    gives_peer_values = True
    saved = ("_uploads", "_affinity")

    evaluates = True
    needs: Sequence[str] = ("clients",)

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

    @property
    def measure(self) -> Measure:  # type: ignore[override]  # follows from an argument
        """Return the performance measure by which models are scored."""
        return self.performance

    def set_up(self, federation: FederationInfo) -> None:
        check_validation(self, federation)

    def begin(self, federation: FederationInfo) -> None:
        super().begin(federation)
        self._affinity = torch.zeros(
            federation.num_clients, federation.num_clients, dtype=torch.float64
        )

    def resume(self, federation: FederationInfo) -> None:
        super().resume(federation)
        self._affinity = self._affinity.cpu()

    def start(self, client: int, state: FederationState) -> Tensor | None:
        if client in self._uploads:
            return None  # the client has stored its own mixture
        return state.model()

    def personalize(
        self, round: Round, contributions: Contributions, models: Starts
    ) -> Personalized:
        previous_uploads = self.store_uploads(round)
        shape = (len(round), len(self._affinity))
        no_values = torch.full(shape, float("nan"), dtype=torch.float64)
        values = self.collect_values(
            no_values,
            round,
            request_values=partial(self._value_peers, round=round),
            previous_uploads=previous_uploads,
        )
        # Add the round's values to the rows of its clients. Peers that were not downloaded have NaN.
        ids = round.client_ids.cpu()
        new_affinity = values.nan_to_num(0.0)
        self._affinity = self._affinity.index_add(0, ids, new_affinity)
        return Personalized(peer_values=values.to(round.client_ids.device))

    def _value_peers(
        self,
        client: Client,
        round: Round,
    ) -> tuple[list[int], Tensor | None]:
        peers = self._choose_peers(client.id, round)
        downloads = []
        for peer in peers:
            upload = self._uploads[peer]
            downloads.append(upload.to(round.client_vectors))
        compute = partial(mix_models, performance=self.performance.request)
        values = request_model_values(client, compute, downloads, round.space.num_parameters)
        return peers, values

    def _choose_peers(self, client: int, round: Round) -> list[int]:
        generator = generator_for(round.seed, "fedfomo", round.round_index, client)
        epsilon = self.epsilon - self.epsilon_decay * round.round_index
        peers = sorted(peer for peer in self._uploads if peer != client)
        # A stable sort by affinity after a random permutation keeps peers of equal affinity in random order.
        permutation = torch.randperm(len(peers), generator=generator).tolist()
        candidates = [peers[position] for position in permutation]
        affinity = self._affinity[client].tolist()
        candidates.sort(key=lambda peer: -affinity[peer])

        chosen_peers: list[int] = []
        while candidates and len(chosen_peers) < self.num_downloads:
            explores = float(torch.rand((), generator=generator)) < epsilon
            if explores:
                position = int(torch.randint(len(candidates), (), generator=generator))
            else:
                position = 0  # the peer of the highest affinity
            chosen_peers.append(candidates.pop(position))
        return chosen_peers


def _expected_weights(
    client: RespondingClient,
    downloads: Sequence[Tensor],
    num_parameters: int,
    performance: Any = "negative_loss",
) -> Numbers:
    """Return the type, shape and range that the weights of the own and the downloaded models must have."""
    num_models = 1 + len(downloads)
    return Numbers(torch.float64, (num_models,), lowest=-1, highest=1)


def mix_models(
    local: LocalData,
    downloads: list[Tensor],
    num_parameters: int,
    performance: str | Measure = "negative_loss",
) -> Tensor:
    """Mix a client's own and the downloaded models, at the client. Store the mixture there, and return the signed
    weights.
    """
    assert local.model is not None
    assert local.start is not None
    initial_model = local.start
    models = torch.stack([local.model, *downloads])  # [s, P]
    evaluated_models = torch.cat([initial_model[None, :], models])
    losses = -local.utility(evaluated_models, performance)  # [1 + s]
    updates = models - initial_model
    distances = torch.linalg.vector_norm(updates[:, :num_parameters], dim=1)  # [s]
    initial_loss = losses[0]
    signed_weights = first_order_weights(initial_loss, losses[1:], distances.to(losses))
    local.state[OWN_MODEL] = _mixture(models, signed_weights, initial_model)
    tiny = torch.finfo(signed_weights.dtype).tiny  # avoids 0 / 0
    sum_of_magnitudes = signed_weights.abs().sum().clamp_min(tiny)
    return signed_weights / sum_of_magnitudes


def _mixture(models: Tensor, signed_weights: Tensor, initial_model: Tensor) -> Tensor:
    weights = signed_weights.clamp_min(0)
    total = weights.sum()
    if total > 0:
        shares = (weights / total).to(models)
        return keep_common(shares @ models, models)
    return initial_model.clone()  # no model is better


declare_response(mix_models, _expected_weights, numbers=lambda clients, classes: clients)


def first_order_weights(
    start_loss: Tensor,
    losses: Tensor,
    distances: Tensor,
) -> Tensor:
    """Compute the weights of equation 3 of FedFomo, (L(theta) - L(x_j)) / |x_j - theta|.

    Example:
        >>> first_order_weights(torch.tensor(2.0), torch.tensor([1.0, 2.5, 2.0]), torch.tensor([4.0, 0.5, 0.0]))
        tensor([ 0.2500, -1.0000,  0.0000])
    """
    weights = (start_loss - losses) / distances
    is_valid = (distances > 0) & weights.isfinite()
    return torch.where(is_valid, weights, 0.0)
