"""CoalitionRows: training of a client's coalition models beside its own model, as rows of one batched model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.rows.kernel import RowTraining, clipping, models_of, states_of
from flsv.training.rows.row_step import NotBatched, State, batched_steps, purely
from flsv.utilities.seeding import derive_seed, restore_torch_rngs, torch_rngs

#: How far a coalition's model may be from the client's own where both train alike, relative to the distance that the
#: client's model has moved; and the same in bf16-mixed.
TOLERANCE, ROUNDED = 0.01, 0.1
#: One turn in so many trains a row of the client's own model, to compare.
COMPARED = 4


class CoalitionRows:
    """Models of a client's coalitions, trained together while the Trainer trains the client's own model.

    The training is compared with the client's own in turns where all coalitions start from the client's own model, as
    in the first round, and in one of four other turns, drawn at random, in which one more row starts from that model.

    Args:
        context: the client's training.
        rows: ``[m, P]``, the models of the client's coalitions.
        algorithm: the client algorithm, which must be entrywise; None: there is none.

    Raises:
        NotBatched: in the first step of a visit that is compared, a module that does not allow it; at the end,
            a model that differs from the client's own though both started from the same and took the same batches.
    """

    def __init__(self, context: ClientContext, rows: Tensor, algorithm: ClientAlgorithm | None = None) -> None:
        self._context, self._rows, self._algorithm = context, rows, algorithm
        told = context.instruction
        chosen = derive_seed(told.seed, "compared rows", told.round_index, told.client_id) % COMPARED == 0
        # In the first round all coalitions are the initial model: one row stands for all, and for the client's own.
        self._alike = bool(len(rows)) and bool((rows == context.start).all())
        self._compared = self._alike or (chosen and bool(len(rows)))
        self._states: State = {}
        self._pending: list[tuple[Any, Any]] = []

    def begin_batch(self, batch: Any) -> None:
        """Remember a batch and the random state before the client's own step on it, which the rows will draw from."""
        if len(self._rows):
            self._pending.append((batch, torch_rngs(self._rows.device)))

    def step(self) -> None:
        """Take the rows' step on the batches since the last one.

        Called after the client's own gradients are computed and before its own step."""
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
        context, module, rows = self._context, self._context.module, self._rows
        if self._alike:
            rows = rows[:1]
        elif self._compared:
            rows = torch.cat([context.start[None], rows])
        self._states = states_of(context.space, module, rows)
        own = dict(module.named_parameters())
        frozen = {name for name, parameter in own.items() if parameter.grad is None or name not in self._states}
        change = None if self._algorithm is None else self._algorithm.change
        clip = clipping(trainer)
        self._kernel = RowTraining(module, trainer.optimizers[0], clip, frozen, shared=True, change=change)
        self._kernel.begin(self._states)

    def trained(self) -> Tensor:
        """Return the trained rows ``[m, P]``."""
        if not self._states:
            return self._rows
        rows = models_of(self._context.space, self._states, self._rows)
        if self._compared:
            self._compare(rows[0])
        if self._alike:
            return rows.expand(len(self._rows), -1)
        return rows[1:] if self._compared else rows

    def _compare(self, row: Tensor) -> None:
        context: Any = self._context
        allowed = ROUNDED if context.module.trainer.precision == "bf16-mixed" else TOLERANCE
        apart, way = (row - context.trained).norm(), (context.trained - context.start).norm()
        if context.trained.isfinite().all() and not apart <= allowed * way + 1e-6 * context.start.norm():
            raise not_the_same(
                f"at client {context.instruction.client_id} the model of a coalition differs by "
                f"{100 * float(apart / way.clamp_min(1e-12)):.1f} % from the client's own, and both began alike and "
                "saw the same: the module, its optimizer or its schedule does something that batched training does not"
            )


def not_the_same(reason: str, remedy: str = "Value the run by flsv retrain") -> NotBatched:
    """Make the error that coalitions' models, trained as rows, are not those of runs of the coalitions."""
    error = NotBatched(f"ShadowShapley: {reason}. {remedy}.")
    error.reason = reason
    return error


@contextmanager
def _drawing(states: Any, device: torch.device) -> Iterator[None]:
    """Draw the same random numbers within this context as the client's own model did on a batch."""
    now = torch_rngs(device)
    restore_torch_rngs(states, device)
    try:
        yield
    finally:
        restore_torch_rngs(now, device)
