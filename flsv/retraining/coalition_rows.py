"""CoalitionRows: trains the models of a client's coalitions, as rows of one batched model, beside its own model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flsv._lightning.rounding import LENGTH, rounding_of
from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.rows.kernel import RowTraining, clipping, models_of, states_of
from flsv.training.rows.row_step import NotBatched, State, batched_steps, purely
from flsv.utilities.seeding import derive_seed, restore_torch_rngs, torch_rngs

#: In one of this many trainings of a client, one more row starts from the client's own model, for comparison.
COMPARED = 4


class CoalitionRows:
    """Training of the models of all coalitions that a client is in, as rows of one batched model, while the Trainer
    trains the client's own model.

    In the first round all coalitions start from the client's own start model, so a trained row is compared with the
    client's own trained model. In one of four later rounds, drawn at random, an additional row starts from the client's
    start model for this comparison. In low precision (:class:`flsv._lightning.rounding.Rounding`) a further row starts
    from a slightly changed start model, to measure how much training amplifies rounding.

    Args:
        context: the client's training.
        rows: ``[m, P]``, the models of the m coalitions before training.
        algorithm: the client algorithm, which must be entrywise; None: there is none.

    Raises:
        NotBatched: in the first step: the module cannot be trained as rows; at the end of a comparison: a row differs
            from the client's own model, although both started from the same model and took the same batches.
    """

    def __init__(self, context: ClientContext, rows: Tensor, algorithm: ClientAlgorithm | None = None) -> None:
        self._context, self._rows, self._algorithm = context, rows, algorithm
        told = context.instruction
        chosen = derive_seed(told.seed, "compared rows", told.round_index, told.client_id) % COMPARED == 0
        # In the first round all coalitions are the initial model: one row stands for all, and for the client's own.
        # Later they are not, and to ask would make the host wait for the device.
        self._alike = bool(len(rows)) and told.round_index == 0 and bool((rows == context.start).all())
        self._compared = self._alike or (chosen and bool(len(rows)))
        self._states: State = {}
        self._pending: list[tuple[Any, Any]] = []

    def begin_batch(self, batch: Any) -> None:
        """Store a batch and the random state before the client's own step, so that the rows draw the same numbers."""
        if len(self._rows):
            self._pending.append((batch, torch_rngs(self._rows.device)))

    def step(self) -> None:
        """Take an optimizer step of all rows on the batches since the last step.

        This is called after the client's own gradients are computed and before the client's own optimizer step."""
        if not len(self._rows):
            return
        module: Any = self._context.module
        first = not self._states
        if first:
            self._begin(module.trainer)
        total: State = {}
        pending, self._pending = self._pending, []
        for batch, drawn in pending:
            try:
                with (
                    purely(module) if first and self._compared else nullcontext(),
                    _drawing(drawn, self._rows.device),
                    batched_steps(module.trainer),
                ):
                    gradients = self._kernel.gradients(batch)
            except NotBatched as error:
                raise not_the_same(
                    f"training_step of {type(module).__name__} does not allow rows of one batched model: {error.reason}"
                ) from error
            total = {name: total[name] + each for name, each in gradients.items()} if total else gradients
        window = module.trainer.accumulate_grad_batches
        self._kernel.take(total if window == 1 else {name: each / window for name, each in total.items()})

    def _begin(self, trainer: Any) -> None:
        """Stack the models to train, and make their optimizer; called when the client's first gradients are known, as
        parameters without a gradient are not trained."""
        context, module, rows = self._context, self._context.module, self._rows
        if self._alike:
            rows = rows[:1]
        elif self._compared:
            rows = torch.cat([context.start[None], rows])
        self._rounding = rounding_of(trainer)
        self._nudged = self._compared and self._rounding.is_coarse
        if self._nudged:
            rows = torch.cat([rows, self._rounding.nudged(context.start)[None]])
        self._states = states_of(context.space, module, rows)
        own = dict(module.named_parameters())
        frozen = {name for name, parameter in own.items() if parameter.grad is None or name not in self._states}
        change = None if self._algorithm is None else self._algorithm.change
        clip = clipping(trainer)
        self._kernel = RowTraining(module, trainer.optimizers[0], clip, frozen, shared=True, change=change)
        self._kernel.begin(self._states)

    def trained(self) -> Tensor:
        """Return the coalitions' trained models ``[m, P]``.

        Raises:
            NotBatched: a row that is compared with the client's own model differs from it.
        """
        if not self._states:
            return self._rows
        rows = models_of(self._context.space, self._states, self._rows)
        if self._compared:
            self._compare(rows[0], rows[-1])
        rows = rows[:-1] if self._nudged else rows
        if self._alike:
            return rows.expand(len(self._rows), -1)
        return rows[1:] if self._compared else rows

    def _compare(self, row: Tensor, nudged: Tensor) -> None:
        """Raise NotBatched if a trained row ``[P]`` differs from the client's own model by more than rounding.

        Args:
            row: the trained row that started from the client's start model.
            nudged: in low precision the trained row that started from the nudged start model; else ignored.
        """
        context: Any = self._context
        apart, way = (row - context.trained).norm(), (context.trained - context.start).norm()
        allowed = self._rounding.visit * way
        if self._nudged:
            allowed = torch.maximum(allowed, self._rounding.caused(context.start, row, nudged))
        near = apart <= allowed + LENGTH * context.start.norm()
        if (context.trained.isfinite().all() & ~near).item():  # one wait for the device
            raise not_the_same(
                f"at client {context.instruction.client_id} the model of a coalition differs by "
                f"{100 * float(apart / way.clamp_min(1e-12)):.1f} % from the client's own, and both began alike and "
                "saw the same: the module, its optimizer or its schedule does something that batched training does "
                "not, or its training amplifies rounding"
            )


def not_the_same(reason: str, remedy: str = "Value the run by flsv retrain") -> NotBatched:
    """Return an error that says why models trained as rows would differ from those of separate runs of the coalitions.

    Args:
        reason: the reason, which is also the error's attribute ``reason``.
        remedy: the advice with which the message ends.
    """
    error = NotBatched(f"ShadowShapley: {reason}. {remedy}.")
    error.reason = reason
    return error


@contextmanager
def _drawing(states: Any, device: torch.device) -> Iterator[None]:
    """Set torch's random state to ``states`` within this context, then restore the present state.

    Args:
        states: the random state that :meth:`CoalitionRows.begin_batch` has stored with a batch.
        device: the device whose generator is set, beside the CPU's.
    """
    now = torch_rngs(device)
    restore_torch_rngs(states, device)
    try:
        yield
    finally:
        restore_torch_rngs(now, device)
