"""CoalitionModels: the parameter vectors of coalitions' models under one weighting."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flsv.core import Round
from flsv.games.vector_evaluator import Build
from flsv.utilities.errors import ConfigurationError


class Renormalized(NamedTuple):
    """Weights ``[k]`` that are divided by their sum over each coalition's members."""

    weights: Tensor


#: A sum of weights that differs from 1 by at most this much counts as 1.
_ROUNDING = 1e-12

Weighting = Literal["uniform", "samples"] | Tensor | Renormalized


class CoalitionModels:
    """The models of a round's coalitions under one weighting."""

    def __init__(self, round: Round, weighting: Weighting, server_lr: float) -> None:
        self._round, self._server_lr = round, server_lr
        self._normalized = not isinstance(weighting, Tensor)
        self._weights = _client_weights(round, weighting)
        # Equal for two objects of one round if each coalition has the same model in both.
        self.key = (self._normalized, server_lr, self._weights.numpy().tobytes())

    def weights(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clients' weights for parameters and for buffers, float64 ``[K, k]`` each."""
        own = masks * self._weights
        total = torch.zeros(len(masks), dtype=torch.float64)
        # Column by column: the rounding of sum(-1) depends on the number of rows.
        for column in own.unbind(1):
            total = total + column
        shares = own / torch.where(total > 0, total, 1.0)[:, None]
        return self._server_lr * (shares if self._normalized else own), shares

    def builder(self, masks: Tensor) -> Build:
        """Return a function that writes the model of row i of ``masks`` into ``out [P]``."""
        # A model is x + sum_i w_i (x_i - s_i), with x the global model, x_i client i's model, s_i the model it started
        # from. It is computed from the clients' models, so that no second matrix, of updates, is needed.
        cut, start, models = self._round.space.num_parameters, self._round.global_vector, self._round.client_vectors
        starts = self._round.matrix.starts
        common = all(each is start for each in starts)
        parameters, buffers = models[:, :cut].T, models[:, cut:].T
        exact_weights, exact_shares = self.weights(masks)
        parameter_weights, buffer_weights = exact_weights.to(start), exact_shares.to(start)
        remainders = (1 - exact_weights.sum(1)).tolist()
        has_members = buffer_weights.any(1).tolist()

        def build(index: int, out: Tensor) -> None:
            # A product of one shape per model, rather than one of masks and updates: how a matrix product sums
            # depends on the number of rows, and CUDA may do it in TF32. It is cheap beside a pass over the data.
            if not has_members[index]:
                out.copy_(start)
                return
            mine = torch.mv(parameters, parameter_weights[index], out=out[:cut])
            if not common:
                mine.add_(start[:cut])
                for weight, each in zip(exact_weights[index].tolist(), starts):
                    if weight:
                        mine.sub_(each[:cut], alpha=weight)
            elif abs(remainders[index]) > _ROUNDING:
                mine.add_(start[:cut], alpha=remainders[index])
            if cut < len(out):
                torch.mv(buffers, buffer_weights[index], out=out[cut:])

        return build


def _client_weights(round: Round, weighting: Weighting) -> Tensor:
    if isinstance(weighting, Renormalized):
        weighting = weighting.weights
    if isinstance(weighting, Tensor):
        weights = weighting.detach().to("cpu", torch.float64)
        if weights.shape != (len(round),) or not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ConfigurationError(
                f"CoalitionUtility(weighting=...): expected {len(round)} weights, finite and not negative, one for "
                f"each client of the round; got {weights.tolist()}."
            )
        return weights
    if weighting == "uniform":
        return torch.ones(len(round), dtype=torch.float64)
    return round.num_samples.to("cpu", torch.float64)
