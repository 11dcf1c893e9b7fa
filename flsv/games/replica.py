"""A copy of the module into which coalition models are loaded, so that the module itself does not change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from flsv._lightning.evaluation import evaluating
from flsv.errors import ConfigurationError
from flsv.games.copies import check_copies, copied, is_compiled
from flsv.games.scores import ValidationBatches, score_batch, update_by_logits
from flsv.parameters import ParameterSpace, plain_tensors
from flsv.seeding import isolated_rngs

#: Writes model i's vector into a tensor ``[P]``.
Build = Callable[[int, Tensor], None]
Context = Callable[[], AbstractContextManager[Any]]


class Replica:
    """A copy of the module in evaluation mode, with its own vector.

    Args:
        module: what to copy.
        space: the map between vectors and modules.
        metric: a torchmetrics metric, also copied.
        context: entered around every forward pass, such as an autocast context.

    Raises:
        ConfigurationError: the module cannot be copied.
    """

    def __init__(
        self, module: nn.Module, space: ParameterSpace, metric: Metric | None = None, context: Context | None = None
    ) -> None:
        self.module = copied(module).eval().requires_grad_(False)
        self.space, self.context = space, context or nullcontext
        device = module_device(module)
        self.metric = None if metric is None else private_metric(metric).to(device)
        self.vector = torch.empty(space.size, dtype=space.dtype, device=device)
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._constant = frozenset(space.constant_names)

    def follow(self, module: nn.Module, private: Mapping[str, Tensor] | None = None) -> None:
        """Take from ``module``, now and at every load, what a vector does not hold (counters, masks, private state), or
        from ``private`` what is there by its name."""
        layers = dict(self.module.named_modules())
        for name, _, own, value in plain_tensors(module):
            layers[name.rpartition(".")[0]].__dict__[own] = value.clone()
        theirs = {n: tensor for n, tensor in named_tensors(module) if n not in self.space.names}
        theirs |= {n: tensor for n, tensor in (private or {}).items() if n in theirs}
        mine = dict(named_tensors(self.module))
        pairs = [(mine[n], b.detach()) for n, b in theirs.items() if n in mine and mine[n].shape == b.shape]
        self._pairs = ([m for m, _ in pairs], [t for _, t in pairs])
        self._copy_buffers()
        # What no forward pass changes need not be copied for every model.
        lasting = {id(mine[n]) for n in self._constant if n in mine}
        changing = [(m, t) for m, t in zip(*self._pairs) if id(m) not in lasting]
        self._pairs = ([m for m, _ in changing], [t for _, t in changing])

    def load(self, build: Build, index: int) -> None:
        """Become model ``index``."""
        build(index, self.vector)
        self.space.write(self.module, self.vector)
        self._copy_buffers()
        if self.metric is not None:
            self.metric.reset()  # what the model before, or a pass that failed half-way, left in it

    def logits(self, x: Any, y: Tensor, classes: int) -> Tensor:
        """The model's logits ``[B, M]``."""
        with self.context():
            logits = self.module(x)
        return checked_logits(logits, y, classes)

    @torch.inference_mode(False)
    def check(self, module: nn.Module, x: Any) -> None:
        """Whether this is a copy of ``module``, by its outputs for ``x``: see :func:`check_copies`.

        Raises:
            ConfigurationError: it is not.
        """

        def outputs(vector: Tensor) -> Any:
            self.load(rows_of(vector[None]), 0)
            with isolated_rngs(0, "trial"), self.context():
                return self.module(x)

        def original(vector: Tensor) -> Any:
            buffers = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
            with isolated_rngs(0, "trial"), evaluating(module), self.context():
                result = module(x)
            for buffer, version, before in buffers:
                if buffer._version != version:
                    buffer.copy_(before)
            return result

        # To run what is compiled here would compile it for this one batch.
        check_copies(module, self.space, outputs, None if is_compiled(module) else original)

    def score(self, batches: ValidationBatches) -> tuple[Tensor, list[Tensor]]:
        """Hits ``[M]`` over all batches and the loss sum of each; the metric is updated."""
        classes = len(batches.support)
        correct = torch.zeros(classes, dtype=torch.int64, device=self.vector.device)
        losses = []
        for position in range(len(batches)):
            x, y = batches[position]
            logits = self.logits(x, y, classes)
            hits, loss = score_batch(logits[None], y)
            correct += hits[0]
            losses.append(loss[0])
            if self.metric is not None:
                update_by_logits(self.metric, logits, y)
        return correct, losses

    def _copy_buffers(self) -> None:
        if self._pairs[0]:
            torch._foreach_copy_(*self._pairs)


def rows_of(vectors: Tensor) -> Build:
    """Model i is row i of ``vectors [K, P]``."""

    def build(index: int, out: Tensor) -> None:
        out.copy_(vectors[index])

    return build


class VectorEvaluator(ABC):
    """Gives scores of models of one structure, as vectors."""

    space: ParameterSpace

    def __call__(self, vectors: Tensor) -> Any:
        """The scores of the models in the rows of ``vectors [K, P]``."""
        if vectors.ndim != 2 or vectors.shape[1] != self.space.size:
            raise ValueError(f"expected vectors [K, {self.space.size}], got {list(vectors.shape)}.")
        return self.evaluate(rows_of(vectors), len(vectors))

    @abstractmethod
    def evaluate(self, build: Build, count: int) -> Any:
        """The scores of ``count`` models that exist one or a chunk at a time; see :data:`Build`."""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters, then its buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def module_device(module: nn.Module) -> torch.device:
    """The device of the module's first parameter or buffer."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def checked_logits(logits: Any, y: Tensor, classes: int) -> Tensor:
    """``logits``, if they are one row of M numbers per label."""
    if not isinstance(logits, Tensor) or logits.shape != (len(y), classes):
        what = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigurationError(
            f"the module's forward gives {what} for {len(y)} samples of {classes} classes; expected logits "
            f"[{len(y)}, {classes}]."
        )
    return logits


def private_metric(metric: Metric) -> Metric:
    """A copy that is empty and keeps to this process."""
    own = metric.clone()
    own.sync_on_compute = False
    own.reset()
    return own


def metric_value(metric: Metric) -> float:
    """The value of a metric that gives one number."""
    value = metric.compute()
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigurationError(
            f"{type(metric).__name__} gives {what}, expected one number per model: a utility is a scalar. Let the "
            'metric average, such as average="macro".'
        )
    return float(value)
