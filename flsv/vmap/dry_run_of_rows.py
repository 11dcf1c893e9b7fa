"""The dry run of rows: a few steps of one client, taken by rows and ordinarily, must come to the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from flsv._lightning.data_source import data_of
from flsv._lightning.double_precision import compute_in_double
from flsv._lightning.evaluation import as_module_input
from flsv._lightning.rounding import Rounding, rounding_of
from flsv.core.parameter_space import ParameterSpace
from flsv.games.module_copies import ModuleCopies, named_tensors
from flsv.isolation.program_state import restored_program
from flsv.isolation.reachable import find_generators
from flsv.training.client_batches import CohortLoader
from flsv.training.shared_objects import SHARED_TYPES
from flsv.training.training_step import step_arguments, training_loss
from flsv.utilities.errors import ConfigurationError, NotBatched, listed
from flsv.utilities.seeding import (
    generator_state,
    global_rngs,
    isolated_rngs,
    kept_generators,
)
from flsv.vmap.row_step import (
    State,
    batched_steps,
    convert_errors,
    deny_client_attributes,
    not_batched_error,
)
from flsv.vmap.row_training import RowTraining, names_of_trained

#: Number of batches in a dry run.
NUM_DRY_RUN_BATCHES = 3
#: Two results in 64 bits count as equal up to this absolute and relative difference.
DOUBLE_TOLERANCE = 1e-7
#: A row's gradient counts as equal to an ordinary one if they differ by this fraction of its norm, or by this much per
#: element. Rounding that switches a ReLU changes gradients by more than the loss.
GRADIENT_TOLERANCE = 0.01
SMALL_GRADIENT = 1e-5


class _ResultsDiffer(NotBatched):
    """Error: batched and ordinary training come to different results."""


class DryRunOfRows(NamedTuple):
    """Findings of a dry run of batched training."""

    #: The names of parameters without a gradient.
    unused_names: set[str]
    #: Multiplications and additions of one model's step, in millions.
    megaflops: float
    #: The class that trained the rows.
    kind: type[RowTraining]
    #: Whether rows differ from single models by more than rounding, since training enlarges it.
    enlarges_rounding: bool


def names_without_rows(space: ParameterSpace) -> set[str]:
    """Return the names of tensors of which all batched models share the module's own, since they are the same at all
    clients.
    """
    return {*space.constant_names, *space.non_finite_names}


#: Methods that read the values of a tensor, which those of stacked models do not have.
_READS_OF_VALUES = frozenset(
    {Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.tolist, Tensor.numpy}
)


class _FailedReads(TorchFunctionMode):
    """Mode that notes whether the values of a tensor could not be read, also if the code catches the error."""

    have_failed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.have_failed |= func in _READS_OF_VALUES
            raise


def check_shared_are_frozen(trainer: L.Trainer, space: ParameterSpace) -> None:
    """Raise ConfigurationError if tensors that all batched models share are trained in this round."""
    shared_names = names_without_rows(space)
    names_by_group = names_of_trained(trainer.lightning_module, trainer.optimizers[0])
    names = [name for name in chain.from_iterable(names_by_group) if name in shared_names]
    if names:
        raise ConfigurationError(
            f"{listed(map(repr, names))} required no gradient when the fit began, so flsv treats them as equal at all "
            'clients, but they require one now. Set FederatedLoop(share=["trainable", "name.*"]) to share them, '
            "or keep requires_grad=False."
        )


def dry_run_of_rows(
    trainer: L.Trainer,
    space: ParameterSpace,
    seed: int,
    kind: type[RowTraining] = RowTraining,
    may_enlarge_rounding: bool = False,
) -> DryRunOfRows:
    """Raise NotBatched unless a few batches give equal results batched and ordinarily. ``kind`` trains the rows. With
    ``may_enlarge_rounding`` it suffices that results are equal in 64 bits.
    """
    dry_run = partial(_dry_run, trainer, space, seed, kind)
    try:
        return dry_run()
    except _ResultsDiffer as difference:
        if not may_enlarge_rounding:
            raise
        try:
            return dry_run(in_double=True)
        except Exception:  # such as a module that computes in 32 bits only
            raise difference from None


def _dry_run(
    trainer: L.Trainer,
    space: ParameterSpace,
    seed: int,
    kind: type[RowTraining],
    in_double: bool = False,
) -> DryRunOfRows:
    draws = nullcontext if kind.shares_batch else no_random_numbers
    with _trial_of_rows(trainer, space, seed, in_double) as (module, trial_trainer):
        batches = _first_batches(trainer, trial_trainer, seed, NUM_DRY_RUN_BATCHES)
        initial_model = _copied_tensors(module)
        counter = FlopCounterMode(display=False)
        own_generators = kept_generators(find_generators(module, closed=SHARED_TYPES))
        with isolated_rngs(seed, "steps"), own_generators, draws(module), counter:
            mean_loss, names_without_gradient = _train_one_by_one(trial_trainer, batches)
        trained_model = _copied_tensors(module)

        # The same training, batched, must come to the same model.
        _write_tensors(module, initial_model)
        training = kind.of(trial_trainer, names_without_gradient)
        with _steps_of_rows(training, trial_trainer, seed):
            rows, row_losses = training.train(_pairs(initial_model, space), [batches, batches])
        row = {name: pair[0] for name, pair in rows.items()}
        rounding = rounding_of(trial_trainer)
        number = DOUBLE_TOLERANCE if in_double else rounding.number
        _compare(module, "the loss", row_losses[0], mean_loss.to(row_losses), number)
        _compare_models(module, row, trained_model, initial_model, rounding, number)
    megaflops = counter.get_total_flops() / 1e6 / len(batches)
    return DryRunOfRows(names_without_gradient, megaflops, kind, enlarges_rounding=in_double)


def compare_gradients(
    trainer: L.Trainer,
    space: ParameterSpace,
    seed: int,
) -> set[str]:
    """Raise NotBatched unless the gradients of a step are equal batched and ordinarily. Return the names of parameters
    without a gradient.
    """
    with _trial_of_rows(trainer, space, seed) as (module, trial_trainer):
        batches = _first_batches(trainer, trial_trainer, seed, num_batches=2)
        initial_model = _copied_tensors(module)
        with isolated_rngs(seed, "steps"), no_random_numbers(module):
            # After a step, the model is no longer the one that the round's hooks have seen.
            _take_step(trial_trainer, batches[0], step=0)
            model = _copied_tensors(module)
            trial_trainer.optimizers[0].zero_grad()
            loss = _backward(trial_trainer, batches[-1], step=1)
        names_without_gradient = _names_without_gradient(module)
        training = RowTraining.of(trial_trainer, names_without_gradient)
        gradients = {}
        for name, parameter in module.named_parameters():
            if name in training.trained_names and parameter.grad is not None:
                gradients[name] = parameter.grad

        _write_tensors(module, initial_model)
        pairs = _pairs(model, space)
        row_losses = torch.zeros(2, device=loss.device)
        with _steps_of_rows(training, trial_trainer, seed):
            row_gradients = training.compute_gradients(
                pairs, [batches[-1], batches[-1]], row_losses
            )
        rounding = rounding_of(trainer)
    first_row = {name: gradient[0] for name, gradient in row_gradients.items()}
    _check_gradients(module, first_row, gradients, rounding)
    _compare(module, "the loss", row_losses[0], loss.to(row_losses), rounding.number)
    return names_without_gradient


def _names_without_gradient(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.grad is None}


def _check_gradients(
    module: L.LightningModule, row: State, ordinary: State, rounding: Rounding
) -> None:
    """Raise NotBatched if a row's gradients differ from ordinary ones by more than rounding explains."""
    total_norm = (
        float(sum(gradient.double().square().sum() for gradient in ordinary.values())) ** 0.5
    )
    if not math.isfinite(total_norm):
        return  # the client diverges
    tolerance = max(GRADIENT_TOLERANCE, rounding.steps)
    for name, gradient in ordinary.items():
        row_gradient = row.get(name, torch.zeros_like(gradient))
        difference_norm = float((row_gradient - gradient).double().norm())
        # Where terms cancel, rounding errors are as large as those of larger gradients.
        rounding_norm = 10 * rounding.number * total_norm + SMALL_GRADIENT * gradient.numel() ** 0.5
        if difference_norm > tolerance * float(gradient.double().norm()) + rounding_norm:
            raise not_batched_error(
                module,
                f"in round {module.current_epoch + 1}, the gradient of {name!r} differs by {difference_norm:.2g} from "
                "that without batching. Clients that are trained at once have their parameters in training_step "
                "only, and not in what a hook has stored of them",
            )


@contextmanager
def _trial_of_rows(
    trainer: L.Trainer, space: ParameterSpace, seed: int, in_double: bool = False
) -> Iterator[tuple[L.LightningModule, L.Trainer]]:
    """Context with copies of the module and its trainer, at the end of which the program is as before."""
    with restored_program(), isolated_rngs(seed, "trial of rows"):
        # In 64 bits the copy has constants of its own.
        copies = ModuleCopies(trainer.lightning_module, None if in_double else space)
        module, trial_trainer = copies.load_with_trainer()
        _use_initial_rates(trial_trainer.optimizers[0])
        if in_double:
            compute_in_double(trial_trainer)
            module.double()
        yield module, trial_trainer


def _use_initial_rates(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        # A warm-up may begin at 0, which would hide all differences.
        group["lr"] = group.get("initial_lr") or group["lr"]


def _pairs(tensors: State, space: ParameterSpace) -> State:
    """Return two equal rows with a model's tensors, so that rows are batched as in a round."""
    shared_names = names_without_rows(space)
    return {
        name: torch.stack([tensor, tensor])
        for name, tensor in tensors.items()
        if name not in shared_names
    }


@contextmanager
def _steps_of_rows(training: RowTraining, trainer: L.Trainer, seed: int) -> Iterator[None]:
    """Context of trial steps of rows, on batches on which a model has been trained as usual before."""
    module = trainer.lightning_module
    reads = _FailedReads()
    with (
        isolated_rngs(seed, "steps"),
        nullcontext() if training.shares_batch else no_random_numbers(module),
        # Since the same steps were possible as usual, an error comes from training rows.
        convert_errors(module, expected_errors=(Exception,)),
        batched_steps(trainer),
        reads,
    ):
        yield
    if reads.have_failed:  # and the step has caught the error
        raise not_batched_error(module, "it reads the value of a tensor, and goes on if this fails")


def _compare_models(
    module: nn.Module,
    row: State,
    ordinary: State,
    initial_model: State,
    rounding: Rounding,
    tolerance: float,
) -> None:
    """Raise NotBatched if a model that was trained as a row differs from one that was trained ordinarily."""
    squared_norm = 0.0
    for name, tensor in initial_model.items():
        squared_norm += float((ordinary[name] - tensor).double().square().sum())
    for name, tensor in row.items():
        _compare(
            module,
            name,
            tensor,
            ordinary=ordinary[name],
            tolerance=tolerance,
            rounding_norm=rounding.steps * squared_norm**0.5,
        )


def _copied_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(module).items()}


@torch.no_grad()
def _write_tensors(module: nn.Module, tensors: State) -> None:
    for name, tensor in named_tensors(module).items():
        tensor.copy_(tensors[name])


def _first_batches(
    trainer: L.Trainer, trial_trainer: L.Trainer, seed: int, num_batches: int
) -> list[Any]:
    data = data_of(trainer)
    clients_with_samples = (data.num_samples > 0).nonzero()
    first_client = int(clients_with_samples[0])
    loader = CohortLoader(data, [first_client], seed=seed, round_index=0)
    batches = []
    # The iterator is a generator, which Iterable.__iter__ need not be.
    with closing(iter(loader)) as iterator:  # type: ignore[type-var]
        for batch in islice(iterator, num_batches):
            input_batch = as_module_input(trial_trainer, batch)
            # Clones: the loader may reuse its tensors.
            batches.append(tree_map_only(Tensor, torch.clone, input_batch))
    return batches


def _train_one_by_one(
    trainer: L.Trainer,
    batches: list[Any],
) -> tuple[Tensor, set[str]]:
    """Return the mean loss, and the names of parameters that have a gradient in no batch."""
    module = trainer.lightning_module
    losses = []
    unused_names = {name for name, _ in module.named_parameters()}
    for step, batch in enumerate(batches):
        losses.append(_take_step(trainer, batch, step))
        unused_names &= _names_without_gradient(module)
    trainer.optimizers[0].zero_grad()
    return torch.stack(losses).mean(), unused_names


def _take_step(
    trainer: L.Trainer,
    batch: Any,
    step: int,
) -> Tensor:
    """Take an optimizer step on a batch as usual, and return the loss. The gradients remain."""
    optimizer = trainer.optimizers[0]
    optimizer.zero_grad()
    loss = _backward(trainer, batch, step)
    if trainer.gradient_clip_val is not None:
        algorithm = trainer.gradient_clip_algorithm or GradClipAlgorithmType.NORM
        trainer.precision_plugin.clip_gradients(optimizer, trainer.gradient_clip_val, algorithm)
    optimizer.step()
    return loss


def _backward(trainer: L.Trainer, batch: Any, step: int) -> Tensor:
    """Compute the gradients of a batch as usual, and return the loss."""
    module = trainer.lightning_module
    with convert_errors(module), deny_client_attributes(module):
        arguments = step_arguments(module, batch, step)
        loss = training_loss(trainer.strategy.training_step(*arguments))
    loss.backward()
    return loss.detach()


def _compare(
    module: nn.Module,
    name: str,
    batched: Tensor,
    ordinary: Tensor,
    tolerance: float,
    rounding_norm: float = 0.0,
) -> None:
    """Raise NotBatched if two results ``name`` differ by more than ``tolerance`` and ``rounding_norm``."""
    if torch.allclose(batched, ordinary, rtol=tolerance, atol=tolerance, equal_nan=True):
        return
    difference = batched - ordinary
    difference_norm = float(difference.float().norm())
    if difference_norm <= rounding_norm:
        return  # rounding alone explains it
    largest_difference = difference.abs().max().item()
    raise not_batched_error(
        module,
        f"after at most {NUM_DRY_RUN_BATCHES} batches of one client, {name!r} differs by {largest_difference:.2g} from "
        f"its value after training without batching. The tolerance is {tolerance}. An optimizer that divides by the "
        "size of a gradient enlarges the rounding error of a gradient that should be 0, such as that of a bias before "
        "batch normalization",
        kind=_ResultsDiffer,
    )


@contextmanager
def no_random_numbers(module: nn.Module) -> Iterator[None]:
    """Raise NotBatched if the code within draws random numbers."""
    own_generators = find_generators(module, closed=SHARED_TYPES)
    generators_before = tree_leaves([global_rngs(), *map(generator_state, own_generators)])
    yield
    generators_after = tree_leaves([global_rngs(), *map(generator_state, own_generators)])
    for state_before, state_after in zip(generators_before, generators_after):
        if not np.array_equal(state_before, state_after):
            raise not_batched_error(
                module, "it draws random numbers, as dropout or an augmentation does"
            )
