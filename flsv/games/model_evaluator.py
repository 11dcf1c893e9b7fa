"""ModelEvaluator: scores many models, given as vectors, by their outputs on validation batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchmetrics import Metric

from flsv.core.parameter_space import ParameterSpace
from flsv.games.module_copies import (
    ModuleCopies,
    ScoringCopies,
    ScoringEffects,
    are_repeated,
    evaluation_mode,
    is_compiled,
    isolated_scoring,
    module_device,
    named_dtypes,
    not_repeated,
    other_weights,
    put_private,
)
from flsv.games.output_metric import (
    OutputForm,
    OutputMetric,
    check_two_classes,
    wants_probabilities,
)
from flsv.games.random_models import SMALL_SCALE, RandomModels
from flsv.games.validation_batches import (
    checked_logits,
    free_cached_memory,
    no_forward,
    outputs_of,
    outputs_of_stacked,
    read_batches,
)
from flsv.games.vector_evaluator import (
    Build,
    Scores,
    Sums,
    VectorEvaluator,
    hits_of,
    losses_of,
    row_builder,
    score_batch,
)
from flsv.scores.class_scores import ClassScore
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs

Context = Callable[[], AbstractContextManager[Any]]
Backend = Literal["auto", "vmap", "serial"]

# Activations of larger batches pass 32 MB, beyond which the C library returns memory to the system after every layer:
# LeNet5 takes twice as long on batches of 2,000. On batches of 25 it takes 1.2 times as long.
_CPU_BATCH_SIZE = 256


@checked
class ModelEvaluator(VectorEvaluator):
    """Evaluator of models of one structure by their outputs on validation batches.

    Each model is evaluated in a copy of the module, in evaluation mode, without gradients and with the same random
    numbers. If models are evaluated one at a time, scores are bitwise identical whatever the
    other models of the call are. Under vmap they differ by rounding, since batched kernels sum in another order.

    Args:
        module: the module, which is copied as it is when models are evaluated.
        space: the map between the module and vectors ``[P]``.
        batches: pairs ``(x, y)``, read once and kept on the module's device. On the CPU, classifiers' batches are
            merged and cut to a faster size.
        num_classes: for classifiers, the number of classes M. ``forward(x)`` must then return logits ``[B, M]`` for
            integer classes y ``[B]``, and the scores ``"correct"`` and ``"loss"`` of :class:`Scores` are computed.
            None: only the metric is computed.
        metric: a torchmetrics metric of ``(forward(x), y)`` that returns one number, the score ``"metric"``, see
            :class:`flsv.games.output_metric.OutputMetric`. Copies of it are used.
        backend: ``"vmap"`` for chunks of models at once, ``"serial"`` for one model at a time, ``"auto"`` for vmap on
            CUDA and serial elsewhere. A module that vmap cannot handle is evaluated serially, with a warning.
        chunk: number of models at once under vmap. It is halved for good when a chunk does not fit into memory.
        context: function that returns a context manager for a forward pass, such as a Lightning precision plugin's
            ``forward_context``. An autocast context of the caller has no effect.
        seed: seed of the random numbers that a forward pass draws.
        asking: name of the object that needs the metric, for messages.
        effects: what scoring changes, as another evaluator has tried. None: this one tries it.

    Attributes:
        form: the :class:`OutputForm` of the outputs that :meth:`evaluate` keeps. None if the batches have no common
            form.

    Raises:
        ConfigurationError: an argument is wrong, the batches have no samples or wrong labels, ``forward`` does not
            return logits ``[B, M]``, or the metric does not take its outputs or returns more than one number.

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
        num_classes: Count | None = None,
        metric: Metric | None = None,
        backend: Backend = "auto",
        chunk: Count = 64,
        context: Context | None = None,
        seed: int = 0,
        asking: str = "ModelEvaluator",
        effects: ScoringEffects | None = None,
    ) -> None:
        if num_classes is None and metric is None:
            raise ConfigurationError(
                "ModelEvaluator: expected num_classes of a classifier, or a metric."
            )
        self.space = space
        self.num_classes = num_classes
        self.chunk = chunk
        self.device = module_device(module)
        self.backend = backend
        if backend == "auto":
            self.backend = "vmap" if self.device.type == "cuda" else "serial"
        self._module = module
        self._seed = seed
        self._context = context or nullcontext
        self._requester = asking
        self._read_private: Callable[[], Mapping[str, Tensor]] | None = None
        self.effects: ScoringEffects = effects or ScoringEffects()
        self.copies: ScoringCopies = ScoringCopies(module, space)
        self._dtype_by_name = named_dtypes(module)
        self._read_batches(batches)

        # One copy of the metric for each model of a chunk.
        self._metrics: list[OutputMetric] = []
        if metric is not None:
            # Tensors made in inference mode can only be changed in it.
            with torch.inference_mode(False):
                self._metrics.append(OutputMetric(metric, asking, self.device))

        self.form: OutputForm | None = None
        self._check_labels()
        is_tried = effects is not None
        if is_tried and not self._metrics and self.backend == "serial":
            self.form = OutputForm(classifies=True)  # a trial could find nothing else
        else:
            self._check_forward(is_tried)

    def _check_labels(self) -> None:
        """Check that the labels are of two classes if the metric compares classes."""
        labels_of_batches = [labels for _, labels in self._batches]
        for labels in labels_of_batches:
            if not isinstance(labels, Tensor) or labels.is_floating_point():
                return  # the metric says what it takes

        has_label_per_pixel = labels_of_batches[0].ndim > 1
        all_labels = torch.cat([labels.flatten() for labels in labels_of_batches])
        for output_metric in self._metrics:
            takes_pixel_labels = not isinstance(output_metric.metric, ClassScore)
            if takes_pixel_labels or not has_label_per_pixel:
                check_two_classes(output_metric.metric, all_labels, self._requester)

    def _read_batches(self, batches: Iterable[Any]) -> None:
        """Keep pairs ``(x, y)`` on the device, and count the samples of each class."""
        max_batch_size = _CPU_BATCH_SIZE if self.device.type == "cpu" else None
        self._batches, self._support = read_batches(
            batches, self.device, num_classes=self.num_classes, size=max_batch_size
        )

    def with_batches(
        self,
        batches: Iterable[Any] | None,
        private: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> ModelEvaluator:
        """Return a copy of this evaluator that computes the same scores on other batches.

        Args:
            batches: pairs ``(x, y)``. None: the batches of this evaluator.
            private: function that returns ``{name: tensor}``, the state-dict entries that vectors do not contain. None:
                those of the original module.
        """
        evaluator = copy(self)
        evaluator.copies = ScoringCopies(self._module, self.space)
        evaluator._read_private = private
        if batches is not None:
            evaluator._read_batches(batches)
            evaluator._check_labels()
        return evaluator

    @torch.inference_mode(False)
    @torch.no_grad()
    def evaluate(
        self,
        build: Build,
        count: int,
        keep: bool = False,
    ) -> Scores:
        """Compute the scores of ``count`` models. One model or one chunk of models is in memory at a time.

        Args:
            build: ``build(i, out)`` writes model i's vector into ``out [P]``, a tensor of the space's dtype on the
                module's device. It may be called more than once for one i.
            count: K, the number of models.
            keep: whether the scores also hold the models' outputs, if :attr:`form` is not None.
        """
        sums = self._sums(count, keep)
        copies = self.copies.take()
        if self.backend == "vmap":
            with self._scoring():
                module = copies.load_to_score()
                self._load_private(module)
                self._score_in_chunks(module, build, count, sums)
            return sums.scores(self._support, has_metric=bool(self._metrics))

        num_of_copy = max(count, 1) if self.effects.are_none else 1
        for start_index in range(0, count, num_of_copy):
            with self._scoring():
                module = copies.load_to_score()
                for index in range(start_index, start_index + num_of_copy):
                    self._write(module, build, index)
                    row = range(index, index + 1)
                    self._score(row, partial(outputs_of, module), sums)
        return sums.scores(self._support, has_metric=bool(self._metrics))

    @torch.inference_mode(False)
    @torch.no_grad()
    def score_module(self, module: nn.Module, keep: bool = False) -> Scores:
        """Compute the scores of a module as it is, see :meth:`VectorEvaluator.score_module`."""
        sums = self._sums(1, keep)
        is_scored_in_itself = not self.copies_module and self.effects.are_none
        with self._scoring():
            if not is_scored_in_itself or is_compiled(module):
                module = ModuleCopies(module, self.space).load_to_score(is_last=True)
            with evaluation_mode(module):
                self._score(range(1), partial(outputs_of, module), sums)
        return sums.scores(self._support, has_metric=bool(self._metrics))

    def _sums(self, count: int, keep: bool = False) -> Sums:
        return Sums(
            count,
            self.num_classes,
            num_batches=len(self._batches),
            device=self.device,
            output_form=self.form if keep else None,
        )

    def _scoring(self) -> AbstractContextManager[None]:
        """Return the context in which models are scored."""
        return isolated_scoring(self.effects, self._seed, device=self.device)

    def _load_private(self, module: nn.Module) -> None:
        """Load the state-dict entries that vectors do not contain, if ``private`` was passed to :meth:`on`."""
        if self._read_private is not None:
            put_private(module, self.space, self._read_private())

    def _loaded(
        self,
        copies: ModuleCopies,
        build: Build,
        index: int,
    ) -> nn.Module:
        """Return a copy of the module that holds model ``index``."""
        module: nn.Module = copies.load_to_score()
        self._write(module, build, index)
        return module

    def _write(
        self,
        module: nn.Module,
        build: Build,
        index: int,
    ) -> None:
        """Write model ``index`` into a copy of the module."""
        vector = torch.empty(self.space.size, dtype=self.space.dtype, device=self.device)
        build(index, vector)
        self.space.write(module, vector)
        self._load_private(module)

    def _score_in_chunks(
        self,
        module: nn.Module,
        build: Build,
        count: int,
        sums: Sums,
    ) -> None:
        first_row = 0
        while first_row < count:
            end_row = min(first_row + self.chunk, count)
            rows = range(first_row, end_row)
            if self._try_to_score(module, build, rows, sums):
                first_row = rows.stop
            else:
                # By now the failed chunk's tensors are gone: an exception keeps them alive while it is handled.
                free_cached_memory(self.device)
                self.chunk = len(rows) // 2

    def _try_to_score(
        self,
        module: nn.Module,
        build: Build,
        rows: range,
        sums: Sums,
    ) -> bool:
        """Score the models ``rows`` into ``sums``. Return False if two or more do not fit into memory."""
        try:
            outputs_of_models = self._stacked_outputs(module, build, rows)
            self._score(rows, outputs_of_models, sums)
        except RuntimeError as error:
            if is_oom_error(error) and len(rows) > 1:
                return False
            raise
        return True

    @torch.no_grad()
    def score_outputs(self, outputs: Tensor, losses: bool = True) -> Scores:
        """Compute c models' scores from their outputs, as :meth:`evaluate` does.

        Args:
            outputs: ``[c, V, ...]``, the outputs for all V samples, in the form :attr:`form`.
            losses: whether a classifier's loss is needed, which is 0 otherwise.
        """
        assert self.form is not None
        cpu = torch.device("cpu")
        num_models = len(outputs)
        sums = Sums(num_models, self.num_classes, num_batches=len(self._batches), device=cpu)
        labels_of_batches = [labels.cpu() for _, labels in self._batches]
        batch_sizes = [len(labels) for labels in labels_of_batches]
        outputs_of_batches = outputs.split(batch_sizes, dim=1)  # [c, B, ...] each

        if self.num_classes is not None:
            for position, labels in enumerate(labels_of_batches):
                batch_outputs = outputs_of_batches[position]
                sums.correct += hits_of(batch_outputs, labels)
                if losses:
                    sums.losses[:, position] = losses_of(batch_outputs, labels)

        if self._metrics:
            for row in range(num_models):
                metric = self._metrics[0].clone(cpu)
                for batch_outputs, labels in zip(outputs_of_batches, labels_of_batches):
                    model_outputs = self.form.outputs(batch_outputs[row])
                    metric.update(model_outputs, labels)
                sums.metric[row] = metric.value()
        return sums.scores(self._support, has_metric=bool(self._metrics))

    def metric_of_outputs(self, outputs: Tensor, labels: Tensor) -> float:
        """Compute the metric of one model's ``outputs [V, ...]``, in the form :attr:`form`, for V labels."""
        assert self.form is not None
        metric = self._metrics[0].clone(torch.device("cpu"))
        metric.update(self.form.outputs(outputs), labels)
        return metric.value()

    @torch.inference_mode(False)
    def gradient(self, vector: Tensor, loss: str = "negative_loss") -> Tensor:
        """Compute the gradient of the mean validation cross-entropy at a model, in full precision.

        Args:
            vector: ``[P]``, the model.
            loss: the loss's name. A classifier has no other.

        Returns:
            The gradient with respect to the P' parameters, the leading entries of the vector, float64 ``[P']``.
        """
        device = vector.device
        num_samples = int(self.support.sum())

        num_parameters = self.space.num_parameters
        gradient = torch.zeros(num_parameters, dtype=torch.float64, device=device)
        with (
            self._scoring(),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),  # attention by the same sums everywhere
        ):
            module = self.copies.take().load_to_score()
            dtypes = named_dtypes(module)
            parameter_names = {name for name, _ in module.named_parameters()}
            model = vector.detach().clone()
            parameters = model[:num_parameters].requires_grad_()
            buffers = model[num_parameters:]

            for x, y in self._batches:
                state = self.space.unflatten(torch.cat([parameters, buffers]))
                for name, tensor in state.items():
                    # Only the parameters: batch_norm refuses statistics that want a gradient.
                    if name not in parameter_names:
                        tensor = tensor.detach()
                    state[name] = tensor.to(dtypes[name])

                logits = functional_call(module, state, (x,))
                logits = checked_logits(logits, y, len(self.support)).to(vector.dtype)
                batch_loss = F.cross_entropy(logits, y, reduction="sum")
                (batch_gradient,) = torch.autograd.grad(batch_loss / num_samples, parameters)
                gradient += batch_gradient.detach()
        return gradient

    @property
    def batches(self) -> Sequence[tuple[Any, Any]]:
        """Pairs ``(x, y)`` on the models' device."""
        return self._batches

    @property
    def support(self) -> Tensor:
        """Number of validation samples of each class, int64 ``[M]``."""
        if self._support is None:
            raise ConfigurationError(
                "ModelEvaluator: without num_classes there are no classes, nor a cross-entropy."
            )
        return self._support

    @torch.inference_mode(False)
    @torch.no_grad()
    def check_logits(self, asking: str) -> None:
        """Raise ConfigurationError if a classifier's outputs are probabilities. ``asking`` is what needs the loss."""
        x, _ = self._batches[0]
        copies = ModuleCopies(self._module, self.space)
        with self._scoring():
            gives_probabilities = self._random_models(copies, x).give_probabilities()
        if gives_probabilities:
            raise ConfigurationError(
                f"{asking}: {type(self._module).__name__}.forward gives probabilities, and negative_loss is the "
                "cross-entropy of logits. Leave the softmax to the loss, or name a loss that validation logs."
            )

    def _stacked_outputs(
        self, module: nn.Module, build: Build, rows: range
    ) -> Callable[[Any], Any]:
        """Return a function from inputs to the outputs ``[c, B, ...]`` of the models ``rows``, computed at once."""
        shape = len(rows), self.space.size
        vectors = torch.empty(shape, dtype=self.space.dtype, device=self.device)
        for row, index in enumerate(rows):
            build(index, vectors[row])  # writes model `index` into the row
        stacked_state = {}  # each tensor is [c, ...]
        for name, tensor in self.space.unflatten(vectors).items():
            stacked_state[name] = tensor.to(self._dtype_by_name[name])
        return partial(outputs_of_stacked, module, stacked_state)

    def _score(self, rows: range, compute_outputs: Callable[[Any], Any], sums: Sums) -> None:
        """Score the models with the indices ``rows``, and write the results into ``sums``.
        ``compute_outputs(x)`` returns their outputs ``[c, B, ...]``.
        """
        while self._metrics and len(self._metrics) < len(rows):
            self._metrics.append(self._metrics[0].clone())
        metrics = self._metrics[: len(rows)]
        for metric in metrics:
            # An earlier model, or a pass that failed half-way, has left batches in it.
            metric.metric.reset()

        correct = sums.correct[rows.start : rows.stop]
        losses = sums.losses[rows.start : rows.stop]
        correct.zero_()
        seed_global_rngs(self._seed, "utility")
        logits_by_batch: list[Tensor] = []
        for position, (x, y) in enumerate(self._batches):
            with self._context():
                batch_outputs = compute_outputs(x)
            if self.num_classes is not None:
                checked_logits(batch_outputs[0], y, self.num_classes)
                batch_hits, batch_losses = score_batch(batch_outputs, y)
                correct += batch_hits
                losses[:, position] = batch_losses
            for metric, model_outputs in zip(metrics, batch_outputs):
                metric.update(model_outputs, y)
            if sums.output_form is not None:
                logits = sums.output_form.logits(batch_outputs, y)
                logits_by_batch.append(logits.float().cpu())

        if logits_by_batch:
            sums.outputs[rows.start] = torch.cat(logits_by_batch, 1)
        for metric, row in zip(metrics, rows):
            sums.metric[row] = metric.value()

    def _check_forward(self, is_tried: bool) -> None:
        """Run a forward pass, and the metric on all batches, to find errors early."""
        copies = ModuleCopies(self._module, self.space)
        try:
            with self._scoring():
                self._try_forward(copies)
                if not is_tried:
                    self._check_repetition(copies)
        except Exception as error:
            if isinstance(error, ConfigurationError) or is_oom_error(error):
                raise
            first_inputs, _ = self._batches[0]
            raise no_forward(self._module, first_inputs, error) from error

    @torch.inference_mode(False)
    @torch.no_grad()
    def _try_forward(self, copies: ModuleCopies) -> None:
        # Sets the form of the outputs, whether a metric gets probabilities, and the backend, if vmap fails.
        x, y = self._batches[0]
        module = copies.load_to_score()
        if self.num_classes is not None:
            with self._context():
                checked_logits(module(x), y, self.num_classes)
            self.form = OutputForm(classifies=True)
        for output_metric in self._metrics:
            self._find_form(output_metric, copies, x)
        if self.backend == "vmap":
            self._try_vmap(module, x)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _check_repetition(self, copies: ModuleCopies) -> None:
        """Check that two copies have the same outputs, whatever the run's own weights are, and whether one changes."""
        module = copies.load_to_score()
        content = copies.content_of(module)
        outputs = self._outputs_of_copy(module)
        self.effects.module = copies.content_of(module) != content
        with other_weights(self._module, self.space):
            repeated_outputs = self._outputs_of_copy(copies.load_to_score())
        if not are_repeated(outputs, repeated_outputs, self.device):
            raise not_repeated(self._requester, self._module, "forward")

    def _outputs_of_copy(self, module: nn.Module) -> Any:
        """Return a copy's outputs for the first batch."""
        x, _ = self._batches[0]
        seed_global_rngs(self._seed, "utility")
        with self._context():
            return module(x)

    def _find_form(self, output_metric: OutputMetric, copies: ModuleCopies, x: Any) -> None:
        metric = output_metric.metric
        random_models = self._random_models(copies, x)
        gives_logits = random_models.give_logits()
        output_metric.converts_logits = wants_probabilities(metric) and gives_logits
        module = copies.load_to_score()
        self._set_form(module, metric, gives_logits)
        # Class numbers are no form: between two of them lies another class.
        if self.form is not None and not self.form.classifies:
            is_bounded = random_models.have_bound()
            self.form = self.form.if_fractional(is_bounded, random_models.outputs(SMALL_SCALE))

    def _random_models(self, copies: ModuleCopies, x: Any) -> RandomModels:
        return RandomModels(
            partial(self._loaded, copies),
            num_parameters=self.space.num_parameters,
            vector=self.space.read(copies.load()),
            x=x,
            context=self._context,
        )

    def _set_form(self, module: nn.Module, metric: Metric, gives_logits: bool) -> None:
        """Score a module. Set :attr:`form` if all batches' outputs are numbers of one shape a sample."""
        batch_shapes: list[Any] = []  # [B, ...] of each batch, None if its outputs are no numbers

        def outputs_with_recorded_shape(x: Any) -> Any:
            outputs = outputs_of(module, x)
            is_number = isinstance(outputs, Tensor) and outputs.is_floating_point()
            batch_shapes.append(outputs.shape[1:] if is_number else None)
            return outputs

        # Not for the scores, but for the shapes, and to find errors of the metric on all batches.
        self._score(range(1), outputs_with_recorded_shape, self._sums(1))

        first_shape = batch_shapes[0]
        for batch_shape, (_, labels) in zip(batch_shapes, self._batches):
            if batch_shape is None or not isinstance(labels, Tensor):
                return
            has_output_per_label = len(labels) == batch_shape[0]
            has_first_sample_shape = batch_shape[1:] == first_shape[1:]
            if not has_output_per_label or not has_first_sample_shape:
                return
        _, y = self._batches[0]
        self.form = OutputForm.for_metric(metric, first_shape, y, gives_logits=gives_logits)

    def _try_vmap(self, module: nn.Module, x: Any) -> None:
        build = row_builder(self.space.read(module)[None])
        try:
            with self._context():
                outputs_of_one_model = self._stacked_outputs(module, build, range(1))
                outputs_of_one_model(x)
        except Exception as error:
            if is_oom_error(error):
                raise
            self.backend = "serial"
            warnings.warn(
                f"torch.func.vmap cannot run {type(self._module).__name__} ({error}): coalition models are evaluated "
                'one at a time. backend="serial" silences this.',
                stacklevel=5,
            )
