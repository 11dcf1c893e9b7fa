"""Shapley values and relatives of a batched coalition game, exact and sampled, and what ShapleyFL makes of them.

Every estimator is called the same way, ``f(utility, num_players, *, budget=None, generator=None, target_stderr=None)``,
and returns a :class:`ShapleyEstimate`; ``ESTIMATORS`` lists them by name. Which one?

- up to about 10 players and a cheap utility: ``exact``.
- otherwise ``surrogate``: by far the smallest error per evaluation on games made of averaged model updates.
- ``stratified``, ``complementary``, ``permutation`` and ``difference`` make no assumption on the game and are unbiased;
  so is ``surrogate`` with ``unbiased=True``.
- ``leave_one_out``, ``banzhaf`` and ``beta`` are other values, not estimates of the Shapley value.

Example:
    >>> import torch
    >>> airport = lambda masks: -(masks * torch.tensor([1.0, 2.0, 4.0])).amax(dim=1)
    >>> ESTIMATORS["exact"](airport, 3).values
    tensor([-0.3333, -0.8333, -2.8333])
"""

from __future__ import annotations

from flsv.functional.shapley.difference import DifferenceEstimate, difference_shapley
from flsv.functional.shapley.few_coalitions import few_coalitions, few_coalitions_shapley, interval_over_seeds
from flsv.functional.shapley.game import MemoizedGame, ShapleyEstimate, Utility, exact_shapley
from flsv.functional.shapley.normalize import importance_probabilities, normalize_differences, normalize_shapley
from flsv.functional.shapley.other_values import banzhaf, beta_shapley, leave_one_out
from flsv.functional.shapley.permutation import gtg_shapley, permutation_shapley
from flsv.functional.shapley.regression import kernel_shap, regression_shapley
from flsv.functional.shapley.semivalues import ESTIMATORS, Semivalue, check_estimator, estimator_of, size_weights
from flsv.functional.shapley.stratified import complementary_shapley, stratified_shapley
from flsv.functional.shapley.surrogate import surrogate_shapley

__all__ = [
    "ESTIMATORS",
    "DifferenceEstimate",
    "MemoizedGame",
    "Semivalue",
    "ShapleyEstimate",
    "Utility",
    "banzhaf",
    "beta_shapley",
    "check_estimator",
    "complementary_shapley",
    "difference_shapley",
    "estimator_of",
    "exact_shapley",
    "few_coalitions",
    "few_coalitions_shapley",
    "gtg_shapley",
    "importance_probabilities",
    "interval_over_seeds",
    "kernel_shap",
    "leave_one_out",
    "normalize_differences",
    "normalize_shapley",
    "permutation_shapley",
    "regression_shapley",
    "size_weights",
    "stratified_shapley",
    "surrogate_shapley",
]
