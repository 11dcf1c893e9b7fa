"""ShapFedPersonalizer: clients with higher contributions start closer to the global model.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, equation 8 and Algorithm 1,
lines 5-6.
"""

from __future__ import annotations

import torch

from flsv.core import Round
from flsv.core.strategy import Contributions
from flsv.functional import participant_weights
from flsv.personalization.base import Personalizer, Starts
from flsv.utilities.host_copies import on_host


class ShapFedPersonalizer(Personalizer):
    """Personalizer with start points gamma_i x_s + (1 - gamma_i) x_i, as in ShapFed.

    x_s is the new global model, x_i the client's own model after local training, and gamma_i in [0, 1] its contribution
    by equation 6 of the paper up to and including this round, not normalized over clients. It is 1 if the client's
    updates point in the direction of the aggregate, 1/2 if they are orthogonal to it, and 0 if they are opposed.
    Buffers (BatchNorm's statistics) are mixed in the same way. With :class:`flsv.aggregation.ShapFedWA` this is the
    paper's method: ``configs/shapfed.yaml``.

    The paper assumes full participation. Here, a client outside the cohort keeps its model, a client that was in no
    cohort yet starts from the global model, and a client of the cohort without a contribution (NaN) gets the mean of
    the other clients' contributions.

    Args:
        metric: name of a :class:`flsv.metrics.ClassSpecificShapley` among the loop's metrics.

    Raises:
        ConfigurationError: before training: the values of the metric are not per class.

    Example:
        >>> ShapFedPersonalizer()
        ShapFedPersonalizer()
    """

    metric_shape = ("n", "M")

    def __init__(self, metric: str = "cssv") -> None:
        self.metric: str = metric

    def personalize(
        self,
        round: Round,
        contributions: Contributions,
        models: Starts,
    ) -> Starts:
        assert round.server_vector is not None
        class_values = contributions[self.metric]  # [n, M]
        cohort_values = class_values[round.client_ids.to(class_values.device)]
        server_shares, _ = participant_weights(cohort_values)  # gamma_i of the paper, [k]
        mean_share = server_shares.nanmean().nan_to_num(1.0)  # all are NaN: the server's model
        server_shares = server_shares.nan_to_num(float(mean_share)).to(round.client_vectors)
        next_models = {}
        ids = on_host(round.client_ids)
        for client, vector, share in zip(ids, round.client_vectors, server_shares):
            next_models[client] = torch.lerp(vector, round.server_vector, share)
        return next_models
