"""pFedSV's part at a client: Shapley values of the downloaded models, and the mixture that follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from flsv.core import LocalData
from flsv.core.parameter_space import ParameterSpace
from flsv.functional import permutation_shapley
from flsv.functional.common_entries import keep_common
from flsv.functional.pfedsv import SelfWeight, personalized_weights
from flsv.personalization.base import OWN_MODEL
from flsv.utilities.errors import ConfigurationError

_CHUNK = 2**26  # numbers in the coalition models that exist at a time


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
    """At a client: what every model is worth to it. Its own next one it keeps.

    Args:
        local: the client's data, and the model that it has just trained.
        others: ``[Q]`` each, what it downloaded; Q = P, or the size of the classifier.
        extractor: ``[P - Q]``, the rest of the models; None where Q = P.
        personal: bool ``[P]``, which entries are the Q; None for all.
        num_parameters: how many entries of a whole model are parameters; distances leave out BatchNorm's statistics
            after them.
        permutations_factor: as of :class:`flsv.personalization.PFedSV`.
        self_weight: likewise.
        safeguard: likewise.
        game: likewise.
        generator: of the orders of the players, where not all coalitions are evaluated.

    Returns:
        Shapley values ``[s]``, the own model's first; in the joining game that is its accuracy.
    """
    assert local.model is not None
    base = local.model
    if personal is not None and extractor is not None:
        base = base.clone()
        base[~personal.to(base.device)] = extractor
    models = torch.stack([picked(local.model, personal), *others])

    def judged(mixtures: Tensor, by: str = "accuracy") -> Tensor:
        chunks = mixtures.split(max(_CHUNK // len(base), 1))
        return torch.cat([local.evaluate(placed(each, base, personal)).value(by) for each in chunks])

    def utility(masks: Tensor) -> Tensor:
        result = torch.zeros(len(masks), dtype=torch.float64)
        somebody = masks.any(1).nonzero().flatten()
        for rows in somebody.split(max(_CHUNK // len(base), 1)):
            shares = masks[rows] / masks[rows].sum(1, keepdim=True)
            result[rows] = judged(shares.to(models) @ models)
        return result

    def joining(masks: Tensor) -> Tensor:
        return utility(torch.cat([torch.ones(len(masks), 1, dtype=torch.bool), masks], dim=1))

    players, joins = len(models), game == "joining"
    if joins:
        values = torch.cat([utility(torch.eye(1, players).bool()), torch.zeros(players - 1, dtype=torch.float64)])
        if players > 1:
            budget = permutations_factor * (players - 1) * players + 2
            values[1:] = permutation_shapley(joining, players - 1, budget=budget, generator=generator).values
    else:
        budget = permutations_factor * players * (players - 1) + 2
        values = permutation_shapley(utility, players, budget=budget, generator=generator).values
    cut = num_parameters if personal is None else int(personal[:num_parameters].sum())
    distances = (models - models[0])[:, :cut].norm(dim=1)
    weights = personalized_weights(values, distances.to(values), own=0, self_weight="exclude" if joins else self_weight)
    mixed = keep_common(weights.to(models) @ models, models)
    if joins:
        steps = torch.linspace(0, 1, 11).to(models)[:, None]
        path = keep_common(torch.lerp(models[0].expand(11, -1), mixed.expand(11, -1), steps), models)
        # Of equals the first, the least step. A clone: a view would keep, and save, the whole path.
        mixed = path[int(judged(path, "negative_loss").argmax())].clone()
    elif safeguard:
        before, after = judged(torch.stack([models[0], mixed])).tolist()
        mixed = mixed if after >= before else models[0].clone()
    local.state[OWN_MODEL] = placed(mixed, base, personal)
    return values


def picked(vector: Tensor, personal: Tensor | None) -> Tensor:
    """The personal entries ``[Q]`` of a vector ``[P]``."""
    return vector if personal is None else vector[personal.to(vector.device)]


def placed(own: Tensor, base: Tensor, personal: Tensor | None) -> Tensor:
    """Whole models ``[..., P]``: their personal entries ``[..., Q]``, and the rest of ``base [P]``."""
    if personal is None:
        return own
    vectors = base.expand(*own.shape[:-1], -1).clone()
    vectors[..., personal.to(base.device)] = own
    return vectors


def entries_of(space: ParameterSpace, layers: Sequence[str] | None = None) -> Tensor:
    """Which entries ``[P]`` of a vector belong to layers, by their names; to the head by default.

    Raises:
        ConfigurationError: there are no such layers, or no head.

    Example:
        >>> from torch import nn
        >>> space = ParameterSpace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
        >>> entries_of(space).int().tolist(), int(entries_of(space, ["0"]).sum())
        ([0, 0, 0, 0, 0, 0, 1, 1, 1], 6)
    """
    if layers is None:
        if space.head is None:
            why = f"shares no {space.apart_head!r}" if space.apart_head else "has no linear layer"
            raise ConfigurationError(f"the module {why} for a classifier. Name it: classifier=[...].")
        layers = [space.head.name]
    prefixes = tuple(f"{layer}." for layer in layers)
    missing = [prefix[:-1] for prefix in prefixes if not any(name.startswith(prefix) for name in space.names)]
    if missing or not layers:
        raise ConfigurationError(f"classifier={list(layers)}: {missing} are no layers with parameters of the module.")
    chosen = [torch.full(shape, name.startswith(prefixes)) for name, shape in zip(space.names, space.shapes)]
    return torch.cat([part.reshape(-1) for part in chosen])
