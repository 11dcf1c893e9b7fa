"""Client side of pFedSV: Shapley values of the downloaded models, and the mixture of models weighted by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from flsv.core import LocalData
from flsv.core.parameter_space import ParameterSpace
from flsv.functional import permutation_shapley
from flsv.functional.common_entries import keep_common
from flsv.functional.pfedsv import SelfWeight, personalized_weights
from flsv.functional.shapley.game import Utility
from flsv.personalization.base import OWN_MODEL
from flsv.utilities.errors import ConfigurationError

_CHUNK = 2**26  # largest number of entries in the coalition models that exist at the same time


def collaborate(
    local: LocalData,
    others: Sequence[Tensor],
    extractor: Tensor | None,
    *,
    personal: Tensor | None,
    num_parameters: int,
    permutations_factor: int,
    self_weight: SelfWeight,
    safeguard: bool,
    game: str,
    generator: Generator,
) -> Tensor:
    """Mix a client's own and the downloaded models by their Shapley values, at the client."""
    assert local.model is not None
    base, joins = local.model, game == "joining"
    if personal is not None and extractor is not None:
        base = base.clone()
        base[~personal.to(base.device)] = extractor
    models, chunk = torch.stack([select_entries(local.model, personal), *others]), max(_CHUNK // len(base), 1)

    def evaluate(mixtures: Tensor, by: str = "accuracy") -> Tensor:
        chunks = mixtures.split(chunk)
        return torch.cat([local.evaluate(insert_entries(each, base, personal)).value(by) for each in chunks])

    def utility(masks: Tensor) -> Tensor:
        result = torch.zeros(len(masks), dtype=torch.float64)
        for rows in masks.any(1).nonzero().flatten().split(chunk):
            shares = masks[rows] / masks[rows].sum(1, keepdim=True)
            result[rows] = evaluate(shares.to(models) @ models)
        return result

    values = _values(utility, len(models), joins, permutations_factor, generator)
    cut = num_parameters if personal is None else int(personal[:num_parameters].sum())
    distances = (models - models[0])[:, :cut].norm(dim=1)
    weights = personalized_weights(values, distances.to(values), own=0, self_weight="exclude" if joins else self_weight)
    mixed = keep_common(weights.to(models) @ models, models)
    if joins:
        mixed = _on_the_way(models, mixed, evaluate)
    elif safeguard:
        before, after = evaluate(torch.stack([models[0], mixed])).tolist()
        mixed = mixed if after >= before else models[0].clone()
    local.state[OWN_MODEL] = insert_entries(mixed, base, personal)
    return values


def _on_the_way(models: Tensor, mixed: Tensor, evaluate: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return the best of 11 models on the line from the client's own to the mixture."""
    steps = torch.linspace(0, 1, 11).to(models)[:, None]
    path = keep_common(torch.lerp(models[0].expand(11, -1), mixed.expand(11, -1), steps), models)
    # Of equal losses, argmax takes the smallest step. A clone, since a view would keep the whole path in memory.
    return path[int(evaluate(path, "negative_loss").argmax())].clone()


def _values(utility: Utility, players: int, joins: bool, orders: int, generator: Generator) -> Tensor:
    """Compute the Shapley values ``[players]`` of the models, the client's own first."""
    if not joins:
        budget = orders * players * (players - 1) + 2
        return permutation_shapley(utility, players, budget=budget, generator=generator).values

    def joined(masks: Tensor) -> Tensor:
        return utility(torch.cat([torch.ones(len(masks), 1, dtype=torch.bool), masks], dim=1))

    own = utility(torch.eye(1, players).bool())
    if players == 1:
        return own
    budget = orders * (players - 1) * players + 2
    return torch.cat([own, permutation_shapley(joined, players - 1, budget=budget, generator=generator).values])


def select_entries(vector: Tensor, personal: Tensor | None) -> Tensor:
    """Return the personal entries ``[Q]`` of a vector ``[P]``."""
    return vector if personal is None else vector[personal.to(vector.device)]


def insert_entries(own: Tensor, base: Tensor, personal: Tensor | None) -> Tensor:
    """Put the personal entries ``own [..., Q]`` into the vector ``base [P]``."""
    if personal is None:
        return own
    vectors = base.expand(*own.shape[:-1], -1).clone()
    vectors[..., personal.to(base.device)] = own
    return vectors


def layer_mask(space: ParameterSpace, layers: Sequence[str] | None = None) -> Tensor:
    """Return a mask, bool ``[P]``, of the entries that belong to the named layers."""
    if layers is None:
        if space.head is None:
            why = f"shares no {space.unshared_head!r}" if space.unshared_head else "has no linear layer"
            raise ConfigurationError(f"the module {why} for a classifier. Name it: classifier=[...].")
        layers = [space.head.name]
    prefixes = tuple(f"{layer}." for layer in layers)
    missing = [prefix[:-1] for prefix in prefixes if not any(name.startswith(prefix) for name in space.names)]
    if missing or not layers:
        raise ConfigurationError(f"classifier={list(layers)}: {missing} are no layers with parameters of the module.")
    chosen = [torch.full(shape, name.startswith(prefixes)) for name, shape in zip(space.names, space.shapes)]
    return torch.cat([part.reshape(-1) for part in chosen])
