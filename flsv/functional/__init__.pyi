from .divergences import (
    divergence_weights as divergence_weights,
    label_divergence as label_divergence,
)
from .fedce import (
    contribution_estimates as contribution_estimates,
    leave_one_out_cosines as leave_one_out_cosines,
    without_own as without_own,
)
from .gradient_agreement import gradient_agreement as gradient_agreement
from .intervals import interval_over_seeds as interval_over_seeds
from .pfedsv import (
    label_overlap as label_overlap,
    personalized_weights as personalized_weights,
    relevance_auroc as relevance_auroc,
    top_k_download as top_k_download,
)
from .shapfed import (
    class_specific_shapley as class_specific_shapley,
    collaborative_fairness as collaborative_fairness,
    participant_weights as participant_weights,
)
from .shapley.decayed import (
    MULTI_ROUND_INDICES as MULTI_ROUND_INDICES,
    decayed_shapley as decayed_shapley,
)
from .shapley.difference import difference_shapley as difference_shapley
from .shapley.estimators import ESTIMATORS as ESTIMATORS
from .shapley.exact import exact_shapley as exact_shapley, leave_one_out as leave_one_out
from .shapley.few_coalitions import (
    few_coalitions as few_coalitions,
    few_coalitions_shapley as few_coalitions_shapley,
)
from .shapley.game import ShapleyEstimate as ShapleyEstimate
from .shapley.gradient import (
    client_in_run_values as client_in_run_values,
    gradient_shapley as gradient_shapley,
    step_weights as step_weights,
)
from .shapley.halvings import choose_halvings as choose_halvings
from .shapley.permutation import (
    gtg_shapley as gtg_shapley,
    permutation_shapley as permutation_shapley,
)
from .shapley.predicted_outputs import predicted_shapley as predicted_shapley
from .shapley.surrogate import surrogate_shapley as surrogate_shapley
from .shapleyfl import (
    importance_probabilities as importance_probabilities,
    normalize_shapley as normalize_shapley,
)
from .transport.cost import (
    ClassStatistics as ClassStatistics,
    class_statistics as class_statistics,
    label_embedding as label_embedding,
)
from .transport.potentials import (
    calibrated_gradient as calibrated_gradient,
    client_values as client_values,
)
from .transport.wasserstein import (
    FederatedBarycenter as FederatedBarycenter,
    TransportClient as TransportClient,
    TransportServer as TransportServer,
    contribution_shares as contribution_shares,
    interpolating_measure as interpolating_measure,
    wasserstein_barycenter as wasserstein_barycenter,
)
