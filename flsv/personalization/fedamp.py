"""FedAMP: each client starts from an average of all clients' models, in which models similar to its own weigh more.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021: equation 4 and Algorithm 1
(FedAMP), equation 6 (HeurFedAMP). The clients' part of the method, the term lambda / (2 alpha) |w - u_i|^2 of equation
5, where u_i is client i's start point, is ``flsv.training.algorithms.FedProx(mu=lambda / alpha, anchor="start")``:
``configs/fedamp.yaml``.

Departures, and choices that the paper leaves open:

- Clients also start their training from u_i, not from their last model.
- The paper requires an alpha small enough for the weights to be a convex combination. With a larger alpha, the weights
  of the other clients' models are scaled down to sum to 1, and the weight of the client's own model is 0.
- Distances and cosines are computed over the parameters. BatchNorm's statistics are averaged with the same weights.
- For an absent client the model that it sent last is used, and its start point is updated as well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.common_columns import keep_common
from flsv.personalization.base import Starts
from flsv.personalization.upload_keeper import UploadKeeper
from flsv.utilities.declared import NonNegative, Positive, Share


class FedAMP(UploadKeeper):
    """Personalizer that starts each client from an attention-weighted average of all clients' models.

    Client i's start point is u_i = (1 - sum_{j != i} xi_ij) w_i + sum_{j != i} xi_ij w_j with the attention weights

        xi_ij = alpha A'(|w_i - w_j|^2),  where A' is the derivative of A(x) = 1 - exp(-x / sigma).

    w_i is the last model that client i uploaded. The personalized model is the model that the client has trained from
    u_i. Evaluate it with ``ClientEvaluation(models="trained")``.

    Args:
        alpha: step size of the message passing. alpha / sigma is the largest possible weight of another client's model.
        sigma: squared distance of two models at which the attention is 1/e of its maximum.

    Raises:
        ConfigurationError: an argument is not above 0.

    Example:
        >>> amp = FedAMP(alpha=1.0, sigma=4.0)
        >>> amp.attention(torch.tensor([[0.0], [2.0]]))
        tensor([[0.9080, 0.0920],
                [0.0920, 0.9080]], dtype=torch.float64)
    """

    def __init__(self, alpha: Positive = 1e4, sigma: Positive = 1e6) -> None:
        super().__init__()
        self.alpha = alpha
        self.sigma = sigma

    def attention(self, parameters: Tensor) -> Tensor:
        """Compute each client's attention weights of all models, float64 ``[m, m]``, from m clients' parameters
        ``[m, P]``.

        Row i has the weights of all models in client i's start point. It sums to 1.
        """
        points = parameters.double()
        distances = torch.cdist(points, points, compute_mode=_EXACT_MODE)  # [m, m]
        similarities = torch.exp(-(distances**2) / self.sigma)
        attractions = self.alpha / self.sigma * similarities
        attractions.fill_diagonal_(0)

        # A row of weights sums to at most 1. The rest is the weight of a client's own model.
        totals = attractions.sum(1, keepdim=True)
        weights_of_others = attractions / totals.clamp_min(1)
        self_weights = 1 - weights_of_others.sum(1)
        return weights_of_others + torch.diag(self_weights)

    def personalize(
        self,
        round: Round,
        contributions: Contributions,
        models: Starts,
    ) -> Starts:
        self.store_uploads(round)
        uploads = [upload.to(round.client_vectors) for upload in self._uploads.values()]
        uploaded_models = torch.stack(uploads)
        weights = self.attention(uploaded_models[:, : round.space.num_parameters])
        mixed_models = weights.to(uploaded_models) @ uploaded_models
        initial_models = keep_common(mixed_models, uploaded_models)
        return dict(zip(self._uploads, initial_models))


class HeurFedAMP(FedAMP):
    """FedAMP with the paper's heuristic for deep networks. Attention is by cosine, and a client's own model has a fixed
    weight.

        xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h))

    is the weight of client j's model w_j in the start point of client i.

    Args:
        self_weight: xi_ii, the weight of a client's own model, in [0, 1].
        sigma: preference for similar models, at least 0. With 0 all other models have equal weights.

    Raises:
        ConfigurationError: ``self_weight`` lies outside [0, 1], or ``sigma`` is negative.

    Example:
        >>> HeurFedAMP(self_weight=0.5, sigma=2.0).attention(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))[0]
        tensor([0.5000, 0.4404, 0.0596], dtype=torch.float64)
    """

    def __init__(self, self_weight: Share = 0.5, sigma: NonNegative = 100.0) -> None:
        UploadKeeper.__init__(self)
        self.self_weight = self_weight
        self.sigma = sigma

    def attention(self, parameters: Tensor) -> Tensor:
        points = parameters.double()
        count = len(points)
        identity = torch.diag(points.new_ones(count))
        if count == 1:
            return identity
        directions = F.normalize(points, dim=1)
        similarities = self.sigma * directions @ directions.T  # [m, m]
        similarities.fill_diagonal_(-torch.inf)  # the softmax gives a client's own model 0
        other_weights = (1 - self.self_weight) * similarities.softmax(1)
        return other_weights + self.self_weight * identity


# Distances are computed from differences, since inner products would lose small distances in rounding.
_EXACT_MODE = "donot_use_mm_for_euclid_dist"
