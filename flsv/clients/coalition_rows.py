"""CoalitionRows: a client trains the models of its coalitions beside its own, as rows of one batched model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from flsv.clients.algorithms import ClientAlgorithm, ClientContext
from flsv.clients.kernel import RowTraining, models_of, states_of
from flsv.clients.row_step import NotBatched, State, batched_steps, purely
from flsv.errors import ConfigurationError
from flsv.seeding import restore_torch_rngs, torch_rngs

#: How far a coalition's model may be from the client's own where both are the same training, relative to how far that
#: went; and in bf16-mixed.
TOLERANCE, ROUNDED = 0.01, 0.1


class CoalitionRows:
    """Trains the coalitions' models of one client at once, in a Trainer's fit of the client's own.

    Args:
        context: the client's.
        rows: ``[m, P]``, the models of its coalitions.
        kernel: of a visit before.
        algorithm: what the client does differently, entry by entry; None: nothing.

    Attributes:
        kernel: for the next visit; its recordings are of this one's round.

    Raises:
        ConfigurationError: in the first step, a module that does not allow it; at the end, a model that differs from
            the client's own though both started from the same and took the same batches.
    """

    def __init__(
        self, context: ClientContext, rows: Tensor, kernel: RowTraining | None, algorithm: ClientAlgorithm | None = None
    ) -> None:
        self._context, self._rows, self.kernel, self._algorithm = context, rows, kernel, algorithm
        # At first all coalitions are the initial model: what becomes of one becomes of all, and of the client's own.
        self._alike = bool(len(rows)) and bool((rows == context.start).all())
        self._states: State = {}

    def begin_batch(self, batch: Any) -> None:
        """Before the client's own step on it: what its model draws from here on, all draw."""
        self._batch, self._drawn = batch, torch_rngs(self._rows.device)

    def step(self) -> None:
        """On the same batch; the client's own gradients are there, and it has not taken its step."""
        if not len(self._rows):
            return
        module: Any = self._context.module
        before = self.kernel
        kernel = self._begin(module.trainer) if not self._states else self.kernel
        assert kernel is not None
        gradients = kernel.played(self._batch)
        if gradients is None:
            try:
                with nullcontext() if kernel is before else purely(module), self._as_the_client():
                    gradients = kernel.gradients(self._batch)
            except NotBatched as error:
                raise ConfigurationError(
                    f"ShadowShapley trains the models of many coalitions as one batched model, and training_step of "
                    f"{type(module).__name__} does not allow it: {error.reason}. Value the run by flsv retrain."
                ) from error
        kernel.take(gradients)

    def _begin(self, trainer: Any) -> RowTraining:
        module = self._context.module
        self._states = states_of(self._context.space, module, self._rows[:1] if self._alike else self._rows)
        own = dict(module.named_parameters())
        apart = {name for name, parameter in own.items() if parameter.grad is None or name not in self._states}
        optimizer, kernel = trainer.optimizers[0], self.kernel
        if kernel is None or (kernel.module, kernel.optimizer, kernel.apart) != (module, optimizer, apart):
            change = None if self._algorithm is None else self._algorithm.change
            self.kernel = kernel = RowTraining(
                module, optimizer, trainer.gradient_clip_val, apart, shared=True, change=change
            )
        kernel.begin(self._states)
        return kernel

    @contextmanager
    def _as_the_client(self) -> Iterator[None]:
        """Within it rows draw what the client's own model has drawn of this batch."""
        module: Any = self._context.module
        device = self._rows.device
        now = torch_rngs(device)
        restore_torch_rngs(self._drawn, device)
        try:
            with batched_steps(module.trainer):
                yield
        finally:
            restore_torch_rngs(now, device)

    def trained(self) -> Tensor:
        """``[m, P]``, what has become of the rows."""
        if not self._states:
            return self._rows
        rows = models_of(self._context.space, self._states, self._rows)
        if not self._alike:
            return rows
        context: Any = self._context
        allowed = ROUNDED if context.module.trainer.precision == "bf16-mixed" else TOLERANCE
        apart, way = (rows[0] - context.trained).norm(), (context.trained - context.start).norm()
        if context.trained.isfinite().all() and not apart <= allowed * way + 1e-6 * context.start.norm():
            raise ConfigurationError(
                f"ShadowShapley: at client {context.instruction.client_id} the model of a coalition differs by "
                f"{100 * float(apart / way.clamp_min(1e-12)):.1f} % from the client's own, and both began alike and "
                "saw the same: the module, its optimizer or its schedule does something that batched training does "
                "not. Value the run by flsv retrain."
            )
        return rows.expand(len(self._rows), -1)
