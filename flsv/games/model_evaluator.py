"""ModelEvaluator: scores many models, given as vectors, by their outputs on validation batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from flsv.functional.shapley.predicted_outputs import OutputMeasure
from flsv.games.classification import Classification
from flsv.games.copy_evaluator import CopyEvaluator, leaves_program
from flsv.games.module_copies import (
    ModuleCopies,
    ScoringEffects,
    are_repeated,
    evaluation_mode,
    is_compiled,
    module_device,
    named_dtypes,
    not_repeated,
    other_weights,
    put_private,
)
from flsv.games.output_form import OutputForm, are_whole, have_bound
from flsv.games.output_measure import measure_by_metric, measure_of_classes
from flsv.games.output_metric import (
    OutputMetric,
    are_probabilities,
    check_two_classes,
    gives_logits,
    wants_probabilities,
)
from flsv.games.validation_batches import (
    checked_logits,
    free_cached_memory,
    no_forward,
    outputs_of,
    outputs_of_stacked,
    read_batches,
)
from flsv.games.vector_evaluator import Build, Scores, row_builder
from flsv.scores.class_scores import ClassScore
from flsv.scores.performance import Measure
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs
from flsv.utilities.stop_signals import stop_if_signaled

Context = Callable[[], AbstractContextManager[Any]]
Backend = Literal["auto", "vmap", "serial"]

# Activations of larger batches exceed 32 MB. Then the C library returns memory to the system after every layer: LeNet5
# takes twice as long on batches of 2,000. On batches of 25 it takes 1.2 times as long.
_CPU_BATCH_SIZE = 256
# Models with normally distributed random weights show whether a regression's outputs have a bound or are whole numbers.
#: The number of these models.
_NUM_RANDOM_MODELS = 8
#: The standard deviations of their weights.
_SMALL_SCALE = 0.3
_SCALE = 3.0
_LARGE_SCALE = 30.0


@checked
class ModelEvaluator(CopyEvaluator):
    """Evaluator of models of one structure by their outputs on validation batches.

    Each model is evaluated in a copy of the module, in evaluation mode, without gradients and with the same random
    numbers. If models are evaluated one at a time, a model's scores do not depend on the other models of the call, to
    the bit. Under vmap they depend on them by rounding, since batched kernels sum in another order.

    Args:
        module: the module. It is copied each time when models are evaluated.
        space: the map between the module and vectors ``[P]``.
        batches: pairs ``(x, y)``, read once and kept on the module's device. On the CPU, classifiers' batches are
            merged and cut to a faster size.
        num_classes: for classifiers, the number of classes M. ``forward(x)`` must then return logits ``[B, M]`` for
            integer classes y ``[B]``, and the scores ``"correct"`` and ``"loss"`` of :class:`Scores` are computed.
            None: only the metric is computed.
        metric: a torchmetrics metric of ``(forward(x), y)`` that returns one number, the score ``"metric"``, see
            :class:`flsv.games.output_metric.OutputMetric`. Copies of it are used.
        logits: for a metric of classes, whether the outputs are logits instead of probabilities. None: they are logits
            if one is outside [0, 1], see :func:`flsv.games.output_metric.gives_logits`.
        backend: ``"vmap"`` for chunks of models at once, ``"serial"`` for one model at a time, ``"auto"`` for vmap on
            CUDA and serial elsewhere. A module that vmap cannot handle is evaluated serially, with a warning.
        chunk: number of models at once under vmap. It is halved permanently when a chunk does not fit into memory.
        context: function that returns a context manager for a forward pass, such as a Lightning precision plugin's
            ``forward_context``. An autocast context of the caller has no effect.
        seed: seed of the random numbers that a forward pass draws.
        requester: name of the object that needs the metric, for messages.
        effects: the changes that scoring makes, if another evaluator has found them out. None: this one finds out.

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

    _metric: OutputMetric | None = None
    form: OutputForm | None = None

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        batches: Iterable[Any],
        *,
        num_classes: Count | None = None,
        metric: Metric | None = None,
        logits: bool | None = None,
        backend: Backend = "auto",
        chunk: Count = 64,
        context: Context | None = None,
        seed: int = 0,
        requester: str = "ModelEvaluator",
        effects: ScoringEffects | None = None,
    ) -> None:
        if num_classes is None and metric is None:
            raise ConfigurationError(
                "ModelEvaluator: neither num_classes nor metric is given. Pass the number of classes of a classifier, "
                "or a torchmetrics metric."
            )
        super().__init__(module, space, module_device(module), seed, effects)
        self.num_classes = num_classes
        self.chunk = chunk
        self.backend = backend
        if backend == "auto":
            self.backend = "vmap" if self.device.type == "cuda" else "serial"
        self._context = context or nullcontext
        self._requester = requester
        self._logits = logits
        self._given_metric = metric
        self._dtype_by_name = named_dtypes(module)
        if metric is not None:
            self._use_metric(metric)
        self._read_batches(batches)

        # Who has found out the effects of a classifier has checked its forward pass, too.
        knows_effects = effects is not None
        is_checked = knows_effects and metric is None and self.backend == "serial"
        if is_checked:
            self.form = OutputForm(classifies=True)
        else:
            self._check_forward(knows_effects)

    @torch.inference_mode(False)  # tensors made in inference mode can only be changed in it
    def _use_metric(self, metric: Metric) -> None:
        self._metric = OutputMetric(metric, self._requester, self.device)
        self._metrics = [self._metric]

    def _check_labels(self) -> None:
        """Check that the labels are of two classes if the metric compares classes."""
        if self._metric is None:
            return
        labels_of_batches = [labels for _, labels in self._batches]
        for labels in labels_of_batches:
            if not isinstance(labels, Tensor) or labels.is_floating_point():
                return  # the metric itself checks such labels

        has_label_per_pixel = labels_of_batches[0].ndim > 1
        all_labels = torch.cat([labels.flatten() for labels in labels_of_batches])
        metric = self._metric.metric
        takes_pixel_labels = not isinstance(metric, ClassScore)
        if takes_pixel_labels or not has_label_per_pixel:
            check_two_classes(metric, all_labels, self._requester)

    def _read_batches(self, batches: Iterable[Any]) -> None:
        max_batch_size = _CPU_BATCH_SIZE if self.device.type == "cpu" else None
        self._batches, self._support = read_batches(
            batches, self.device, num_classes=self.num_classes, size=max_batch_size
        )
        self._check_labels()

    def score_in_chunks(self) -> None:
        """Let :meth:`evaluate` score chunks of models at once from now on, if ``vmap`` can run the module."""
        if self.backend == "serial" and self.effects.are_none:
            self.backend = "vmap"
            with self._scoring():
                self._try_vmap(self.copies.take().load_to_score(), self._batches[0][0])

    @leaves_program
    @torch.inference_mode(False)
    @torch.no_grad()
    def evaluate(self, build: Build, count: int, keep: bool = False) -> Scores:
        """Compute the scores of ``count`` models. One model or one chunk of models is in memory at a time.

        Args:
            build: ``build(i, out)`` writes model i's vector into ``out [P]``, a tensor of the space's dtype on the
                module's device. It may be called more than once for one i.
            count: K, the number of models.
            keep: whether the scores also hold the models' outputs, if :attr:`form` is not None.
        """
        parts = [self._measured(0, outputs_by_batch=())]
        copies = self.copies.take()
        if self.backend == "vmap":
            parts += self._score_in_chunks(copies, build, count, keep)
        else:
            parts += self._score_one_by_one(copies, build, count, keep)
        return Scores.cat(parts)

    def _score_one_by_one(
        self, copies: ModuleCopies, build: Build, count: int, keep: bool
    ) -> Iterator[Scores]:
        vector = self._new_vector()
        num_of_copy = max(count, 1) if self.effects.are_none else 1
        for start_index in range(0, count, num_of_copy):
            with self._scoring():
                module = copies.load_to_score()
                for index in range(start_index, start_index + num_of_copy):
                    build(index, vector)
                    self._write(module, vector)
                    yield self._score(1, partial(outputs_of, module), keep)

    @leaves_program
    @torch.inference_mode(False)
    @torch.no_grad()
    def score_module(self, module: nn.Module, in_copy: bool = True) -> Scores:
        """Compute the scores of a module as it is, see :meth:`VectorEvaluator.score_module`."""
        is_scored_in_itself = not in_copy and self.effects.are_none
        with self._scoring():
            if not is_scored_in_itself or is_compiled(module):
                module = ModuleCopies(module, self.space).load_to_score(is_last=True)
            with evaluation_mode(module):
                return self._score(1, partial(outputs_of, module), keep=True)

    def _score_in_chunks(
        self, copies: ModuleCopies, build: Build, count: int, keep: bool
    ) -> Iterator[Scores]:
        with self._scoring():
            module = copies.load_to_score()
            put_private(module, self.space, self._read_private())
            num_scored = 0
            while num_scored < count:
                rows = range(num_scored, min(num_scored + self.chunk, count))
                scores = self._scores_if_they_fit(module, build, rows, keep)
                if scores is not None:
                    yield scores
                    num_scored = rows.stop
                else:
                    # Here the tensors of the failed chunk are freed. Inside of an except block they would still exist.
                    free_cached_memory(self.device)
                    self.chunk = len(rows) // 2

    def _scores_if_they_fit(
        self, module: nn.Module, build: Build, rows: range, keep: bool
    ) -> Scores | None:
        """Score the models ``rows`` at once. Return None if two or more do not fit into memory."""
        try:
            return self._score(len(rows), self._stacked_outputs(module, build, rows), keep)
        except RuntimeError as error:
            if is_oom_error(error) and len(rows) > 1:
                return None
            raise

    def computes(self, measure: Measure) -> bool:
        """Return whether this is a measure of classifiers, or by this evaluator's metric."""
        if measure.at_clients:
            return False
        if measure.is_of_classifier:
            return self._support is not None
        return measure.of is self._given_metric

    def output_measure(self, measure: Measure) -> OutputMeasure | None:
        """Return a measure as a function of the outputs that :meth:`evaluate` keeps. None: it keeps none."""
        if self.form is None:
            return None
        labels = [labels for _, labels in self._batches]
        if measure.is_of_classifier:
            all_labels = torch.cat([batch_labels.cpu() for batch_labels in labels])
            return measure_of_classes(measure.name, all_labels, self.support)
        assert self._metric is not None
        return measure_by_metric(
            measure, self.form, labels, self._metric.clone(torch.device("cpu"))
        )

    @leaves_program
    @torch.inference_mode(False)
    def gradient(self, vector: Tensor, loss: str = "negative_loss") -> Tensor:
        """Compute the gradient of the mean validation cross-entropy at a model, in full precision.

        Args:
            vector: ``[P]``, the model.
            loss: the loss's name. A classifier has no other.

        Returns:
            The gradient with respect to the P' parameters, the leading entries of the vector, float64 ``[P']``.
        """
        num_parameters = self.space.num_parameters
        gradient = torch.zeros(num_parameters, dtype=torch.float64, device=vector.device)
        with (
            self._scoring(),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),  # other kernels of attention sum in another order
        ):
            module = self.copies.take().load_to_score()
            # A normal tensor, also if the argument is an inference tensor.
            own_vector = vector.detach().clone()
            parameters = own_vector[:num_parameters].requires_grad_()
            buffers = own_vector[num_parameters:]
            for batch in self._batches:
                loss_part = self._loss_part(module, torch.cat([parameters, buffers]), batch)
                (gradient_part,) = torch.autograd.grad(loss_part, parameters)
                gradient += gradient_part.detach()
        return gradient

    def _loss_part(self, module: nn.Module, vector: Tensor, batch: Any) -> Tensor:
        """Return a batch's part of a model's mean cross-entropy. It depends on ``vector [P]`` by autograd."""
        x, y = batch
        state = self._differentiable_state(module, vector)
        outputs = functional_call(module, state, (x,))
        logits = checked_logits(outputs, y, len(self.support)).to(vector.dtype)
        num_samples = int(self.support.sum())
        return F.cross_entropy(logits, y, reduction="sum") / num_samples

    def _differentiable_state(self, module: nn.Module, vector: Tensor) -> dict[str, Tensor]:
        """Return a module's state from ``vector [P]``. Its parameters depend on the vector by autograd."""
        dtypes = named_dtypes(module)
        parameter_names = {name for name, _ in module.named_parameters()}
        state = {}
        for name, tensor in self.space.unflatten(vector).items():
            # Buffers are detached, because batch_norm refuses statistics that require gradients.
            if name not in parameter_names:
                tensor = tensor.detach()
            state[name] = tensor.to(dtypes[name])
        return state

    @property
    def batches(self) -> Sequence[tuple[Any, Any]]:
        """Pairs ``(x, y)`` on the models' device."""
        return self._batches

    @property
    def support(self) -> Tensor:
        """Number of validation samples of each class, int64 ``[M]``."""
        if self._support is None:
            raise ConfigurationError(
                "ModelEvaluator: scores by class and the cross-entropy need the argument num_classes."
            )
        return self._support

    @torch.inference_mode(False)
    @torch.no_grad()
    def check_logits(self, requester: str) -> None:
        """Raise ConfigurationError if a classifier's outputs are probabilities, although ``requester`` needs logits."""
        with self._scoring():
            module = ModuleCopies(self._module, self.space).load_to_score(is_last=True)
            outputs = self._outputs_of_copy(module)
        if are_probabilities(outputs):
            raise ConfigurationError(
                f"{requester}: {type(self._module).__name__}.forward gives probabilities, but negative_loss is the "
                "cross-entropy of logits. Remove the softmax from forward, or choose a loss that validation_step logs "
                "as the performance."
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

    def _score(
        self, num_models: int, compute_outputs: Callable[[Any], Any], keep: bool = False
    ) -> Scores:
        """Score c models on all batches. ``compute_outputs(x)`` returns their outputs ``[c, B, ...]``."""
        return self._measured(num_models, self._outputs_by_batch(compute_outputs), keep)

    def _outputs_by_batch(self, compute_outputs: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
        """Yield models' outputs ``[c, B, ...]`` for each batch, and its labels."""
        seed_global_rngs(self._seed, "utility")
        for x, y in self._batches:
            stop_if_signaled()
            with self._context():
                outputs = compute_outputs(x)
            yield outputs, y

    def _measured(
        self, num_models: int, outputs_by_batch: Iterable[tuple[Any, Any]], keep: bool = False
    ) -> Scores:
        """Measure the outputs of c models."""
        classification = None
        if self._support is not None:
            classification = Classification(num_models, self._support, self.device)
        metrics = self._new_metrics(num_models)
        form = self.form if keep else None
        stored_outputs = []  # of each batch
        for outputs, y in outputs_by_batch:
            if classification is not None:
                classification.update(outputs, y)
            for metric, model_outputs in zip(metrics, outputs):
                metric.update(model_outputs, y)
            if form is not None:
                stored_outputs.append(form.logits(outputs, y).float().cpu())

        values: dict[str, Tensor] = {}
        if classification is not None:
            values |= classification.compute()
        if self._metric is not None:
            values["metric"] = torch.tensor(
                [metric.compute() for metric in metrics], dtype=torch.float64
            )
        all_outputs = torch.cat(stored_outputs, dim=1) if stored_outputs else None
        return Scores(values, self._support, all_outputs)

    def _new_metrics(self, num_models: int) -> list[OutputMetric]:
        """Return a metric without batches for each of c models. None are returned without a metric."""
        if self._metric is None:
            return []
        while len(self._metrics) < num_models:  # copies are slow to make
            self._metrics.append(self._metric.clone())
        metrics = self._metrics[:num_models]
        for metric in metrics:
            metric.metric.reset()
        return metrics

    def _check_forward(self, knows_effects: bool) -> None:
        """Run a forward pass, and the metric on all batches, to find errors early."""
        copies = ModuleCopies(self._module, self.space)
        try:
            with self._scoring():
                self._try_forward(copies)
                if not knows_effects:
                    self._check_repetition(copies)
        except Exception as error:
            if isinstance(error, ConfigurationError) or is_oom_error(error):
                raise
            first_inputs, _ = self._batches[0]
            raise no_forward(self._module, first_inputs, error) from error

    @torch.inference_mode(False)
    @torch.no_grad()
    def _try_forward(self, copies: ModuleCopies) -> None:
        # Sets the form of the outputs, whether the metric gets probabilities, and the backend, if vmap fails.
        x, y = self._batches[0]
        module = copies.load_to_score()
        if self.num_classes is not None:
            checked_logits(self._outputs_of_copy(module), y, self.num_classes)
            self.form = OutputForm(classifies=True)
        if self._metric is not None:
            self._try_metric(self._metric, copies)
        if self.backend == "vmap":
            self._try_vmap(module, x)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _check_repetition(self, copies: ModuleCopies) -> None:
        """Check that two copies have the same outputs, also if the module's own weights are different. Find out whether
        a forward pass changes the copy.
        """
        module = copies.load_to_score()
        content = copies.content_of(module)
        outputs = self._outputs_of_copy(module)
        self.effects.module = copies.content_of(module) != content
        with other_weights(self._module, self.space):
            repeated_outputs = self._outputs_of_copy(copies.load_to_score())
        if not are_repeated(outputs, repeated_outputs, self.device):
            raise not_repeated(self._requester, self._module, "forward")

    def _outputs_of_copy(self, module: nn.Module) -> Any:
        x, _ = self._batches[0]
        seed_global_rngs(self._seed, "utility")
        with self._context():
            return module(x)

    def _try_metric(self, output_metric: OutputMetric, copies: ModuleCopies) -> None:
        _, y = self._batches[0]
        outputs = self._outputs_of_copy(copies.load_to_score())
        are_logits = self._logits
        if are_logits is None:
            are_logits = gives_logits(output_metric.metric, outputs, y)
        if are_logits is None:
            raise self._unknown_kind_of_outputs()
        output_metric.converts_logits = are_logits and wants_probabilities(output_metric.metric)
        self._set_form(copies.load_to_score(), output_metric.metric, are_logits)
        if self.form is not None and not self.form.classifies:
            self.form = self._form_with_bounds(self.form, copies)

    def _unknown_kind_of_outputs(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._requester}: all outputs of {type(self._module).__name__} for the first validation batch are "
            "in 0 .. 1, so they can be logits or probabilities. Pass "
            "performance=flsv.scores.FromOutputs(metric, logits=True) for logits, or logits=False for "
            "probabilities."
        )

    def _form_with_bounds(self, form: OutputForm, copies: ModuleCopies) -> OutputForm | None:
        # Whole numbers may be numbers of classes, between which no prediction may lie.
        if are_whole(self._random_outputs(copies, _SMALL_SCALE)):
            return None
        outputs = self._random_outputs(copies, _SCALE)
        outputs_of_large_weights = self._random_outputs(copies, _LARGE_SCALE)
        return replace(form, is_bounded=have_bound(outputs, outputs_of_large_weights))

    def _random_outputs(self, copies: ModuleCopies, scale: float) -> Tensor:
        """Return the outputs, without NaN, of models with random weights of the standard deviation ``scale``."""
        generator = torch.Generator().manual_seed(0)
        numbers = []
        for _ in range(_NUM_RANDOM_MODELS):
            module = copies.load_to_score()
            vector = self.space.read(module)
            weights = scale * torch.randn(self.space.num_parameters, generator=generator)
            vector[: len(weights)] = weights.to(vector)
            self.space.write(module, vector)
            outputs = self._outputs_of_copy(module)
            numbers.append(outputs[~outputs.isnan()])
        return torch.cat(numbers)

    def _set_form(self, module: nn.Module, metric: Metric, are_logits: bool) -> None:
        """Score a module. Set :attr:`form` if the outputs for all samples are numbers of one shape."""
        batch_shapes = self._shapes_of_scored_outputs(module)
        first_shape = batch_shapes[0]
        for batch_shape, (_, labels) in zip(batch_shapes, self._batches):
            if batch_shape is None or not isinstance(labels, Tensor):
                return
            has_output_per_label = len(labels) == batch_shape[0]
            has_first_sample_shape = batch_shape[1:] == first_shape[1:]
            if not has_output_per_label or not has_first_sample_shape:
                return
        _, y = self._batches[0]
        self.form = OutputForm.for_metric(metric, first_shape, y, gives_logits=are_logits)

    def _shapes_of_scored_outputs(self, module: nn.Module) -> list[Any]:
        """Score a module on all batches, which finds errors of the metric. Return the shapes ``[B, ...]`` of its
        outputs, None for a batch whose outputs are not numbers.
        """
        batch_shapes = []

        def outputs_with_recorded_shape(x: Any) -> Any:
            outputs = outputs_of(module, x)  # [1, B, ...]
            is_number = isinstance(outputs, Tensor) and outputs.is_floating_point()
            batch_shapes.append(outputs.shape[1:] if is_number else None)
            return outputs

        self._score(num_models=1, compute_outputs=outputs_with_recorded_shape)
        return batch_shapes

    def _try_vmap(self, module: nn.Module, x: Any) -> None:
        build_one_model = row_builder([self.space.read(module)])
        try:
            with self._context():
                compute_outputs = self._stacked_outputs(module, build_one_model, rows=range(1))
                compute_outputs(x)
        except Exception as error:
            if is_oom_error(error):
                raise
            self.backend = "serial"
            warnings.warn(
                f"torch.func.vmap cannot run {type(self._module).__name__} ({error}), so coalitions' models are "
                'evaluated one at a time. Set backend="serial" to avoid this warning.',
                stacklevel=5,
            )
