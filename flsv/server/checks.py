"""Checks of a federation's configuration before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.data_source import data_of
from flsv._lightning.patches import callbacks_of
from flsv._lightning.round_boundary import REPLACED_METHODS, WeightAveraging
from flsv.configuration.federation_config import FederationConfig
from flsv.core import VOCABULARY, Round, Split
from flsv.core.needs import check_declared, reads_of, requirements_of
from flsv.core.parameter_space import Head, ParameterSpace
from flsv.core.strategy import Strategy
from flsv.core.vocabulary import REPORTED_BY_CLIENTS
from flsv.data import FederatedDataModule
from flsv.metrics import ContributionMetric
from flsv.scores.performance import measure_of
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.uploads.base import Upload
from flsv.utilities.errors import ConfigurationError, check_lightning, need_classes


def check_names(strategies: Mapping[str, Strategy]) -> list[str]:
    """Check that strategies declare unique names of sent and reported values. Return the names of reported values."""
    _unique_names(strategies, "sends")
    return _unique_names(strategies, "reports")


def _unique_names(strategies: Mapping[str, Strategy], attribute: str) -> list[str]:
    """Return all names that strategies declare in an attribute. Raise ConfigurationError for duplicate names."""
    owner_by_name: dict[str, str] = {}
    for role, strategy in strategies.items():
        for name in getattr(strategy, attribute):
            owner = f"{role} {strategy!r}"
            if name in owner_by_name:
                raise ConfigurationError(
                    f"{owner} and {owner_by_name[name]} both declare {attribute} = {name!r}. Rename one of the two."
                )
            if attribute == "reports" and name in VOCABULARY:
                raise ConfigurationError(
                    f"{owner} declares reports = {name!r}, which is already an attribute of every round. Rename it."
                )
            owner_by_name[name] = owner
    return list(owner_by_name)


def check_setup(
    trainer: L.Trainer,
    module: L.LightningModule,
    metrics: ContributionMetrics,
    config: FederationConfig,
) -> FederatedDataModule:
    """Check a federation against trainer, module and data, and return the data module."""
    data = federated_data(trainer)
    check_trainer(trainer)
    config.sampler.check(data.client_names)
    config.check_clients(data.client_names)
    check_classes(data, metrics, config.strategies)
    _check_metrics(trainer, data, metrics)
    _check_strategies(config.strategies, metrics)
    _check_splits(data, config)
    check_needs(data, metrics, config)
    _check_samples(data, metrics, config)
    _check_steps(module, metrics)
    return data


def _check_metrics(
    trainer: L.Trainer, data: FederatedDataModule, metrics: ContributionMetrics
) -> None:
    is_trial = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set by Lightning's connectors
    num_rounds = trainer.max_epochs or 0  # -1 without a limit
    # Both checks raise an error where a metric cannot work.
    for metric in metrics.metrics.values():
        if isinstance(metric, ContributionMetric):
            metric.check(data.num_samples)
            if num_rounds > 0 and not is_trial:
                metric.check_rounds(num_rounds)


def _check_strategies(strategies: Mapping[str, Strategy], metrics: ContributionMetrics) -> None:
    """Check that each metric that a strategy reads exists, and is computed early enough."""
    metric_names = sorted(metrics.metrics)
    for role, strategy in strategies.items():
        if strategy.metric is None:
            continue
        if strategy.metric not in metrics.metrics:
            raise ConfigurationError(
                f"{role} {strategy!r} reads the metric {strategy.metric!r}, but federation.metrics has only "
                f"{metric_names}. Add a metric with this name there, as in {strategy.metric}: ClassSpecificShapley "
                f"(in Python metrics={{{strategy.metric!r}: ClassSpecificShapley()}}), or name one of these."
            )
        if strategy.metric_of_round:
            stage = metrics.stage_of(strategy.metric)
            if stage != "training":
                raise ConfigurationError(
                    f"{role} {strategy!r} needs the values of the metric {strategy.metric!r} before aggregation, but "
                    f"{type(metrics.metrics[strategy.metric]).__name__} is updated after {stage}. Name a metric that "
                    "needs no aggregate, such as flsv.metrics.PartialFederatedShapley."
                )


def _check_splits(data: FederatedDataModule, config: FederationConfig) -> None:
    interval = config.evaluation.every
    clients_without_test = _clients_without(data, "test")
    if interval and clients_without_test:
        raise ConfigurationError(
            f"ClientEvaluation(every={interval}) needs test samples at every client, but clients "
            f"{clients_without_test} have none. Set FederatedDataModule(splits=Splits(client_test=0.2)), or a larger "
            "share."
        )


def _clients_without(data: FederatedDataModule, split: Split) -> list[int]:
    clients = range(data.num_clients)
    return [client for client in clients if len(data.client_indices(client, split)) == 0]


def check_needs(
    data: FederatedDataModule, metrics: ContributionMetrics, config: FederationConfig
) -> None:
    """Check that data and clients meet the needs of metrics, strategies and filters, also with privacy."""
    for part in (*config.strategies.values(), *config.filters):
        check_declared(part, repr(part))

    clients_without_val = _clients_without(data, "val")
    if metrics.evaluating and clients_without_val:
        raise ConfigurationError(
            f"metrics {[*metrics.evaluating]} need validation samples at every client, but clients "
            f"{clients_without_val} have none. "
            "Set FederatedDataModule(splits=Splits(client_val=0.2)), or remove these metrics."
        )
    _check_messages_of_clients(metrics, config)
    readers_of_validation = _name_parts(metrics, config, _needs_validation)
    if readers_of_validation and not data.val_dataloader():
        raise ConfigurationError(
            f"the server's validation set is empty, but these need it: {readers_of_validation}. Set "
            "FederatedDataModule(splits=Splits(server_val=0.1)), remove them, or let clients evaluate the models of "
            'metrics that have this argument (evaluators="clients").'
        )


def _check_messages_of_clients(metrics: ContributionMetrics, config: FederationConfig) -> None:
    """Check that clients compute peer values, and may send reports and responses, where a part needs them."""
    readers_of_peers = _name_parts(metrics, config, _reads_peer_values)
    gives_peer_values = getattr(config.personalizer, "gives_peer_values", False)
    if readers_of_peers and not gives_peer_values:
        raise ConfigurationError(
            f"{readers_of_peers} need the clients' values of each other's models, which "
            f"personalizer={config.personalizer!r} does not compute. Use flsv.personalization.PFedSV or FedFomo, or "
            "remove them."
        )
    readers_of_responses = _name_parts(metrics, config, _needs_messages)
    if readers_of_responses and config.is_private:
        raise ConfigurationError(
            f"{readers_of_responses} need reports or responses of clients, but with {config.privacy!r} clients send "
            "only their noised updates. Remove one of the two, or let the server evaluate models."
        )


def _needs_validation(part: Any) -> bool:
    return "validation" in requirements_of(part, only_required=True)


def _reads_peer_values(part: Any) -> bool:
    return "peer_values" in reads_of(part)


def _needs_messages(part: Any) -> bool:
    return not REPORTED_BY_CLIENTS.isdisjoint(requirements_of(part))


def _check_samples(
    data: FederatedDataModule, metrics: ContributionMetrics, config: FederationConfig
) -> None:
    """Check that no part needs to read samples by index if the data are streams."""
    if not data.has_streams:
        return

    def reads_single_samples(part: Any) -> bool:
        # Responses are computed from samples that are read by index, which is not possible for streams.
        return "responses" in requirements_of(part) or getattr(part, "reads_order", False)

    parts = _name_parts(metrics, config, reads_single_samples)
    if parts:
        raise ConfigurationError(
            f"{parts} read the clients' samples by index, but a client's data are a stream. Use ShadowShapley or "
            "metrics of the updates, or a map-style data set."
        )


def _name_parts(
    metrics: ContributionMetrics, config: FederationConfig, applies_to: Callable[[Any], bool]
) -> str:
    """Name the metrics, strategies and filters for which ``applies_to`` is true. Empty if there are none."""
    descriptions = []
    metric_names = [name for name, metric in metrics.metrics.items() if applies_to(metric)]
    if metric_names:
        descriptions.append(f"metrics {metric_names}")
    for role, strategy in config.strategies.items():
        if applies_to(strategy):
            descriptions.append(f"{role} {strategy!r}")
    for update_filter in config.filters:
        if applies_to(update_filter):
            descriptions.append(f"filter {update_filter!r}")
    return " and ".join(descriptions)


_METRICS_OF_UPDATES = (
    "ClassSpecificShapley and CosineGradientShapley use only the updates and need neither."
)


def _check_steps(module: L.LightningModule, metrics: ContributionMetrics) -> None:
    measures = {name: measure_of(metric) for name, metric in metrics.evaluating.items()}
    measures |= metrics.performances
    metrics_of_logs = []
    metrics_of_forward = []
    for name, measure in measures.items():
        if measure is not None and measure.is_logged:
            metrics_of_logs.append(name)
        else:
            metrics_of_forward.append(name)
    has_validation_step = is_overridden("validation_step", module, L.LightningModule)
    if metrics_of_logs and not has_validation_step:
        raise ConfigurationError(
            f"metrics {metrics_of_logs} need a value that {type(module).__name__} logs in validation_step, which is "
            "not defined. Define it, or set performance='accuracy' or a torchmetrics metric, which use forward(x). "
            f"{_METRICS_OF_UPDATES}"
        )
    has_forward = is_overridden("forward", module, L.LightningModule)
    if metrics_of_forward and not has_forward:
        raise ConfigurationError(
            f"metrics {metrics_of_forward} call {type(module).__name__}.forward(x), which is not defined. Define it to "
            "return the logits [B, M], or set performance and mode to a value that validation_step logs. "
            f"{_METRICS_OF_UPDATES}"
        )


def check_classes(
    data: FederatedDataModule, metrics: ContributionMetrics, strategies: Mapping[str, Strategy]
) -> None:
    """Check that the samples have classes if a metric or a strategy needs them."""
    if data.no_classes is None:
        return
    if metrics.class_metrics:
        instead = "remove these metrics (in your own metric with values [n], set per_class = False)"
        first_metric = metrics.metrics[metrics.class_metrics[0]]
        if hasattr(first_metric, "loss"):
            class_name = type(first_metric).__name__
            instead = f"name a loss that validation_step logs: {class_name}(loss='val_loss')"
        raise need_classes(
            f"metrics {metrics.class_metrics} need classes", data.no_classes, instead
        )
    for role, strategy in strategies.items():
        if strategy.needs_classes:
            raise need_classes(
                f"{role} {strategy!r} needs classes", data.no_classes, f"choose another {role}"
            )


def check_space(
    space: ParameterSpace,
    metrics: ContributionMetrics,
    uploads: Sequence[Upload],
    head: str | None,
    num_classes: int | None,
) -> None:
    """Check that the module's layers meet the requirements of ``uploads``, ``metrics`` and ``head``."""
    for upload in uploads:
        upload.check(space)
    _check_games(space, metrics)
    if metrics.head_metrics:
        layer = _checked_head(space, f"metrics {metrics.head_metrics}")
    elif head and not space.unshared_head:
        # A head that no metric reads need not be shared, but it must exist.
        layer = _checked_head(space, f"head={head!r}")
    else:
        return
    if num_classes is not None and layer.num_classes != num_classes:
        raise ConfigurationError(
            f"the head {layer.name!r} has {layer.num_classes} outputs, but the data have {num_classes} "
            "classes. Give the module one output per class, or name its classifier: ClassSpecificShapley(head=...)."
        )


def _checked_head(space: ParameterSpace, readers: str) -> Head:
    """Return the shared classifier head, which ``readers`` need."""
    if space.unshared_head:
        raise ConfigurationError(
            f"{readers} compare the clients' classifier heads, but the head "
            f"{space.unshared_head!r} is not shared. Share it, name another layer with ClassSpecificShapley(head=...), "
            "or use metrics of the whole update, such as flsv.metrics.CosineGradientShapley."
        )
    if space.head is None:
        raise ConfigurationError(
            f"{readers} need the module's classifier head, but {space.why_no_head}. Name the last layer with "
            "ClassSpecificShapley(head=...), or remove these metrics."
        )
    return space.head


def check_head_is_trained(round: Round, metric_names: Sequence[str]) -> None:
    """Check that a client's first training has changed the head that metrics read, if it has changed the model."""
    has_trained_head = bool(round.client_heads.any())
    if has_trained_head or not round.state_updates.any():
        return
    raise ConfigurationError(
        f"metrics {list(metric_names)} read the classifier head {round.head.name!r}, but no client's first training "
        "has changed it. Name the layer that is trained: ClassSpecificShapley(head=...)."
    )


def _check_games(space: ParameterSpace, metrics: ContributionMetrics) -> None:
    """Check that the server has the whole model if a metric evaluates models."""
    unshared_names = space.kept_names
    if not unshared_names:
        return
    # Metrics that train coalitions are allowed, since their scores may not depend on the unshared tensors.
    refused_names = [name for name in metrics.game_metrics if name not in metrics.trained_names]
    if refused_names:
        raise ConfigurationError(
            f"metrics {refused_names} evaluate models on the server's validation set, but the server does not have the "
            f"complete models: {unshared_names[0]!r} and {len(unshared_names) - 1} more tensors stay at the clients. "
            "Share them, or use metrics of the clients' updates, such as flsv.metrics.CosineGradientShapley."
        )


def check_metric_shapes(
    strategies: Mapping[str, Strategy],
    metrics: Mapping[str, Metric],
    num_clients: int,
    num_classes: int,
) -> None:
    """Check that the metrics' values have the shapes that strategies declare."""
    sizes = {"n": num_clients, "M": num_classes}
    for role, strategy in strategies.items():
        if strategy.metric is None or strategy.metric_shape is None:
            continue
        metric = metrics[strategy.metric]
        shape = _shape_of_values(metric)
        if not shape or shape[0] != num_clients:
            continue  # a user's own metric may not know its size before the first update
        expected_shape = tuple(sizes[letter] for letter in strategy.metric_shape)
        if shape != expected_shape:
            dimensions = ", ".join(strategy.metric_shape)
            raise ConfigurationError(
                f"{role} {strategy!r} needs a metric of shape [{dimensions}] = {list(expected_shape)}, but the values "
                f"of {strategy.metric!r} ({type(metric).__name__}) have shape {list(shape)}. Name a metric with "
                f"{_VALUES_BY_SHAPE[strategy.metric_shape]}."
            )


#: Values of n clients and M classes, by their shape.
_VALUES_BY_SHAPE = {
    ("n",): "one value per client",
    ("n", "M"): "one value per client and class, such as flsv.metrics.ClassSpecificShapley",
    ("n", "n"): "one value per pair of clients, such as flsv.metrics.DomainRelevance",
}


def _shape_of_values(metric: Metric) -> tuple[int, ...] | None:
    """Return the shape of the metric's value, None if it is not known yet."""
    try:
        # The class's function is called, since the instance's `compute` warns and caches its result.
        value = type(metric).compute(metric)
    except Exception:
        return None
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape)


def federated_data(trainer: L.Trainer) -> FederatedDataModule:
    """Return the trainer's data module, which must be a FederatedDataModule."""
    check_lightning(trainer)
    data = data_of(trainer)
    if not isinstance(data, FederatedDataModule):
        if data is None:
            description = "dataloaders"
            arguments = "loader.dataset, val=val_loader.dataset, batch_size=32"
        else:
            description = type(data).__name__
            arguments = "my_datamodule"
        raise ConfigurationError(
            f"FederatedLoop needs a FederatedDataModule, but got {description}. Wrap it, and choose how samples are "
            "partitioned into clients: "
            f"trainer.fit(module, FederatedDataModule({arguments}, partitioner=IIDPartitioner(5)))."
        )
    return data


def check_trainer(trainer: L.Trainer) -> None:
    """Raise ConfigurationError for a trainer's settings and callbacks that cannot work with rounds."""
    for finder in callbacks_of(trainer):
        if isinstance(finder, BatchSizeFinder | LearningRateFinder):
            raise ConfigurationError(
                f"{type(finder).__name__} runs training steps before the fit, which do not belong to any client. Use "
                "it without the loop, on all clients' samples together, by Tuner(Trainer()) with the same module and "
                "FederatedDataModule. Then fit with its result."
            )
    if trainer.world_size > 1:
        raise ConfigurationError(
            f"the federation runs in one process on one device, but the trainer has {trainer.world_size} processes. "
            'Set Trainer(devices=1), or strategy="federated", which distributes the clients over processes.'
        )
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise ConfigurationError(
            "ModelPruning changes the module's parameters between rounds, but a federation needs the same parameters "
            "in all rounds. Prune the module before the fit (torch.nn.utils.prune). Its masks then stay the same in "
            "every round."
        )
    _check_limits(trainer)


def _check_limits(trainer: L.Trainer) -> None:
    """Check the numbers of rounds, batches and steps, and when the trainer validates."""
    if trainer.max_epochs == 0:
        rank_zero_warn(
            "max_epochs=0 is a run of 0 rounds, in which no client trains or gets a value. Set max_epochs to the "
            "number of rounds."
        )
    if trainer.limit_train_batches == 0:
        raise ConfigurationError(
            "limit_train_batches=0: no client would train. This is the number of batches per client and local epoch. "
            "Set at least 1, or remove it."
        )
    if trainer.val_check_interval != 1.0:
        raise ConfigurationError(
            f"val_check_interval={trainer.val_check_interval} would validate during a round, when there is no global "
            "model. Keep it at 1.0, and set check_val_every_n_epoch=k to validate every k rounds."
        )
    # mypy: set by Lightning's connectors
    if trainer.max_steps not in (None, -1) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"max_steps={trainer.max_steps} would stop in the middle of a round. Set max_epochs, the number of rounds."
        )


def check_callbacks(trainer: L.Trainer, loop: L.Callback) -> None:
    """Check the callbacks, and move finetuning callbacks behind the loop."""
    callbacks: list[L.Callback] = callbacks_of(trainer)
    check_lightning(*callbacks)
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        raise ConfigurationError(
            "StochasticWeightAveraging ends with an epoch that only updates BatchNorm's statistics, which would be a "
            "round in which no client trains. Use lightning.pytorch.callbacks.WeightAveraging, which averages the "
            "global models including these statistics. To anneal the learning rate, return "
            "torch.optim.swa_utils.SWALR from configure_optimizers."
        )
    _check_averaging([callback for callback in callbacks if isinstance(callback, WeightAveraging)])

    finetuning = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
    if finetuning:  # these have to run directly after the loop
        other_callbacks = [callback for callback in callbacks if callback not in finetuning]
        position = other_callbacks.index(loop) + 1
        reordered = other_callbacks[:position] + finetuning + other_callbacks[position:]
        trainer.callbacks = reordered  # type: ignore[attr-defined]  # set by Lightning's connectors


def _check_averaging(callbacks: Sequence[WeightAveraging]) -> None:
    """Check that there is at most one weight-averaging callback, and that it averages only between rounds."""
    if len(callbacks) > 1:
        names = [type(callback).__name__ for callback in callbacks]
        raise ConfigurationError(
            f"{' and '.join(names)} are both set, but a checkpoint can hold only one averaged model. Keep one of them."
        )
    for callback in callbacks:
        for name in REPLACED_METHODS:
            original_method = getattr(WeightAveraging, name, None)
            if getattr(type(callback), name) is not original_method:
                raise ConfigurationError(
                    f"{type(callback).__name__} overrides {name}, which would average models during the clients' "
                    "training. Override should_update(step_idx, epoch_idx) instead. It is called once per round, with "
                    "the global model."
                )
