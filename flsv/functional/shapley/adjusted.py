"""Adjusts the Shapley value of a fitted game by a sampled estimate of its residual.

The Shapley value is linear in the game, so for any game g that is fitted to sampled coalitions

    SV(U) = SV(g) + SV(U - g),

and the second term is estimated from the residuals of the sample; ``surrogate`` and ``regression_adjusted`` say with
which g. With r = U - g, V its gain from nobody to everybody and z the membership,

    SV_i(r) = V/n + n sum_{s=1..n-1} 1/(s (n - s)) E_{|S|=s}[ r(S) (z_i - s/n) ],

which is maximum sample reuse (Witter, Liu and Musco 2025): a coalition in player i's mean with i weighs
p_{s-1} = 1/(n binom(n - 1, s - 1)), in the mean without i p_s, each over its chance to be drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flsv.functional.shapley.game import MemoizedGame
from flsv.functional.shapley.layers import Layer, LayeredSample, layer_variance
from flsv.functional.shapley.regression import centred, kernel_share

_MAX_FIT = 1000  # coalitions; a fit of kernels costs the cube of their number


class FittedGame(Protocol):
    """A game g whose Shapley value is known."""

    def __call__(self, masks: Tensor) -> Tensor:
        """g, float64 ``[K, M]``, of coalitions bool ``[K, n]``."""
        ...

    def shapley(self) -> Tensor:
        """Exact Shapley values of g, float64 ``[n, M]``."""
        ...


def _pair_terms(layer: Layer, residuals: Tensor) -> Tensor:
    """What each pair, with residual r(S) - r(N \\ S) of shape ``[m, M]``, says of SV(r): ``[m, n, M]``."""
    return kernel_share(layer) * layer.masks.shape[1] / 2 * centred(layer).unsqueeze(-1) * residuals.unsqueeze(1)


@dataclass
class AdjustedEstimator:
    """Computes values and standard errors ``[n, M]`` from the current sample.

    Args:
        game: with utilities ``[M]``.
        sample: paired.
        fit: ``(masks bool [m, n], utilities float64 [m, M])`` to a game whose Shapley value is known, and the residual
            ``[m, M]`` of each coalition under a fit to all others (read only where ``folds`` is 1).
        folds: 1: residuals are those of the very coalitions that the fit has seen. More: those of one part of the pairs
            under a fit to the other parts, averaged.
    """

    game: MemoizedGame
    sample: LayeredSample
    fit: Callable[[Tensor, Tensor], tuple[FittedGame, Tensor]]
    folds: int

    def __call__(self) -> tuple[Tensor, Tensor]:
        layers, n = self.sample.layers, self.sample.num_players
        # An open layer has coalitions that were not drawn; only its pairs can be held out.
        open_sizes = [len(layer.masks) for layer in layers if len(layer.masks) < layer.capacity]
        folds = min([self.folds, *open_sizes]) if open_sizes else 1
        values, variance = torch.zeros(2, n, len(self.game.empty_and_grand()[0]), dtype=torch.float64)
        before = [torch.zeros(len(layer.masks), values.shape[1], dtype=torch.float64) for layer in layers]
        for fold in range(folds):
            fitted = [self._fitted(k, fold, folds) for k in range(len(layers))]
            halves = torch.cat([layer.masks[index] for layer, index in zip(layers, fitted, strict=True)])
            ends = torch.arange(2)[:, None].expand(2, n).bool()
            masks = torch.cat([ends, halves, ~halves])
            game, left_out = self.fit(masks, self.game(masks))
            residual = self.game(ends) - game(ends)
            values = values + (game.shapley() + (residual[1] - residual[0]) / n) / folds
            left_out = (left_out[2 : 2 + len(halves)] - left_out[2 + len(halves) :]).split([len(i) for i in fitted])
            for k, layer in enumerate(layers):
                known = torch.zeros(len(layer.masks), dtype=torch.bool)
                known[fitted[k]] = True
                pair = self.game(layer.masks) - self.game(~layer.masks) - game(layer.masks) + game(~layer.masks)
                terms = _pair_terms(layer, pair)
                mean = terms.mean(dim=0)
                if folds > 1 and not bool(known.all()):
                    share = float(known.sum()) / layer.capacity
                    mean = share * terms[known].mean(dim=0) + (1 - share) * terms[~known].mean(dim=0)
                values = values + mean / folds
                if folds == 1:
                    before[k] = pair
                    before[k][fitted[k]] = left_out[k]
                elif len(layer.masks) < layer.capacity:
                    held_out = torch.arange(fold, len(layer.masks), folds)
                    before[k][held_out] = pair[held_out]
        for layer, pair in zip(layers, before, strict=True):
            count = len(layer.masks)
            terms = _pair_terms(layer, pair)
            influences = (terms - terms.mean(dim=0)) / (count * max(count - 1, 1)) ** 0.5
            variance = variance + layer_variance(layer, influences)
        return values, variance.sqrt()

    def _fitted(self, k: int, fold: int, folds: int) -> Tensor:
        """Layer k's pairs that the fit of this fold sees: all but every ``folds``-th, or a share of them if many."""
        layer = self.sample.layers[k]
        index = torch.arange(len(layer.masks))
        if folds > 1 and len(index) < layer.capacity:
            index = index[index % folds != fold]
        total = 2 * sum(len(layer.masks) for layer in self.sample.layers)
        return index[: max(2, round(len(index) * min(1.0, _MAX_FIT / total)))]
