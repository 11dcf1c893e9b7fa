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

_CHUNK = 2**26  # numbers in the coalition models that exist at the same time


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
    """Compute, at a client, the Shapley values of its own and the downloaded models, and store its next model.

    Args:
        local: the client's data, and the model that it has just trained.
        others: the downloaded models, ``[Q]`` each; Q = P, or the size of the classifier.
        extractor: the shared rest of the models ``[P - Q]``; None if Q = P.
        personal: mask of the Q personal entries, bool ``[P]``; None for all.
        num_parameters: number of leading entries of a whole model that are parameters; distances leave out the
            buffers (BatchNorm's statistics) after them.
        permutations_factor: as for :class:`flsv.personalization.PFedSV`.
        self_weight: as for :class:`flsv.personalization.PFedSV`.
        safeguard: as for :class:`flsv.personalization.PFedSV`.
        game: as for :class:`flsv.personalization.PFedSV`.
        generator: source of the orders of the players, unless all coalitions are evaluated.

    Returns:
        Shapley values ``[s]``, the own model's first; in the joining game the own model's is its accuracy.
    """
    assert local.model is not None
    base = local.model
    if personal is not None and extractor is not None:
        base = base.clone()
        base[~personal.to(base.device)] = extractor
    models = torch.stack([select_entries(local.model, personal), *others])

    def evaluate(mixtures: Tensor, by: str = "accuracy") -> Tensor:
        chunks = mixtures.split(max(_CHUNK // len(base), 1))
        return torch.cat([local.evaluate(insert_entries(each, base, personal)).value(by) for each in chunks])

    def utility(masks: Tensor) -> Tensor:
        result = torch.zeros(len(masks), dtype=torch.float64)
        nonempty = masks.any(1).nonzero().flatten()
        for rows in nonempty.split(max(_CHUNK // len(base), 1)):
            shares = masks[rows] / masks[rows].sum(1, keepdim=True)
            result[rows] = evaluate(shares.to(models) @ models)
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
        # Of equal losses the first, with the smallest step. A clone, since a view would store the whole path.
        mixed = path[int(evaluate(path, "negative_loss").argmax())].clone()
    elif safeguard:
        before, after = evaluate(torch.stack([models[0], mixed])).tolist()
        mixed = mixed if after >= before else models[0].clone()
    local.state[OWN_MODEL] = insert_entries(mixed, base, personal)
    return values


def select_entries(vector: Tensor, personal: Tensor | None) -> Tensor:
    """Select the personal entries ``[Q]`` of a vector ``[P]``."""
    return vector if personal is None else vector[personal.to(vector.device)]


def insert_entries(own: Tensor, base: Tensor, personal: Tensor | None) -> Tensor:
    """Combine personal entries ``[..., Q]`` with the other entries of ``base [P]`` into whole models ``[..., P]``."""
    if personal is None:
        return own
    vectors = base.expand(*own.shape[:-1], -1).clone()
    vectors[..., personal.to(base.device)] = own
    return vectors


def layer_mask(space: ParameterSpace, layers: Sequence[str] | None = None) -> Tensor:
    """Mark the entries of a vector that belong to the named layers, by default to the head, bool ``[P]``.

    Raises:
        ConfigurationError: a layer that does not exist; no head.

    Example:
        >>> from torch import nn
        >>> space = ParameterSpace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
        >>> layer_mask(space).int().tolist(), int(layer_mask(space, ["0"]).sum())
        ([0, 0, 0, 0, 0, 0, 1, 1, 1], 6)
    """
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
