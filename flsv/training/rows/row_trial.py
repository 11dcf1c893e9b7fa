"""Trial, before the first round, of the training of models as rows of one batched model.

The module trains on a few batches of a client twice: as the Trainer would train it, and as one of two rows. Afterwards
the module and the random state are restored; the fit's optimizers and trainer are only read.
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
    unstacked: Collection[str] = (),
) -> set[str]:
    """Train a trainer's module on a client's first batches, as usual and as two rows of one batched model, compare the
    results, and restore the module.

    Args:
        trainer: the trainer, with its optimizers set up and its data assigned to clients.
        space: the map between the module and its vectors ``[P]``.
        seed: the run's seed.
        unstacked: names of parameters and buffers that are equal in all rows, so that one copy serves all.

    Returns:
        Names of the parameters that have no gradient.

    Raises:
        NotBatched: the module cannot be trained as rows, or the results differ; see its ``reason``.
    """
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
    """Return a stand-in for a trainer, with its module and a copy of its optimizer.

    The copied optimizer has the schedules' base learning rates: at a learning rate of 0 (warm-up) a trial would find no
    differences."""
    own = stand_in(trainer, trainer.lightning_module)
    same = {id(each): each for each in trainer.lightning_module.parameters()}
    own.strategy.optimizers = [deepcopy(trainer.optimizers[0], same)]
    for group in own.optimizers[0].param_groups:  # a warm-up may begin at 0, which would hide all differences
        group["lr"] = group.get("initial_lr") or group["lr"]
    return own


def _nudged(start: Mapping[str, Tensor], rounding: Rounding) -> dict[str, Tensor]:
    """Return the weights ``start`` with random changes as large as the precision's rounding; integers do not change."""
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
    """Raise NotBatched if the first row differs from the ordinarily trained model by more than rounding explains.

    Args:
        module: the fit's module.
        rows: the two rows after training, by name ``[2, ...]``.
        model: the ordinarily trained model, by name ``[...]``.
        start: the weights before training, by name ``[...]``.
        rounding: the rounding of the trainer's precision.
    """
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
    """Return the first training batches of the first client that has samples, as ``training_step`` gets them.

    Args:
        trainer: the fit's trainer, with its data module.
        own: the stand-in of the trainer, which transfers the batches.
        seed: the run's seed.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning does not declare it
    client = int((data.num_samples > 0).nonzero()[0])
    # A generator, which Iterable.__iter__ need not be.
    with closing(iter(CohortLoader(data, [client], seed=seed, round_index=0))) as loader:  # type: ignore[type-var]
        return [tree_map_only(Tensor, torch.clone, as_given(own, batch)) for batch in islice(loader, BATCHES)]


def _one_by_one(trainer: L.Trainer, given: list[Any]) -> tuple[list[Tensor], set[str]]:
    """Train a trainer's module on batches, one step per batch, as the Trainer would.

    Args:
        trainer: the stand-in of the trainer.
        given: the batches.

    Returns:
        The loss of each batch, and the names of the parameters that have no gradient.

    Raises:
        NotBatched: a step fails, or the parameters that have no gradient differ between batches.
    """
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
    """Raise NotBatched if a result of training rows differs from the result of ordinary training by more than rounding.

    Args:
        module: the fit's module.
        name: the name of the result, for the message.
        batched: the result of training rows.
        ordinary: the result of ordinary training.
        allowed: the relative and the absolute tolerance.
        rounded: a Euclidean distance that is tolerated, too, since rounding may cause it.
    """
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
