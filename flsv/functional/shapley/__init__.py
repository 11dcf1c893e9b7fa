"""Shapley values of a coalition game: exact, sampled, and in closed form. A game is any function from coalition masks
to utilities.

Every estimator is called the same way, ``f(utility, num_players, *, budget=None, generator=None)``, and returns a
:class:`ShapleyEstimate`. ``ESTIMATORS`` lists them by name. To choose one:

- up to about 10 players and a cheap utility: ``exact``.
- otherwise ``surrogate``: it has by far the smallest error per evaluation if coalitions average model updates.
- ``permutation`` and ``difference`` make no assumption on the game and are unbiased.
- ``gtg`` is faster if most contributions are close to 0.
- ``leave_one_out`` is a different value, not an estimate of the Shapley value.

Example:
    >>> import torch
    >>> from flsv.functional import ESTIMATORS
    >>> airport = lambda masks: -(masks * torch.tensor([1.0, 2.0, 4.0])).amax(dim=1)
    >>> ESTIMATORS["exact"](airport, 3).values
    tensor([-0.3333, -0.8333, -2.8333])
"""
