"""VmapProcess: the engine that trains many clients at once, as one batched model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import Tensor

from flsv._lightning.evaluation import as_given
from flsv._lightning.several_processes import Counted, add
from flsv.engines.engine import IdleEngine
from flsv.training.algorithms import ClientContext
from flsv.training.cohort_loader import ClientBatches, CohortLoader
from flsv.training.rows.kernel import GivenBatches, RowTraining, clipping
from flsv.training.rows.row_checks import not_batched
from flsv.training.rows.row_step import State, batched_steps
from flsv.training.rows.row_trial import try_rows
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError

#: Number of clients that are trained at once on a CPU, and on a GPU.
ON_CPU, ON_GPU = 50, 256


class _Begun(NamedTuple):
    """A client that waits to train as a row of the batched model."""

    turn: ClientContext
    state: State
    given: list[Any]


@checked
class VmapProcess(IdleEngine):
    """The engine ``"vmap"``, which trains many small clients at once.

    With ``FederatedLoop(engine="vmap")`` clients train under ``torch.func.vmap``. The engine works for modules with
    automatic optimization whose ``training_step`` is a function of the module's parameters, its buffers and the batch,
    with one of torch's elementwise optimizers. Other modules are refused before training. Before its first round, every
    run trains a few batches of a client both ordinarily and batched, and raises an error unless the results agree to
    1e-5. A round equals a round of ``engine="sequential"`` up to rounding, not to the bit. Runs of this engine resume
    bit for bit if the number of clients at once stays the same.

    Values that ``training_step`` logs are dropped. Callbacks with hooks around a batch are refused, except Lightning's
    own callbacks that are known to change nothing. Their hooks are called for one idle batch per round.

    Beside the models of the whole cohort, memory holds the model, gradient, optimizer state, training batches and
    activations of every client in the chunk that trains at once.

    Args:
        options: the arguments of :class:`flsv.engines.engine.Engine`.
        chunk: the number of clients that are trained at once. None means 50 on a CPU, 256 on a GPU. It is halved when
            memory runs out.

    Raises:
        ConfigurationError: the clients cannot be trained at once. The message gives the reason.

    Example:
        >>> from functools import partial
        >>> from flsv import FederatedLoop
        >>> loop = FederatedLoop(engine=partial(VmapProcess, chunk=20))
    """

    def __init__(self, *options: Any, chunk: Count | None = None) -> None:
        trainer, config = options[0], options[4]
        if why := not_batched(trainer, config.client_algorithm, config.optimizer_state):
            raise ConfigurationError(
                f'engine="vmap" trains many clients as one batched model, and {why}, or engine="sequential".'
            )
        super().__init__(*options)
        self._chunk = chunk or (ON_GPU if self._module.device.type == "cuda" else ON_CPU)
        self._now: int | None = None

    @property
    def client(self) -> int | None:
        """Return the client whose training begins or ends now, None while many train."""
        return self._now

    @property
    def place(self) -> str:
        return f"{len(self._visits)} at once"

    def _prepare(self) -> None:
        # These entries are the same at all clients, so they are not stacked, and the module's own values are used.
        self._unstacked = {*self.space.constant_names, *self.space.non_finite_names}
        self._unused = try_rows(self.trainer, self.space, self._state.seed, self._unstacked)

    def _batches(self) -> CohortLoader:
        return self._load(self._state.cohort)

    def _train(self, batches: Any) -> None:
        """Train the cohort chunk by chunk."""
        self._given = iter(batches)
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        self._own = {name: tensor.detach() for name, tensor in named if name not in self._unstacked}
        # Parameters that a callback has frozen at the round's start have no gradient from here on.
        clip = clipping(self.trainer)
        self._training = RowTraining(self._module, self.trainer.optimizers[0], clip, self._unused)
        while not self.complete:
            stop = min(self._visited + self._chunk, len(self._visits))
            self._train_rows([self._waiting(visit) for visit in self._visits[self._visited : stop]])
        add(self.trainer, Counted(steps=sum(visit.batches for visit in self._visits)))

    def _waiting(self, visit: ClientBatches) -> _Begun:
        """Begin a client's training, and return it ready for the batched model."""
        self._now = visit.client
        # As in a Trainer, the first batch is transferred before the client begins and the others after it: augmentation
        # then draws the same random numbers.
        given = [as_given(self.trainer, next(self._given))]
        self._begin(visit)
        given += [as_given(self.trainer, next(self._given)) for _ in range(visit.batches - 1)]
        state = {name: tensor.clone() for name, tensor in self._own.items()}
        turn = self.turn.suspend()
        self._now = None
        return _Begun(turn, state, given)

    def _train_rows(self, begun: list[_Begun]) -> None:
        """Train a chunk of clients as one batched model, in halves if memory runs out."""
        found: tuple[State, Tensor] | None = None
        try:
            states = {name: torch.stack([each.state[name] for each in begun]) for name in begun[0].state}
            with batched_steps(self.trainer):
                found = self._training.train(states, GivenBatches([each.given for each in begun]))
        except RuntimeError as error:
            if not is_oom_error(error) or len(begun) == 1:
                raise
        if found is None:  # out of the except block: the error's traceback holds the tensors
            self._chunk = half = (len(begun) + 1) // 2
            garbage_collection_cuda()
            rank_zero_warn(
                f"flsv: the training of {len(begun)} clients at once ran out of memory: from here on {half} train at "
                f"once. To begin with so many, set engine=partial(VmapProcess, chunk={half})."
            )
            self._train_rows(begun[:half])
            self._train_rows(begun[half:])
            return
        trained, losses = found
        for row, each in enumerate(begun):
            self._now = self._visits[self._visited].client
            torch._foreach_copy_(list(self._own.values()), [trained[name][row] for name in self._own])
            self.turn.resume(each.turn, losses[row])
            self._end()
        self._now = None
