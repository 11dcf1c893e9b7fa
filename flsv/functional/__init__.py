"""The formulas of metrics and strategies, as functions on tensors that know no Lightning, clients, rounds or files."""

from flsv.functional.allocation import allocate
from flsv.functional.divergences import divergence_weights, label_divergence
from flsv.functional.fedce import contribution_estimates, leave_one_out_cosines, without_own
from flsv.functional.gradient_agreement import gradient_agreement
from flsv.functional.intervals import interval_over_seeds
from flsv.functional.pfedsv import (
    label_overlap,
    personalized_weights,
    relevance_auroc,
    top_k_download,
)
from flsv.functional.shapfed import (
    class_specific_shapley,
    collaborative_fairness,
    participant_weights,
)
from flsv.functional.shapley.decayed import MULTI_ROUND_INDICES, decayed_shapley
from flsv.functional.shapley.difference import difference_shapley
from flsv.functional.shapley.estimators import ESTIMATORS
from flsv.functional.shapley.exact import exact_shapley, leave_one_out
from flsv.functional.shapley.few_coalitions import few_coalitions, few_coalitions_shapley
from flsv.functional.shapley.game import ShapleyEstimate
from flsv.functional.shapley.gradient import client_in_run_values, gradient_shapley, step_weights
from flsv.functional.shapley.knn import knn_shapley
from flsv.functional.shapley.permutation import gtg_shapley, permutation_shapley
from flsv.functional.shapley.predicted_outputs import predicted_shapley
from flsv.functional.shapley.surrogate import surrogate_shapley
from flsv.functional.shapleyfl import importance_probabilities, normalize_shapley
from flsv.functional.transport.cost import (
    ClassStatistics,
    class_statistics,
    label_augmented_cost,
    label_distance,
    label_embedding,
)
from flsv.functional.transport.lava import lava
from flsv.functional.transport.potentials import calibrated_gradient, client_values, direct_values
from flsv.functional.transport.wasserstein import (
    FederatedBarycenter,
    FederatedDistance,
    TransportClient,
    TransportServer,
    contribution_shares,
    federated_wasserstein,
    interpolating_measure,
    wasserstein_barycenter,
    wasserstein_distance,
)

__all__ = [
    "ESTIMATORS",
    "MULTI_ROUND_INDICES",
    "ClassStatistics",
    "FederatedBarycenter",
    "FederatedDistance",
    "ShapleyEstimate",
    "TransportClient",
    "TransportServer",
    "allocate",
    "calibrated_gradient",
    "class_specific_shapley",
    "class_statistics",
    "client_in_run_values",
    "client_values",
    "collaborative_fairness",
    "contribution_estimates",
    "contribution_shares",
    "decayed_shapley",
    "difference_shapley",
    "direct_values",
    "divergence_weights",
    "exact_shapley",
    "federated_wasserstein",
    "few_coalitions",
    "few_coalitions_shapley",
    "gradient_agreement",
    "gradient_shapley",
    "gtg_shapley",
    "importance_probabilities",
    "interpolating_measure",
    "interval_over_seeds",
    "knn_shapley",
    "label_augmented_cost",
    "label_distance",
    "label_divergence",
    "label_embedding",
    "label_overlap",
    "lava",
    "leave_one_out",
    "leave_one_out_cosines",
    "normalize_shapley",
    "participant_weights",
    "permutation_shapley",
    "personalized_weights",
    "predicted_shapley",
    "relevance_auroc",
    "step_weights",
    "surrogate_shapley",
    "top_k_download",
    "wasserstein_barycenter",
    "wasserstein_distance",
    "without_own",
]
