"""The mathematics: pure functions on tensors, without state and without Lightning."""

from flsv.functional.agreement import class_specific_shapley, participant_weights
from flsv.functional.allocation import allocate, collaborative_fairness
from flsv.functional.divergences import divergence_weights, label_divergence
from flsv.functional.gradients import (
    client_in_run_values,
    gradient_agreement,
    gradient_shapley,
    step_weights,
)
from flsv.functional.over_rounds import MULTI_ROUND_INDICES, lower_bound
from flsv.functional.peers import (
    contribution_estimates,
    label_overlap,
    leave_one_out_cosines,
    personalized_weights,
    relevance_auroc,
    top_k_download,
    without_own,
)
from flsv.functional.shapley.difference import DifferenceEstimate, difference_shapley
from flsv.functional.shapley.few_coalitions import few_coalitions, few_coalitions_shapley, interval_over_seeds
from flsv.functional.shapley.game import ShapleyEstimate, exact_shapley
from flsv.functional.shapley.normalize import importance_probabilities, normalize_shapley
from flsv.functional.shapley.other_values import banzhaf, beta_shapley, leave_one_out
from flsv.functional.shapley.permutation import gtg_shapley, permutation_shapley
from flsv.functional.shapley.regression import kernel_shap, regression_shapley
from flsv.functional.shapley.semivalues import ESTIMATORS
from flsv.functional.shapley.stratified import complementary_shapley, stratified_shapley
from flsv.functional.shapley.surrogate import surrogate_shapley
from flsv.functional.transport.cost import (
    ClassStatistics,
    class_statistics,
    label_augmented_cost,
    label_distance,
    label_embedding,
)
from flsv.functional.transport.federated import (
    FederatedBarycenter,
    FederatedDistance,
    TransportClient,
    TransportServer,
    federated_wasserstein,
    interpolating_measure,
    wasserstein_barycenter,
)
from flsv.functional.transport.solvers import (
    calibrated_gradient,
    contribution_shares,
    debiased_potential,
    wasserstein_distance,
)
from flsv.functional.transport.values import client_values, direct_values, knn_shapley, lava

__all__ = [
    "ESTIMATORS",
    "MULTI_ROUND_INDICES",
    "ClassStatistics",
    "DifferenceEstimate",
    "FederatedBarycenter",
    "FederatedDistance",
    "ShapleyEstimate",
    "TransportClient",
    "TransportServer",
    "allocate",
    "banzhaf",
    "beta_shapley",
    "calibrated_gradient",
    "class_specific_shapley",
    "class_statistics",
    "client_in_run_values",
    "client_values",
    "collaborative_fairness",
    "complementary_shapley",
    "contribution_estimates",
    "contribution_shares",
    "debiased_potential",
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
    "kernel_shap",
    "knn_shapley",
    "label_augmented_cost",
    "label_distance",
    "label_divergence",
    "label_embedding",
    "label_overlap",
    "lava",
    "leave_one_out",
    "leave_one_out_cosines",
    "lower_bound",
    "normalize_shapley",
    "participant_weights",
    "permutation_shapley",
    "personalized_weights",
    "regression_shapley",
    "relevance_auroc",
    "step_weights",
    "stratified_shapley",
    "surrogate_shapley",
    "top_k_download",
    "wasserstein_barycenter",
    "wasserstein_distance",
    "without_own",
]
