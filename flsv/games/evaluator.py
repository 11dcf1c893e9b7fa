"""ModelEvaluator: from vectors to scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from flsv.errors import ConfigurationError
from flsv.games.backends import NotMapped, VmapRunner, run_serial
from flsv.games.gradients import GradientProducts, gradient_products, loss_gradient
from flsv.games.replica import Build, Context, Replica, VectorEvaluator, module_device
from flsv.games.scores import Scores, ScoreSums, ValidationBatches
from flsv.parameters import ParameterSpace
from flsv.round import ClientMatrix

Backend = Literal["auto", "vmap", "serial"]

# Enough samples that Python's share is small, and few enough that activations stay below some 32 MB, beyond which the C
# library hands memory back to the system after every layer: LeNet5 takes twice as long on batches of 2,000, and 1.2
# times as long on batches of 25.
_CPU_BATCH = 256


class ModelEvaluator(VectorEvaluator):
    """Evaluates any number of models of one structure, given as vectors, on one set of validation batches.

    Models are evaluated in copies of the module in evaluation mode (BatchNorm's statistics come from the vector),
    without gradients; the module itself is read, never written. One pass over the batches gives all the
    :class:`Scores`: hits per class, loss, and a torchmetrics metric. One at a time, a model's scores are the same to
    the last bit whatever the other models of the call and their order; under vmap to rounding, since how batched
    kernels sum depends on the size of the chunk.

    Args:
        module: its ``forward(x)`` gives logits ``[B, M]``. It and its buffers that a vector does not hold (integer or
            non-persistent ones) are read at every call.
        space: the map between the module and vectors ``[P]``.
        batches: pairs ``(x, y)``, y integer classes ``[B]``. They are read once, moved to the module's device and kept
            there; on the CPU they are put together or cut to a size that suits it.
        num_classes: M.
        metric: a torchmetrics metric of ``(logits [B, M], y [B])`` that gives one number; one for two classes is given
            the probability of class 1. Copies of it are used.
        backend: ``"vmap"``: chunks of models at once under ``torch.func.vmap``; ``"serial"``: one model at a time;
            ``"auto"``: vmap on CUDA, serial elsewhere. A module that vmap cannot handle is evaluated one model at a
            time, with a warning.
        chunk: models at once under vmap; default: as many as free memory holds. A chunk that does not fit is halved.
        context: makes a context manager that is entered around every forward pass, such as a Lightning precision
            plugin's ``forward_context``. An autocast context of the caller's has no effect.

    Raises:
        ConfigurationError: a wrong argument; batches without samples or with wrong labels; a forward that does not
            give logits ``[B, M]``; a module that cannot be copied; a metric that gives more than one number.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> space = ParameterSpace(module)
        >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> evaluate = ModelEvaluator(module, space, batches, num_classes=2)
        >>> scores = evaluate(torch.tensor([[1.0, 0, 0, 1, 0, 0], [1.0, 1, 0, 0, 0, 0]]))
        >>> scores.value("accuracy").tolist()
        [1.0, 0.5]
    """

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        batches: Iterable[Any],
        *,
        num_classes: int,
        metric: Metric | None = None,
        backend: Backend = "auto",
        chunk: int | None = None,
        context: Context | None = None,
    ) -> None:
        for name, value in (("num_classes", num_classes), ("chunk", chunk)):
            if value is not None and value < 1:
                raise ConfigurationError(f"ModelEvaluator({name}={value}): expected at least 1.")
        if metric is not None and not isinstance(metric, Metric):
            raise ConfigurationError(
                f"ModelEvaluator(metric=...): expected a torchmetrics Metric, got {type(metric).__name__}."
            )
        self.space, self.num_classes = space, num_classes
        self.device = module_device(module)
        self.backend = self._backend(backend)
        size = _CPU_BATCH if self.device.type == "cpu" else None
        self._batches = ValidationBatches(batches, self.device, num_classes, size)
        self._module = module
        self._private: Callable[[], Mapping[str, Tensor]] | None = None
        self._sign = None if metric is None else (-1.0 if metric.higher_is_better is False else 1.0)
        with torch.inference_mode(False):  # what is made in there can only be changed in there
            self._replica = Replica(module, space, metric, context)
            self._vmap = VmapRunner(self._replica, chunk)
        self._try()

    def on(
        self, batches: Iterable[Any] | None, private: Callable[[], Mapping[str, Tensor]] | None = None
    ) -> ModelEvaluator:
        """An evaluator of the same models on other batches. It shares this one's copies of the module, so the two must
        not evaluate at the same time.

        Args:
            batches: pairs ``(x, y)``; None: the same.
            private: gives state of the module that is not in the vectors, by its names; None: the module's own.
        """
        other = copy(self)
        other._private = private
        if batches is None:
            return other
        size = _CPU_BATCH if self.device.type == "cpu" else None
        other._batches = ValidationBatches(batches, self.device, self.num_classes, size)
        return other

    @property
    def chunk(self) -> int | None:
        """Models at once under vmap; None until it is known."""
        return self._vmap.chunk

    @property
    def has_metric(self) -> bool:
        """Whether there is a torchmetrics metric, so that scores have a custom value."""
        return self._sign is not None

    @torch.inference_mode(False)
    @torch.no_grad()
    def evaluate(self, build: Build, count: int) -> Scores:
        """The scores of ``count`` models that exist one or a chunk at a time.

        Args:
            build: ``build(i, out)`` writes model i's vector into ``out [P]``, a tensor of the space's dtype on the
                module's device. It may be called more than once for one i.
            count: K.
        """
        batches = self._batches
        sums = ScoreSums(count, self.num_classes, len(batches), self.device)
        if count:
            self._replica.follow(self._module, self._private() if self._private is not None else None)
            # The same arithmetic on every thread: autocast belongs to the thread that entered it.
            with torch.autocast(self.device.type, enabled=False):
                if self.backend == "vmap":
                    sums = self._run_vmap(build, count, sums)
                else:
                    run_serial(self._replica, build, count, batches, sums)
        return sums.scores(batches.support, self._sign)

    def gradient(self, vector: Tensor, balanced: bool = False) -> Tensor:
        """float64 ``[P']``: the mean cross-entropy's gradient at ``vector [P]``, in full precision, over the leading
        entries that are parameters. ``balanced``: all classes that occur count the same."""
        self._replica.follow(self._module)
        return loss_gradient(self._replica.module, self.space, self._batches, vector, balanced)

    @torch.inference_mode(False)
    def gradient_products(self, vector: Tensor, updates: Tensor | ClientMatrix, order: int = 1) -> GradientProducts:
        """:func:`flsv.games.validation_gradient_products` on this evaluator's batches, in full precision."""
        self._replica.follow(self._module)
        return gradient_products(self._replica.module, self.space, self._batches, vector, updates, order)

    def _run_vmap(self, build: Build, count: int, sums: ScoreSums) -> ScoreSums:
        try:
            self._vmap.run(build, count, self._batches, sums)
            return sums
        except NotMapped as error:
            cause = error.args[0]
        sums = ScoreSums(count, self.num_classes, len(self._batches), self.device)
        run_serial(self._replica, build, count, self._batches, sums)
        self.backend = "serial"  # not where an error came out of that: vmap was not at fault
        warnings.warn(
            f"torch.func.vmap cannot run {type(self._module).__name__} ({cause}): coalition models are evaluated "
            f'one at a time. backend="{self.backend}" silences this.',
            stacklevel=4,
        )
        return sums

    def _backend(self, backend: str) -> str:
        if backend == "auto":
            return "vmap" if self.device.type == "cuda" else "serial"
        if backend not in ("vmap", "serial"):
            raise ConfigurationError(f'ModelEvaluator(backend={backend!r}): expected "auto", "vmap" or "serial".')
        return backend

    @torch.inference_mode(False)
    @torch.no_grad()
    def _try(self) -> None:
        """A forward pass on the first samples, so that a wrong module is found before training time is spent."""
        x, y = self._batches[0]
        if isinstance(x, Tensor):
            x, y = x[:1], y[:1]
        self._replica.logits(x, y, self.num_classes)
        self._replica.check(self._module, x)
