"""The models of one client's coalitions, while it trains: all at once, or one after the other."""

from __future__ import annotations

from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from flsv.clients.algorithms.base import ClientContext
from flsv.clients.batched_checks import NotBatched, batched_steps, clip_norm, purely
from flsv.clients.batched_step import State
from flsv.clients.rows import ReusedOutputs, RowTraining
from flsv.errors import ConfigurationError
from flsv.metrics.shadow import Part
from flsv.parameters import ParameterSpace
from flsv.seeding import restore_torch_rngs, torch_rngs

#: How far a row may be from the client's own model where both are the same training, relative to how far it went; and
#: its gradient of the first batch; and both in bf16-mixed.
TOLERANCE, OF_GRADIENT, ROUNDED = 0.01, 1e-3, 0.1


class Entries:
    """Which entries of a vector are a part of the module.

    Args:
        space: the map between modules and vectors.
        part: see :class:`flsv.metrics.ShadowShapley`.

    Attributes:
        names: of the tensors.
        size: Q, the number of entries.
        num_parameters: how many of them, the leading ones, are parameters'.

    Raises:
        ConfigurationError: the module has no such part.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> head = Entries(ParameterSpace(net), "head")
        >>> head.names, head.of(torch.arange(9.0)).tolist()
        (('1.weight', '1.bias'), [6.0, 7.0, 8.0])
    """

    def __init__(self, space: ParameterSpace, part: Part) -> None:
        self.names = space.names
        if part != "all":
            if part == "head" and space.head is None:
                raise ConfigurationError(
                    'ShadowShapley(part="head"): the module has no linear layer. Name a part by patterns, such as '
                    'part=["classifier.*"].'
                )
            patterns = [f"{space.head.name}.*"] if part == "head" else list(part)  # type: ignore[union-attr]
            self.names = tuple(n for n in space.names if any(fnmatchcase(n, pattern) for pattern in patterns))
        ends = torch.tensor([shape.numel() for shape in space.shapes]).cumsum(0).tolist()
        places = {n: slice(end - s.numel(), end) for n, s, end in zip(space.names, space.shapes, ends)}
        shapes = dict(zip(space.names, space.shapes))
        self._shapes = [shapes[name] for name in self.names]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._places = [places[name] for name in self.names]
        self.size = sum(self._sizes)
        self.num_parameters = sum(p.stop - p.start for p in self._places if p.stop <= space.num_parameters)
        if not self.num_parameters:
            raise ConfigurationError(
                f"ShadowShapley(part={part!r}) matches no parameter of the module, which has {list(space.names)}."
            )

    def of(self, vector: Tensor) -> Tensor:
        """Of a vector ``[P]``: ``[Q]``."""
        return torch.cat([vector[place] for place in self._places])

    def put(self, vector: Tensor, row: Tensor) -> None:
        """Write a row ``[Q]`` into a vector ``[P]``."""
        for place, values in zip(self._places, row.split(self._sizes)):
            vector[place] = values

    def unflatten(self, rows: Tensor) -> State:
        """Rows ``[m, Q]`` as tensors ``[m, ...]`` by name."""
        parts = rows.split(self._sizes, dim=1)
        return {n: part.reshape(len(rows), *shape) for n, part, shape in zip(self.names, parts, self._shapes)}

    def flatten(self, states: State, like: Tensor) -> Tensor:
        """The inverse, in the dtype of ``like``."""
        return torch.cat([states[name].flatten(1).to(like) for name in self.names], 1)


class Batched:
    """Trains the coalitions' models of one client at once, in a Trainer's fit of the client's own.

    Args:
        context: the client's.
        rows: ``[m, Q]``, the models of its coalitions, or of a part of them.
        entries: which part.
        attempt: whether to check that the first step is pure: that it draws no random numbers, and keeps nothing.

    Raises:
        ConfigurationError: while it trains, a module that does not allow it; at the end, a model that differs from the
            client's own though both started from the same and took the same batches.
    """

    def __init__(self, context: ClientContext, rows: Tensor, entries: Entries, attempt: bool = False) -> None:
        self._context, self._rows, self._entries, self._attempt = context, rows, entries, attempt
        self._start = entries.of(context.start)
        # At first all coalitions are the initial model: what becomes of one becomes of all, and of the client's own.
        self._alike = bool(len(rows)) and bool((rows == self._start).all())
        self._training: RowTraining | None = None
        self._batch: Any = None
        module: Any = context.module
        self._whole = len(entries.names) == len(context.space.names)
        self._reused = None if self._whole or not len(rows) else ReusedOutputs(module, entries.names, self._remember)
        self._drawn: Any = None

    def begin_batch(self, batch: Any) -> None:
        """Before the client's own step on it."""
        self._batch = batch
        if self._reused is None:
            self._remember()
        else:
            self._reused.begin()

    def _remember(self) -> None:
        """What the client's own model draws from here on, all draw."""
        self._drawn = torch_rngs(self._rows.device)

    def step(self) -> None:
        """On the same batch; the client's own gradients are there, and it has not taken its step."""
        if not len(self._rows):
            return
        module: Any = self._context.module
        trainer = module.trainer
        first = self._training is None
        try:
            if self._training is None:
                with batched_steps(trainer):
                    self._training = self._begin(trainer)
            with purely(module) if first and self._attempt else nullcontext():
                gradients = self._gradients(trainer)
        except NotBatched as error:
            raise ConfigurationError(
                f"ShadowShapley trains the models of many coalitions as one batched model, and training_step of "
                f"{type(module).__name__} does not allow it: {error.reason}. Use one_by_one=True, or value the run by "
                "flsv retrain."
            ) from error
        if first and self._alike:
            self._check_gradients(gradients)
        self._training.take(gradients)

    def _begin(self, trainer: Any) -> RowTraining:
        module = self._context.module
        own = dict(module.named_parameters())
        rows = self._rows[:1] if self._alike else self._rows
        states = {
            name: tensor.to(own[name].dtype if name in own else tensor.dtype, copy=True)
            for name, tensor in self._entries.unflatten(rows).items()
        }
        if self._whole:
            # Counters that no vector holds are, as in a round, not averaged.
            rest = {name: tensor for name, tensor in module.named_buffers() if name not in states}
            states |= {name: tensor.expand(len(rows), *tensor.shape).clone() for name, tensor in rest.items()}
        unused = [name for name, parameter in own.items() if parameter.grad is None]
        return RowTraining(module, trainer.optimizers[0], states, clip_norm(trainer), unused)

    def _gradients(self, trainer: Any) -> State:
        assert self._training is not None
        now = torch_rngs(self._rows.device)
        restore_torch_rngs(self._drawn or now, self._rows.device)
        try:
            with batched_steps(trainer), nullcontext() if self._reused is None else self._reused.again():
                return self._training.gradients(self._batch)
        finally:
            restore_torch_rngs(now, self._rows.device)

    def _check_gradients(self, gradients: State) -> None:
        """Raise where a model that is the client's own has another gradient."""
        own = dict(self._context.module.named_parameters())
        pairs = [(gradient[0].detach(), own[name].grad) for name, gradient in gradients.items()]
        mine = torch.cat([(g - o).flatten() for g, o in pairs if o is not None])
        whole = torch.cat([o.flatten() for _, o in pairs if o is not None])
        if not mine.norm() <= self._allowed(OF_GRADIENT) * whole.norm() + 1e-7 * len(whole) ** 0.5:
            self._refuse("gradient of the first batch", float(mine.norm() / whole.norm().clamp_min(1e-12)))

    def leave(self) -> None:
        """The client has trained, or failed."""
        if self._reused is not None:
            self._reused.remove()

    def trained(self) -> Tensor:
        """``[m, Q]``, what has become of the rows."""
        if self._training is None:
            return self._rows
        rows = self._entries.flatten(self._training.states, self._rows)
        if not self._alike:
            return rows
        assert self._context.trained is not None
        own = self._entries.of(self._context.trained)
        way = (own - self._start).norm()
        if (
            own.isfinite().all()
            and not (rows[0] - own).norm() <= self._allowed(TOLERANCE) * way + 1e-6 * self._start.norm()
        ):
            self._refuse("model", float((rows[0] - own).norm() / way.clamp_min(1e-12)))
        return rows.expand(len(self._rows), -1)

    def _allowed(self, tolerance: float) -> float:
        module: Any = self._context.module
        return ROUNDED if module.trainer.precision == "bf16-mixed" else tolerance

    def _refuse(self, what: str, far: float) -> None:
        raise ConfigurationError(
            f"ShadowShapley: at client {self._context.instruction.client_id} the {what} of a coalition differs by "
            f"{100 * far:.1f} % from the client's own, and both began alike and saw the same: the module, its "
            "optimizer or its schedule does something that batched training does not. Use one_by_one=True, or value "
            "the run by flsv retrain."
        )


class OneByOne:
    """Trains them one after the other, by :meth:`ClientContext.step`, for modules that cannot be batched.

    Args:
        context: the client's.
        rows: ``[m, P]``, the models of its coalitions.
    """

    def __init__(self, context: ClientContext, rows: Tensor) -> None:
        self._context, self._rows = context, rows.clone()
        self._training: RowTraining | None = None
        self._batch: Any = None

    def begin_batch(self, batch: Any) -> None:
        """Before the client's own step on it."""
        self._batch = batch

    def step(self) -> None:
        """On the same batch; the client's own gradients are there, and it has not taken its step."""
        if not len(self._rows):
            return
        module: Any = self._context.module
        space, trainer = self._context.space, module.trainer
        if self._training is None:
            unused = [name for name, parameter in module.named_parameters() if parameter.grad is None]
            states = space.unflatten(self._rows)
            self._training = RowTraining(module, trainer.optimizers[0], states, clip_norm(trainer), unused)
        found = torch.stack([self._context.step(row, self._batch)[1] for row in self._rows])
        views = space.unflatten(found)
        self._training.take({n: views[n] for n, p in module.named_parameters() if p.grad is not None})

    def leave(self) -> None:
        """The client has trained, or failed."""

    def trained(self) -> Tensor:
        """``[m, P]``, what has become of the rows."""
        return self._rows
