"""The mathematics: pure functions on tensors, without state and without Lightning."""

from flsv.functional.class_specific_shapley import class_specific_shapley, participant_weights
from flsv.functional.collaborative_fairness import collaborative_fairness
from flsv.functional.cosine_gradient_shapley import cosine_gradient_shapley
from flsv.functional.gradient_shapley import gradient_shapley
from flsv.functional.shapley import (
    ESTIMATORS,
    DifferenceEstimate,
    ShapleyEstimate,
    banzhaf,
    complementary_shapley,
    difference_shapley,
    exact_shapley,
    gtg_shapley,
    importance_probabilities,
    leave_one_out,
    normalize_differences,
    normalize_shapley,
    permutation_shapley,
    regression_shapley,
    stratified_shapley,
    surrogate_shapley,
)

__all__ = [
    "ESTIMATORS",
    "DifferenceEstimate",
    "ShapleyEstimate",
    "banzhaf",
    "class_specific_shapley",
    "collaborative_fairness",
    "complementary_shapley",
    "cosine_gradient_shapley",
    "difference_shapley",
    "exact_shapley",
    "gradient_shapley",
    "gtg_shapley",
    "importance_probabilities",
    "leave_one_out",
    "normalize_differences",
    "normalize_shapley",
    "participant_weights",
    "permutation_shapley",
    "regression_shapley",
    "stratified_shapley",
    "surrogate_shapley",
]
