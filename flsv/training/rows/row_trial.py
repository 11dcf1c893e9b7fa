"""Trial, before the first round, of the training of models as rows.

The module trains on a few batches of a client twice, as the Trainer would train it, and as one of two rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from copy import deepcopy
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flsv._lightning.evaluation import as_given
from flsv._lightning.rounding import Rounding, rounding_of
from flsv._lightning.validation import stand_in
from flsv.core.parameter_space import ParameterSpace
from flsv.games.lent_module import lent
from flsv.training.cohort_loader import CohortLoader
from flsv.training.rows.kernel import GivenBatches, RowTraining, clipping
from flsv.training.rows.row_step import (
    Watch,
    batched_steps,
    pure_step,
    purely,
    refusal,
    refusing,
    step_arguments,
    training_loss,
)
from flsv.utilities.seeding import isolated_rngs

#: Number of batches in a trial.
BATCHES = 3


def try_rows(
    trainer: L.Trainer,
    space: ParameterSpace,
    seed: int,
    # Names that are equal in all rows, so that one copy serves all.
    unstacked: Collection[str] = (),
) -> set[str]:
    """Raise NotBatched unless rows train as usual, and return the names of parameters without a gradient."""
    module = trainer.lightning_module
    with isolated_rngs(seed, "trial of rows"), lent(module, space):
        own = _stand_in(trainer)
        copied, optimizer = own.lightning_module, own.optimizers[0]
        given = _first_batches(trainer, own, seed)
        start = _values(copied)
        with isolated_rngs(seed, "steps"):
            watch = Watch(copied)
            losses, unused = _one_by_one(own, given)
            if reason := watch.changed():
                raise refusal(module, reason)
        model = _values(copied)
        with torch.no_grad():
            for name, tensor in _named(copied):
                tensor.copy_(start[name])
        rounding = rounding_of(trainer)
        nudged = _nudged(start, rounding) if rounding.is_coarse else start
        both = {name: torch.stack([tensor, nudged[name]]) for name, tensor in start.items() if name not in unstacked}
        training = RowTraining(copied, optimizer, clipping(trainer), unused)
        # The same batches have been trained on as usual: an error from here on comes from training rows.
        with isolated_rngs(seed, "steps"), purely(copied), batched_steps(own):
            rows, means = training.train(both, GivenBatches([given, given]))
    _compare(module, "the loss", means[0], torch.stack(losses).mean().to(means), rounding.number)
    _compare_models(module, rows, model, start, rounding)
    return unused


def _stand_in(trainer: L.Trainer) -> L.Trainer:
    """Return a stand-in for a trainer, with its module and a copy of its optimizer."""
    own = stand_in(trainer, trainer.lightning_module)
    same = {id(each): each for each in trainer.lightning_module.parameters()}
    own.strategy.optimizers = [deepcopy(trainer.optimizers[0], same)]
    for group in own.optimizers[0].param_groups:  # a warm-up may begin at 0, which would hide all differences
        group["lr"] = group.get("initial_lr") or group["lr"]
    return own


def _nudged(start: Mapping[str, Tensor], rounding: Rounding) -> dict[str, Tensor]:
    """Return ``start`` with random changes as large as the precision's rounding."""
    return {
        name: rounding.nudged(tensor.flatten()).view_as(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in start.items()
    }


def _compare_models(
    module: nn.Module,
    rows: Mapping[str, Tensor],
    model: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    rounding: Rounding,
) -> None:
    """Raise NotBatched if the first of ``rows`` differs from ``model`` by more than rounding explains."""
    way = _norm(model[name] - tensor for name, tensor in start.items())
    rounded = rounding.steps * way
    if rounding.is_coarse:
        found = ((start[n].flatten(), *each.flatten(1)) for n, each in rows.items() if each.is_floating_point())
        rounded = max(rounded, _norm(rounding.caused(*models) for models in found))
    for name, tensor in rows.items():
        _compare(module, name, tensor[0], model[name], rounding.number, rounded)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _values(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters and buffers, by name."""
    return {name: tensor.detach().clone() for name, tensor in _named(module)}


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def _first_batches(trainer: L.Trainer, own: L.Trainer, seed: int) -> list[Any]:
    """Return the first batches of the first client with samples, as ``training_step`` gets them."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning does not declare it
    client = int((data.num_samples > 0).nonzero()[0])
    # A generator, which Iterable.__iter__ need not be.
    with closing(iter(CohortLoader(data, [client], seed=seed, round_index=0))) as loader:  # type: ignore[type-var]
        return [tree_map_only(Tensor, torch.clone, as_given(own, batch)) for batch in islice(loader, BATCHES)]


def _one_by_one(trainer: L.Trainer, given: list[Any]) -> tuple[list[Tensor], set[str]]:
    """Train on one batch after the other, and return losses and the names of parameters without a gradient."""
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    losses: list[Tensor] = []
    without: list[set[str]] = []
    for step, batch in enumerate(given):
        optimizer.zero_grad()
        with refusing(module), pure_step(module):
            loss = training_loss(trainer.strategy.training_step(*step_arguments(module, batch, step)))
        loss.backward()
        without.append({name for name, p in module.named_parameters() if p.grad is None})
        limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if limit is not None:
            trainer.precision_plugin.clip_gradients(optimizer, limit, algorithm or GradClipAlgorithmType.NORM)
        optimizer.step()
        losses.append(loss.detach())
    optimizer.zero_grad()
    if any(each != without[0] for each in without):
        raise refusal(module, "which parameters have gradients differs from batch to batch")
    return losses, without[0]


def _compare(
    module: nn.Module, name: str, batched: Tensor, ordinary: Tensor, allowed: float, rounded: float = 0.0
) -> None:
    """Raise NotBatched if a result differs by more than ``allowed``, or a distance ``rounded``."""
    if torch.allclose(batched, ordinary, rtol=allowed, atol=allowed, equal_nan=True):
        return
    if float((batched - ordinary).float().norm()) <= rounded:
        return
    far = (batched - ordinary).abs().max().item()
    raise refusal(
        module,
        f"after at most {BATCHES} batches of one client, {name!r} differs by {far:.2g} from what the same "
        f"batches make of it one after the other, where {allowed} is allowed (an optimizer that divides by a "
        "gradient's size makes the rounding of a gradient that ought to be 0 as large as others, as that of a bias "
        "before batch normalization)",
    )
