"""FedAMP: clients with similar models start from weighted averages of these.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021: equation 4 and Algorithm 1
(FedAMP), equation 6 (HeurFedAMP). The clients' part, the term lambda / (2 alpha) |w - u_i|^2 of equation 5, is
``flsv.training.algorithms.FedProx(mu=lambda / alpha, anchor="start")``: ``configs/fedamp.yaml``.

Where the paper is silent, or we depart:

- Clients also start their training from u_i, not from their last model.
- The paper requires an alpha small enough for the weights to be a convex combination. With a larger alpha, a client's
  weights of the others are scaled down to sum to 1, and its own is 0.
- Distances and cosines are computed over the parameters; BatchNorm's statistics are averaged with the same weights.
- Absent clients count with their last upload, and their u_i follows the others'.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional.common_entries import keep_common
from flsv.personalization.base import Starts
from flsv.personalization.upload_keeper import UploadKeeper
from flsv.utilities.declared import NonNegative, Positive, Share


class FedAMP(UploadKeeper):
    """Personalizer with start points u_i = (1 - sum_j xi_ij) w_i + sum_{j != i} xi_ij w_j and attention

        xi_ij = alpha A'(|w_i - w_j|^2),  A(x) = 1 - exp(-x / sigma).

    w_i is client i's last upload. The personalized model is the result of a client's training from u_i: evaluate it
    with ``ClientEvaluation(models="trained")``.

    Args:
        alpha: the step of the message passing; alpha / sigma is the greatest weight of another client.
        sigma: the squared distance at which the attention has fallen to 1/e.

    Raises:
        ConfigurationError: an argument that is not above 0.

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
        """Compute xi, float64 ``[m, m]`` with rows that sum to 1, from m clients' parameters ``[m, P]``."""
        squared = torch.cdist(parameters.double(), parameters.double(), compute_mode=_EXACT) ** 2
        others = (self.alpha / self.sigma * torch.exp(-squared / self.sigma)).fill_diagonal_(0)
        others = others / others.sum(1, keepdim=True).clamp_min(1)
        return others + torch.diag(1 - others.sum(1))

    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        self.store_uploads(round)
        vectors = torch.stack([upload.to(round.client_vectors) for upload in self._uploads.values()])
        weights = self.attention(vectors[:, : round.space.num_parameters])
        return dict(zip(self._uploads, keep_common(weights.to(vectors) @ vectors, vectors)))


class HeurFedAMP(FedAMP):
    """FedAMP with the paper's heuristic for deep networks: attention by cosine, and a fixed weight of the own model.

        xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)).

    Args:
        self_weight: xi_ii, in [0, 1].
        sigma: preference for more similar models; 0: equal weights.

    Raises:
        ConfigurationError: a self_weight outside of [0, 1]; a negative sigma.

    Example:
        >>> HeurFedAMP(self_weight=0.5, sigma=2.0).attention(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))[0]
        tensor([0.5000, 0.4404, 0.0596], dtype=torch.float64)
    """

    def __init__(self, self_weight: Share = 0.5, sigma: NonNegative = 100.0) -> None:
        UploadKeeper.__init__(self)
        self.self_weight = self_weight
        self.sigma = sigma

    def attention(self, parameters: Tensor) -> Tensor:
        count = len(parameters)
        if count == 1:
            return torch.ones(1, 1, dtype=torch.float64, device=parameters.device)
        unit = F.normalize(parameters.double(), dim=1)
        others = (self.sigma * unit @ unit.T).fill_diagonal_(-torch.inf).softmax(1)
        own = torch.eye(count, dtype=torch.float64, device=parameters.device)
        return (1 - self.self_weight) * others + self.self_weight * own


# Distances from differences of entries: from inner products, distances of close models would be lost in rounding.
_EXACT = "donot_use_mm_for_euclid_dist"
