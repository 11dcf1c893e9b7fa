"""Optimal transport between data sets: distances, the federated protocol, and values of clients and samples."""

from flsv.functional.transport._checks import check_support, safe_support
from flsv.functional.transport.barycenter import (
    FederatedBarycenter,
    wasserstein_barycenter,
)
from flsv.functional.transport.cost import label_augmented_cost, label_embedding
from flsv.functional.transport.exact import contribution_shares, wasserstein_distance
from flsv.functional.transport.federated import (
    FederatedDistance,
    TransportClient,
    TransportServer,
    federated_wasserstein,
    interpolating_measure,
)
from flsv.functional.transport.lava import class_distances, knn_shapley, lava
from flsv.functional.transport.potentials import calibrated_gradient, debiased_potential
from flsv.functional.transport.statistics import ClassStatistics, class_statistics, label_distance
from flsv.functional.transport.values import client_values, direct_values, lava_values

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
    "lava_values",
    "safe_support",
    "wasserstein_barycenter",
    "wasserstein_distance",
]
