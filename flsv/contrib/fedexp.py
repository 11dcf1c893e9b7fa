"""FedExP: FedAvg whose server takes longer steps if the clients' updates disagree.

Paper: Jhunjhunwala, Wang and Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023,
Algorithm 1, https://arxiv.org/abs/2301.09604
Owner: the flsv contributors
"""

from __future__ import annotations

from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.core import Contributions, Round
from flsv.utilities.declared import Positive


class FedExP(FedAvg):
    r"""FedAvg with an extrapolated step. The next global model is :math:`x + \eta \sum_k w_k d_k`, with

    .. math::
        \eta = \max\Bigl(1, \frac{\sum_k w_k |d_k|^2}{2 (|\sum_k w_k d_k|^2 + \epsilon)}\Bigr).

    Here x is the global model, d_k client k's update, and w_k its share of the cohort's samples (in the paper 1/k). The
    lengths are those of parameters. Buffers (BatchNorm's statistics) are averaged with weights w_k. The paper reports
    the mean of the last two global models. This class leaves the last one as it is.

    When not to use it:
        If clients are alike, or one takes part at a time, since it is FedAvg then. If some updates are long because of
        errors or attacks, since they lengthen the step.

    Args:
        epsilon: constant that bounds the step if updates cancel each other, in squared units of the parameters. The
            paper tunes it for each data set.

    Raises:
        ConfigurationError: ``epsilon`` is not positive.

    Example:
        >>> FedExP(epsilon=0.01)
        FedExP(epsilon=0.01)
    """

    def __init__(self, epsilon: Positive = 1e-3) -> None:
        super().__init__()
        self.epsilon = epsilon

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        shares = super().weights(round, contributions)
        parameters = round.matrix.first_columns(round.space.num_parameters)
        mean_update = parameters.combine(shares).double()
        squared_lengths = parameters.norms().double().square()

        mean_squared_length = shares @ squared_lengths.to(shares)
        squared_length_of_mean = mean_update.square().sum()
        extrapolation = mean_squared_length / (2 * (squared_length_of_mean + self.epsilon))
        return shares * extrapolation.clamp(min=1.0)
