"""Checks that a federation's coalitions can be trained, whose errors say what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv.attacks import Collusion
from flsv.configuration.federation_config import FederationConfig
from flsv.core.parameter_space import named_state, sharing
from flsv.games.coalition_utility import Measure, utility_of
from flsv.games.lent_module import lent
from flsv.sampling import ClientSampler, FullParticipation
from flsv.utilities.choices import Participation
from flsv.utilities.errors import ConfigurationError

#: Number of other values of the part that clients keep, with which :func:`check_scored` scores a module.
TRIALS = 4
#: Advice in error messages, for runs whose base configuration on the command line has the metric.
WITHOUT = "leave ShadowShapley out (--config digits is quickstart without it)"


def check_settings(config: FederationConfig) -> None:
    """Raise ConfigurationError if a part of the federation prevents the training of coalitions."""
    if why := _refused(config):
        raise ConfigurationError(
            f"ShadowShapley trains a model for each of many coalitions, and {why}, or {WITHOUT}."
        )


def check_shared(config: FederationConfig, module: L.LightningModule) -> None:
    """Raise ConfigurationError if a trained parameter stays at the clients, since sites train coalitions as shared
    vectors.
    """
    if kept := sharing(config.share, module, config.head).kept:
        raise ConfigurationError(
            f"ShadowShapley trains a model for each of many coalitions, and with share={config.share!r} "
            f"{sorted(kept)[0]!r} and others stay at the sites. Share all that is trained, or {WITHOUT}."
        )


def check_scored(
    asking: str, share: Any, module: L.LightningModule, evaluator: Any, measure: Measure
) -> None:
    """Raise ConfigurationError if parameters that stay at the clients change the server's score of a model.

    ``asking`` is the metric's name in the error.
    """
    kept = evaluator.space.private_names
    if evaluator.asks_clients or not kept:
        return
    state, draw = dict(named_state(module)), torch.Generator().manual_seed(0)

    def scored(names: Iterable[str]) -> list[Tensor]:
        for name in names:
            value, noise = (
                state[name],
                torch.rand(state[name].shape, generator=draw).to(state[name].device),
            )
            if value.is_floating_point():
                value.copy_(value * (1 + noise) + 0.1 * noise)
            elif name in kept:  # others may be indices
                value.copy_(value + noise.round())
        scores = evaluator.live(module, keep=True)
        return [utility_of(scores, measure), *([] if scores.outputs is None else [scores.outputs])]

    with lent(module), torch.no_grad():
        first = scored(state)  # initial weights of 0, as LoRA's, would hide the part behind them
        for _ in range(TRIALS):
            for before, now in zip(first, scored(kept)):
                if not torch.allclose(before, now, rtol=1e-5, atol=1e-7, equal_nan=True):
                    raise ConfigurationError(
                        f"{asking} scores models on the server's validation set, and with share={share!r} a part of it "
                        f"stays at the clients, on which the score depends: of {kept[0]!r} the server has the initial "
                        'values. Let clients judge, each with its own (judges="clients"), or share all that is scored.'
                    )


def mean_cohort(sampler: ClientSampler, masks: Callable[[int], Tensor], num_clients: int) -> float:
    """Return a sampler's mean cohort size. Raise ConfigurationError if it cannot draw clients from each of the
    coalitions ``masks(num_clients)``.
    """
    try:
        check_draws(sampler, masks(num_clients))
        return float(sampler.inclusion_probabilities(num_clients, {}).sum())
    except ConfigurationError as error:
        raise ConfigurationError(
            f"ShadowShapley trains each of many coalitions alone, and {error} Or {WITHOUT}."
        ) from None


def sampler_of(loop: Any, participation: Participation) -> ClientSampler:
    """Return the sampler from which each coalition's sampler is made: the loop's own, or one of all clients."""
    # "drawn": each coalition draws cohorts of the run's size among its members.
    return loop.config.sampler if participation == "drawn" else FullParticipation()


def check_draws(sampler: ClientSampler, masks: Tensor) -> None:
    """Raise ConfigurationError if a sampler cannot draw clients from each coalition in ``masks [K, n]``."""
    for mask in masks[masks.any(1)].cpu():
        sampler.among(mask.nonzero().flatten().tolist())


def _refused(config: FederationConfig) -> str | None:
    """Return why coalitions can be trained neither during nor after the run, or None."""
    if config.personalizer is not None:
        return f"personalizer={config.personalizer!r} gives each client a start point of its own. Leave it out"
    if config.privacy is not None:
        return "noise would be spent on each of these models. Leave it out"
    if colluders := [each for each in config.uploads if isinstance(each, Collusion)]:
        return f"{colluders} compare the updates of one cohort. Leave them out"
    return None
