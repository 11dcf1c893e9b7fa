"""InRunShapley: how much each client's samples reduce the server's validation loss, as the clients compute while they
train (InRunValues).

Paper: Wang, Mittal, Song and Jia, "Data Shapley in One Training Run", ICLR 2025, section 4, first order,
https://arxiv.org/abs/2406.11011
Owner: the flsv contributors

The value of a sample in a step is lr <g, gradient of the sample's part of the batch's loss>, with g the gradient of the
validation loss. A sample's values are summed over steps. The inner products are computed as ghost dot products, which
leave the training bitwise unchanged. A layer with inputs x and outputs y = f(x; theta) that is linear in its
parameters theta adds to the product of a sample z with a vector g over the parameters the sum over the sample's outputs
of (dL/dy)_z f(x_z; g), where L is the batch's loss. This takes one more forward pass of the layer, with g in place of
theta, and one product with the output gradient dL/dy, which the backward pass computes anyway.

Departures:

- g is computed at the global model that the round starts from and sent to the clients once a round. The paper computes
  g again in every step, from validation samples that the trainer has.
- With momentum, a step's gradient also moves the model in later steps. A sample is credited with all movement of the
  round that its gradient causes, see :func:`flsv.functional.step_weights`. Effects of momentum from an earlier round,
  weight decay, clipping and uploads are assigned to no sample: the server's metric reports their sum as the rest.
- With ``every`` above 1 values are computed in some of the steps only.

A sample is one element of the data set. For a language model it is a piece of text, with the losses of all its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from flsv._lightning.rounding import rounding_of
from flsv.contrib._ghost_products import GhostProducts
from flsv.core import FederationState, LocalData
from flsv.core.artifacts import keep_table
from flsv.core.needs import fields_of
from flsv.core.strategy import FederationInfo
from flsv.data.labels import batch_labels
from flsv.functional.shapley.gradient import client_in_run_values, step_weights
from flsv.metrics.base import ContributionMetric
from flsv.scores.performance import classifier_measure, loss_measure, measure_of
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import shuffle_stream

VALIDATION_GRADIENT = "validation_gradient"
IN_RUN_VALUES = "in_run_values"
#: Key in the client's state of a tensor with each training sample's class, as it was in the sample's last batch.
IN_RUN_CLASSES = "in_run_classes"
#: Stands for the class of a sample that was in no batch so far.
UNSEEN_CLASS = torch.iinfo(torch.long).min
#: Stands for the class of a sample in a batch without classes.
NO_CLASS = -1
#: Tolerated rounding error between the sum of a step's products and the product of g with the step's gradient, relative
#: to the sum of the products' sizes.
_RELATIVE_TOLERANCE = 1e-2


@dataclass(frozen=True)
class _WatchedBatch:
    """A watched batch: the steps before it, its samples and their classes."""

    step: int
    samples: Tensor
    classes: Tensor


class InRunShapley(ContributionMetric):
    r"""How far each client has lowered the validation loss, by class.

    The method is from Wang, Mittal, Song and Jia, "Data Shapley in One Training Run", ICLR 2025.

    A client's value is the sum of its samples' values. In a round that moves the global model x by :math:`\eta \sum_i
    w_i d_i`, with g the gradient of the server's validation loss (mean cross-entropy) at x,

    .. math::
        \phi_i = -\eta w_i \langle g, d_i \rangle, \qquad
        -\langle g, d_i \rangle = \sum_{z} f_{t(z)} \langle g, \nabla l_z \rangle + \text{rest}

    with :math:`\eta` the server's learning rate, :math:`w_i` client i's weight, :math:`d_i` its update, z its samples,
    :math:`l_z` their losses and :math:`f_{t(z)}` the factor with which the gradient of the local step t(z), which used
    z, enters the update. It is the paper's first order. The server computes :math:`\phi_i` from the updates alone. The
    client's report (:class:`InRunValues`) only divides this value among classes. The column
    ``"rest"`` is the part of the value that comes not from samples but from weight decay, clipping, momentum of an
    earlier round, upload transformations such as attacks, and steps in which the client computed no sample values.

    Values are summed over rounds, as the paper sums them over steps. A client gets 0 in a round in which it is absent.
    The sum of a client's row equals the value of :func:`flsv.functional.gradient_shapley` with fixed weights. It is
    accurate if updates are small.

    ``compute`` returns ``[num_clients, M + 1]``, in nats, positive if the loss falls. A client that never took part is
    NaN. ``per_client`` sums a row.

    When not to use it:
        To find wrong labels, which it detects weakly (an AUROC of 0.59 to 0.71 where 30 % are wrong). With large
        updates, with optimizers other than SGD at the clients, and without a validation set at the server.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        num_classes: M, the number of classes. None inside a ``FederatedLoop``.
        loss: for modules other than classifiers, such as language models: the name of the loss that they log in
            ``validation_step``, such as ``"val_loss"``. Samples without classes count as one class.
            None: the classifier's cross-entropy.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: in a loop: clients do not report, since ``client_algorithm=InRunValues()`` is missing, or
            the module does not log the loss with its autograd graph.

    Example:
        >>> metric = InRunShapley(num_clients=3, num_classes=2)
        >>> reported, slopes = torch.tensor([[0.75, 0.5], [0.5, 0.0]]), torch.tensor([-1.25, -0.25])
        >>> metric.update(torch.tensor([0, 2]), reported, slopes, torch.tensor([0.5, 0.5]))
        >>> metric.compute()
        tensor([[ 0.3750,  0.2500,  0.0000],
                [    nan,     nan,     nan],
                [ 0.2500,  0.0000, -0.1250]])
        >>> metric.per_client(metric.compute())
        tensor([0.6250,    nan, 0.1250])
    """

    unit = "fall of the validation loss (nats), summed over rounds"
    sign = "positive: the client's samples lower the validation loss; negative: they raise it."
    cost = "a gradient of the validation loss a round, and ghost products in the steps that clients look at."
    claims = ("effect",)
    to_pay_by = True
    reported_by = "FederatedLoop(client_algorithm=flsv.contrib.InRunValues())"

    total: Tensor
    participations: Tensor

    def __init__(
        self,
        num_clients: int | None = None,
        num_classes: int | None = None,
        loss: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.loss = loss
        #: The performance measure of models, see :meth:`flsv.Round.game`.
        self.measure = loss_measure(self, loss)
        super().__init__(num_clients, num_classes, **kwargs)

    @property
    def needs_classes(self) -> bool:
        """Return whether the training samples must have classes: True unless ``loss`` is the name of a logged loss."""
        return self.loss is None

    rows_of_clients: Sequence[str] = ("gradient_products",)
    needs: Sequence[str] | None = ("slopes", "games")

    @property
    def round_fields(self) -> dict[str, Any]:
        """Functions ``{argument: f(round)}`` with which a ``FederatedLoop`` computes arguments of ``update``."""
        return {
            "gradient_products": lambda round: round.slopes(loss=self.measure),
            "server_lr": lambda round: 1.0 if round.games is None else round.games.server_lr,
        }

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        assert num_classes is not None
        self.add_state("total", torch.zeros(num_clients, num_classes + 1), dist_reduce_fx="sum")
        self.add_state(
            "participations", torch.zeros(num_clients, dtype=torch.long), dist_reduce_fx="sum"
        )

    def update(
        self,
        client_ids: Tensor,
        in_run_values: Tensor,
        gradient_products: Tensor,
        aggregation_weights: Tensor,
        server_lr: float = 1.0,
    ) -> None:
        """Update the states with one round.

        Args:
            client_ids: ``[k]``, the round's clients.
            in_run_values: ``[k, M]``, the reported in-run values of each client's samples, summed by class.
            gradient_products: ``[k]``, the products g . d_i of the validation loss's gradient with the updates d_i.
            aggregation_weights: ``[k]``, the clients' weights in the round's aggregation.
            server_lr: the server's learning rate.
        """
        if in_run_values.shape != (len(client_ids), self.num_classes):
            raise ValueError(
                f"expected in_run_values [{len(client_ids)}, {self.num_classes}], got {list(in_run_values.shape)}."
            )
        device = aggregation_weights.device
        values = client_in_run_values(
            in_run_values.to(device), gradient_products.to(device), aggregation_weights, server_lr
        )
        # Copies: whoever holds the old states must not see them change.
        self.total = self.total.clone()
        self.participations = self.participations.clone()
        self.total[client_ids] += values.to(self.total)
        self.participations[client_ids] += 1

    def compute(self) -> Tensor:
        """Compute the sums over rounds ``[num_clients, M + 1]``: the classes' columns and ``"rest"``. NaN for clients
        that never took part."""
        never_took_part = self.participations == 0
        return self.total.masked_fill(never_took_part[:, None], torch.nan)

    def columns(self) -> list[str]:
        names = self.class_names or [str(i) for i in range(self.num_classes or 0)]
        return [*names, "rest"]

    def per_client(self, value: Tensor) -> Tensor:
        return value.sum(-1)


class InRunValues(ClientAlgorithm):
    """Client algorithm that computes the in-run Shapley values of a client's samples. The metric is
    :class:`InRunShapley`.

    The server sends the gradient of the validation loss, which has the size of the model. Each client reports its
    samples' values, summed by class: one number for each of the M classes. The values of single samples, summed over
    rounds, stay at the client: as the tensor ``in_run_values`` in its state, in the order of its training samples, and
    as the file ``in_run_values.csv`` in its folder, written in the rounds in which the run draws pictures
    (``Reporting.figures``).

    Each step in which values are computed costs one more forward pass of every trained layer (with LoRA, of the
    adapters alone).

    With ``InRunShapley(loss="val_loss")`` the data need no classes: all samples count as one class. A ``collate_fn``
    must not change the order of a batch's samples. Without classes such a change is not detected.

    When not to use it:
        With optimizers other than SGD, with BatchNorm, and where a step cannot cost another forward pass.

    Args:
        every: compute values in every ``every``-th optimizer step only, and scale their sum up to all steps of the
            round. The first of these steps changes from round to round. A client with few steps may have none in a
            round.

    Raises:
        ConfigurationError: Before training: the optimizer is not a single ``torch.optim.SGD`` with one learning rate
            and one momentum, without ``nesterov``, ``dampening`` and ``maximize``. Before the first step: there is no
            ``InRunShapley`` metric, a layer mixes a batch's samples (BatchNorm), or batches have no classes. After the
            first backward pass: the gradients differ from those that follow from the layers' inputs and outputs, since
            the loss has a term in the parameters themselves, or is scaled. After a later pass over a client's samples:
            a sample's class has changed, because a ``collate_fn`` changes the samples' order or draws new classes.

    Example:
        >>> InRunValues(every=4)
        InRunValues(every=4)
    """

    reads_order = True
    only_watches = True
    sends = (VALIDATION_GRADIENT,)
    reports = (IN_RUN_VALUES,)

    def __init__(self, every: Count = 1) -> None:
        self.every = every
        self._evaluator: Any = None
        self._loss = classifier_measure("negative_loss")
        # The gradient of the last global model, which all clients of a round are sent.
        self._model_of_gradient: Tensor | None = None
        self._gradient: Tensor | None = None
        self._ghost_products: GhostProducts | None = None

    def __getstate__(self) -> dict[str, Any]:
        process_state = dict.fromkeys(
            ("_evaluator", "_model_of_gradient", "_gradient", "_ghost_products")
        )
        return {**vars(self), **process_state}

    # ---- at the server

    def set_up(self, federation: FederationInfo) -> None:
        self.bind_evaluator(None)
        self._loss = self._loss_of(federation.metrics.values())

        optimizer_classes = [type(optimizer) for optimizer in federation.optimizers]
        is_one_sgd = optimizer_classes == [torch.optim.SGD]
        if not is_one_sgd or not _has_plain_steps(federation.optimizers[0]):
            raise ConfigurationError(
                f"{self!r} needs one torch.optim.SGD with a single learning rate and momentum, without nesterov, "
                f"dampening and maximize, but the module configures {list(federation.optimizers)}."
            )

    def _loss_of(self, metrics: Iterable[Any]) -> Any:
        """Return the loss whose gradient the InRunShapley metrics use."""
        in_run_metrics = []
        for metric in metrics:
            if measure_of(metric) is not None and IN_RUN_VALUES in fields_of(metric).values():
                in_run_metrics.append(metric)
        if not in_run_metrics:
            return classifier_measure("negative_loss")

        losses = dict.fromkeys(metric.loss for metric in in_run_metrics)
        if len(losses) > 1:
            raise ConfigurationError(
                f"{self!r} computes the gradient of one loss, but the InRunShapley metrics have the losses "
                f"{list(losses)} (None: the classifier's cross-entropy). Give all of them the same loss."
            )
        return in_run_metrics[0].measure

    def bind_evaluator(self, games: Any) -> None:
        self._evaluator = games
        self._model_of_gradient = None
        self._gradient = None

    def send(
        self,
        client: int,
        start: Tensor | None,
        state: FederationState,
    ) -> dict[str, Tensor]:
        if self._evaluator is None:
            raise ConfigurationError(
                f"{self!r} needs an InRunShapley metric at the server, which computes the validation gradient. Set "
                "FederatedLoop(metrics={..., 'in_run': flsv.contrib.InRunShapley()})."
            )
        global_model = state.model()
        if self._gradient is None or self._model_of_gradient is not global_model:
            self._model_of_gradient = global_model
            gradient = self._evaluator.gradient(global_model, loss=self._loss)
            self._gradient = gradient.to(global_model)
        return {VALIDATION_GRADIENT: self._gradient}

    # ---- at a client

    def begin_client(self, context: ClientContext) -> None:
        self.leave_client(context)
        self._ghost_products = _ghost_products_of(context)
        # State of the round.
        self._learning_rates: list[float] = []  # of each step
        self._watched_batches: list[_WatchedBatch] = []
        self._products: list[Tensor] = []
        self._batch_position = 0  # the next batch's
        self._num_watched_steps = 0
        no_classes = torch.full((context.samples,), UNSEEN_CLASS)
        self._sample_classes = context.state.get(IN_RUN_CLASSES, no_classes).cpu()

        # State of the epoch: its batches' samples and classes, the order of its samples, and the number read.
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._sample_order = torch.empty(0, dtype=torch.long)
        self._num_samples_read = 0

        # Every n-th step is watched, beginning with another one in each round.
        num_batches = max(context.batches, 1)
        num_first_steps = min(self.every, num_batches)
        self._first_watched_step = context.instruction.round_index % num_first_steps

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        assert self._ghost_products is not None
        classes = self._classes_of(batch)
        batch_size = len(classes)
        samples = self._next_samples(context, batch_size)
        self._batches.append((samples, classes))

        is_watched = (context.num_steps - self._first_watched_step) % self.every == 0
        if is_watched:
            self._ghost_products.watch(batch_size)
            step = len(self._learning_rates)
            self._watched_batches.append(_WatchedBatch(step, samples, classes))
        else:
            self._ghost_products.remove()

    def _classes_of(self, batch: Any) -> Tensor:
        labels = batch_labels(batch)
        if labels is not None:
            return labels.clone()
        if self._loss.is_of_classifier:
            raise ConfigurationError(
                f"{self!r} needs batches (x, y) with the class of every sample in y, int64 [B], but this batch, a "
                f"{type(batch).__name__}, has no classes. If the module logs its validation loss, set "
                "InRunShapley(loss='val_loss')."
            )
        return torch.full((extract_batch_size(batch),), NO_CLASS)

    def gradients(
        self,
        context: ClientContext,
        parameters: list[Tensor],
        gradients: list[Tensor],
    ) -> None:
        assert self._ghost_products is not None
        group = context.optimizer.param_groups[0]
        self._learning_rates.append(float(group["lr"]))
        self._momentum = float(group["momentum"])
        is_watched = self._ghost_products.batch_size is not None
        if not is_watched:
            return
        if self._num_watched_steps == 0:
            # These products are taken now, to check whether they can be computed for this module. `end_client` takes
            # those of all later steps.
            self._products.append(self._ghost_products.take())
            self._check_products(context, parameters, gradients)
        self._num_watched_steps += 1

    def leave_client(self, context: ClientContext) -> None:
        if self._ghost_products is not None:
            self._ghost_products.remove()

    def end_client(self, context: ClientContext) -> dict[str, Tensor]:
        self._store_sample_classes(context)
        assert self._ghost_products is not None
        # The products of all watched samples since the first step.
        self._products.append(self._ghost_products.take())
        self._ghost_products = None

        no_values = torch.zeros(context.samples, dtype=torch.float64)
        total_values = context.state.get(IN_RUN_VALUES, no_values).cpu()  # over rounds, by sample
        samples = self._value_watched_samples()
        context.state[IN_RUN_VALUES] = total_values.index_add(0, samples, self._watched_values)
        context.state[IN_RUN_CLASSES] = self._sample_classes
        self._watched_batches = []
        self._products = []
        return {}

    def _value_watched_samples(self) -> Tensor:
        """Store the values and classes of the round's watched samples, for `report`. Return the samples' indices."""
        self._watched_values = torch.empty(0, dtype=torch.float64)
        self._watched_classes = torch.empty(0, dtype=torch.long)
        if not self._watched_batches:
            return torch.empty(0, dtype=torch.long)
        # All are in the order of the batches.
        classes = torch.cat([batch.classes for batch in self._watched_batches])
        products = torch.cat(self._products).cpu()
        self._watched_classes = classes.cpu()
        self._watched_values = self._sample_factors(self._watched_batches) * products
        return torch.cat([batch.samples for batch in self._watched_batches])

    def _sample_factors(self, batches: Iterable[_WatchedBatch]) -> Tensor:
        """Return how far the gradient of each sample in watched batches moves the final model, float64."""
        # The watched steps stand for all steps.
        steps_per_watched_step = len(self._learning_rates) / max(self._num_watched_steps, 1)
        factors = step_weights(self._learning_rates, self._momentum) * steps_per_watched_step
        # A batch that no step follows has not changed the model.
        step_factors = torch.cat([factors, factors.new_zeros(1)])

        sample_factors = []
        for batch in batches:
            factor = step_factors[batch.step]
            sample_factors.append(factor.expand(len(batch.samples)))
        return torch.cat(sample_factors)

    def report(self, local: LocalData) -> Mapping[str, Tensor | float]:
        # Data without classes: all samples count as class 0.
        if self._loss.is_logged and local.num_classes == 1:
            self._watched_classes = torch.zeros_like(self._watched_classes)
        self._check_watched_classes(local.num_classes)
        # The values of samples stay at the client. The server gets their sums over classes.
        keep_table(local, IN_RUN_VALUES, partial(_values_as_csv, local.state[IN_RUN_VALUES]))
        no_values = torch.zeros(local.num_classes, dtype=torch.float64)
        values_by_class = no_values.index_add(0, self._watched_classes, self._watched_values)
        return {IN_RUN_VALUES: values_by_class}

    def _check_watched_classes(self, num_classes: int) -> None:
        is_wrong = (self._watched_classes < 0) | (self._watched_classes >= num_classes)
        wrong_classes = self._watched_classes[is_wrong]
        if len(wrong_classes):
            raise ConfigurationError(
                f"{self!r} sums values by class, but a training batch has class {int(wrong_classes[0])}, and the data "
                f"module's classes are 0 to {num_classes - 1}. Correct the batches' classes."
            )

    def _next_samples(self, context: ClientContext, count: int) -> Tensor:
        """Return the indices ``[count]`` of the next batch's samples."""
        epoch, position_in_epoch = divmod(self._batch_position, context.epoch_batches)
        if position_in_epoch == 0:
            self._begin_epoch(context, epoch)
        self._batch_position += 1
        begin = self._num_samples_read
        end = begin + count
        samples = self._sample_order[begin:end]
        self._num_samples_read = end
        if len(samples) != count:
            raise ConfigurationError(
                f"client {context.instruction.client_id} has {context.samples} samples, but its batches of an epoch "
                "have more, so values cannot be assigned to samples. Remove the collate_fn or hook that adds samples "
                "to batches."
            )
        return samples

    def _begin_epoch(self, context: ClientContext, epoch: int) -> None:
        """Store the last epoch's classes, and find out the order in which this epoch reads the samples."""
        self._store_sample_classes(context)
        instruction = context.instruction
        stream = shuffle_stream(
            instruction.seed, instruction.round_index, instruction.client_id, epoch
        )
        self._sample_order = context.local.order(stream)
        self._num_samples_read = 0

    def _store_sample_classes(self, context: ClientContext) -> None:
        """Store the epoch's classes. Raise ConfigurationError if a sample had another one before."""
        if not self._batches:
            return
        samples = torch.cat([batch_samples for batch_samples, _ in self._batches])
        classes = torch.cat([batch_classes for _, batch_classes in self._batches]).cpu()
        self._batches = []
        stored_classes = self._sample_classes[samples]
        is_changed = (stored_classes != UNSEEN_CLASS) & (stored_classes != classes)
        if is_changed.any():
            position = int(is_changed.int().argmax())
            raise ConfigurationError(
                f"{self!r}: training sample {int(samples[position])} of client {context.instruction.client_id} has "
                f"class {int(classes[position])} but had {int(stored_classes[position])} in an earlier epoch, so "
                "values cannot be assigned to samples. Remove the collate_fn or hook that changes the order of a "
                "batch's samples or draws new classes for them."
            )
        self._sample_classes[samples] = classes

    def _check_products(
        self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Check that the samples' products in the first step sum to the product of the whole gradient."""
        validation_gradients = context.unflatten(context.received(VALIDATION_GRADIENT), parameters)
        gradient_product, largest_product = _sums_of_products(gradients, validation_gradients)
        sample_products = self._products[0]
        sum_of_products = float(sample_products.sum())

        module: Any = context.module
        tolerance_of_sum = _RELATIVE_TOLERANCE * float(sample_products.abs().sum())
        tolerance_of_rounding = rounding_of(module.trainer).number * largest_product
        tolerance = tolerance_of_sum + tolerance_of_rounding
        is_equal = abs(sum_of_products - gradient_product) <= tolerance  # False for NaN
        if not is_equal:
            raise ConfigurationError(
                f"{self!r}: in the first step of client {context.instruction.client_id} the samples' products sum to "
                f"{sum_of_products:.6g}, but the product of the batch's gradient is {gradient_product:.6g}. Either a "
                "part of the loss is computed outside the layers' forward (by a compiled module, a functional call or "
                "a penalty on the weights), or the loss is scaled (precision='16-mixed'). Compute the loss by layers, "
                "with precision 32-true or bf16-mixed."
            )


def _ghost_products_of(context: ClientContext) -> GhostProducts:
    shared_parameters: list[Tensor] = []
    names = []
    for name, parameter in context.module.named_parameters():
        if parameter.requires_grad and context.is_shared(parameter):
            shared_parameters.append(parameter)
            names.append(name)
    reference_gradient = context.received(VALIDATION_GRADIENT)  # [P]
    gradients = context.unflatten(reference_gradient, shared_parameters)  # one per parameter
    return GhostProducts(context.module, dict(zip(names, gradients)))


def _sums_of_products(
    gradients: Iterable[Tensor],
    reference: Iterable[Tensor],
) -> tuple[float, float]:
    # The second sum is what the product would be if all gradients had the reference's direction.
    product = 0.0
    largest_product = 0.0
    for gradient, reference_gradient in zip(gradients, reference):
        flat_gradient = gradient.flatten()
        flat_reference = reference_gradient.flatten()
        product += float(torch.dot(flat_gradient, flat_reference))
        largest_product += float(flat_gradient.norm()) * float(flat_reference.norm())
    return product, largest_product


def _values_as_csv(sample_values: Tensor) -> str:
    lines = ["sample,value\n"]
    for sample, value in enumerate(sample_values.tolist()):
        lines.append(f"{sample},{value!r}\n")
    return "".join(lines)


def _has_plain_steps(optimizer: Any) -> bool:
    """Return whether SGD has one learning rate and momentum, and nothing else that changes steps."""
    rates_and_momenta = set()
    for group in optimizer.param_groups:
        rates_and_momenta.add((group["lr"], group.get("momentum")))
        for option in ("nesterov", "dampening", "maximize"):
            if group.get(option):
                return False
    return len(rates_and_momenta) == 1  # all groups have the same
