"""Optimal transport between data sets: distances, the federated protocol, and values of clients and samples."""

from flsv.functional.transport.barycenter import (
    FederatedBarycenter,
    wasserstein_barycenter,
)
from flsv.functional.transport.cost import (
    ClassStatistics,
    check_support,
    class_statistics,
    label_augmented_cost,
    label_distance,
    label_embedding,
    safe_support,
)
from flsv.functional.transport.federated import (
    FederatedDistance,
    TransportClient,
    TransportServer,
    federated_wasserstein,
    interpolating_measure,
)
from flsv.functional.transport.solvers import (
    calibrated_gradient,
    contribution_shares,
    debiased_potential,
    wasserstein_distance,
)
from flsv.functional.transport.values import (
    class_distances,
    client_values,
    direct_values,
    knn_shapley,
    lava,
)

__all__ = [
    "ClassStatistics",
    "FederatedBarycenter",
    "FederatedDistance",
    "TransportClient",
    "TransportServer",
    "calibrated_gradient",
    "check_support",
    "class_distances",
    "class_statistics",
    "client_values",
    "contribution_shares",
    "debiased_potential",
    "direct_values",
    "federated_wasserstein",
    "interpolating_measure",
    "knn_shapley",
    "label_augmented_cost",
    "label_distance",
    "label_embedding",
    "lava",
    "safe_support",
    "wasserstein_barycenter",
    "wasserstein_distance",
]
