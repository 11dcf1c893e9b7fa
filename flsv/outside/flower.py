"""Contributions: wrapper of a strategy of Flower that measures contributions."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torchmetrics import Metric

from flsv.__about__ import code_version
from flsv.outside.value_round import RoundValues, metrics_by_name, value_round
from flsv.results.curves import Curves
from flsv.results.folder import CONTRIBUTIONS
from flsv.results.record import INTERVALS, now, record_head, write_record
from flsv.results.rows import ResultBuilder
from flsv.results.run_table import CSV
from flsv.results.tensorboard import TensorBoard
from flsv.utilities.atomic_files import FolderLock
from flsv.utilities.errors import ConfigurationError

#: Flower's logger, which ``flwr run --stream`` shows.
_log = logging.getLogger("flwr")


class Contributions(Strategy):  # type: ignore[misc]  # flwr is untyped where it is not installed
    """Wrapper of a Flower strategy that measures each client's contributions.

    The strategy uses Flower's message API. The wrapper passes all calls on to it, and the trained model is bit for bit
    the same as without the wrapper. Before the strategy aggregates a round's replies, :func:`flsv.value_round` computes
    the clients' values. The wrapper adds them to the round's MetricRecord, as entries such as ``"value/Boston"``, which
    Flower logs and stores in ``Result.train_metrics_clientapp``. An entry is the client's value over all rounds so far.
    It is NaN in a round in which the client sent no model.

    A client's name is the name under which its SuperNode is registered. If there is none, it is the ``"partition-id"``
    that the client's app writes into the reply's MetricRecord, otherwise the id of the client's node.

    All metrics are computed after each round. A coalition's model is the average of its clients' replies, weighted by
    samples (the strategy's ``weighted_by_key``) or, if replies have no such entry, with equal weights. This is so even
    if the strategy aggregates in another way, like FedAdam and Krum. Coalitions' models are averages and were not
    trained on their own, so do not pay by these values.

    If a round's values cannot be computed, training goes on. A warning gives the reason, and the round's values are
    NaN.

    Args:
        strategy: the strategy that trains the model. Its ``configure_train`` and ``aggregate_train`` are replaced by
            the wrapper's methods. Wrap Flower's own wrappers by this class, not the other way round.
        module: a network with the structure of the model. It is not changed.
        val_loader: the server's validation batches, for metrics that evaluate models.
        metrics: contribution metrics, by names of your choice.
        folder: a folder for this run alone, for ``contributions.csv``, ``run.json`` and TensorBoard, which
            ``flsv report`` and :func:`flsv.read_run` read. None: no files.
        num_clients: the number of all clients that may ever take part. None: the number of clients that are connected
            in the first round.
        options: further arguments of :func:`flsv.value_round`: ``loss``, ``num_classes``, ``deltas``, ``seed``.

    Raises:
        ConfigurationError: the folder holds a run or cannot be written. Before any client trains:
            :func:`flsv.value_round` refuses the arguments, because metrics need clients' responses or train coalitions,
            the arrays do not fit the module, or there is only one client.

    Example:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from flsv.metrics import CosineGradientShapley
        >>> strategy = Contributions(FedAvg(), nn.Linear(8, 3), metrics={"cgsv": CosineGradientShapley()})
        >>> strategy.weighted_by_key
        'num-examples'
    """

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        val_loader: Any = None,
        *,
        metrics: Any,
        folder: str | Path | None = None,
        num_clients: int | None = None,
        **options: Any,
    ) -> None:
        self.strategy = strategy
        self._module = module
        self._num_clients = num_clients
        self._metrics = metrics_by_name(metrics)
        self._value_round = partial(value_round, module, val_loader=val_loader, **options)
        self._files: _Files | None = None
        if folder is not None:
            self._files = _Files(Path(folder), strategy, module, self._metrics)
        self._client_names: list[str] = []  # by id, the clients that have sent a model
        self._name_of_node: dict[int, str] = {}
        self._initial_model: Any = None  # of the round
        # The methods are replaced on the strategy object, so that a strategy that overrides `start` calls these, too.
        self._original_configure = strategy.configure_train
        self._original_aggregate = strategy.aggregate_train
        strategy.configure_train = self.configure_train
        strategy.aggregate_train = self.aggregate_train

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["strategy"], name)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the strategy's rounds, then finish the files. For the arguments see Flower's ``Strategy.start``."""
        result = self.strategy.start(*args, **kwargs)
        if self._files is not None:
            self._files.finish()
        return result

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Let the strategy configure a round's training, and store the clients' initial model.

        Before the first round, values are computed once for a round in which no model changes, so that wrong arguments
        raise an error before training. For the arguments see Flower's ``Strategy.configure_train``."""
        messages = list(self._original_configure(server_round, arrays, config, grid))
        nodes = list(grid.get_nodes())
        for node in nodes:
            if node.name:
                self._name_of_node[node.node_id] = node.name
        is_first_round = self._initial_model is None
        self._initial_model = self._model_of(arrays)
        if is_first_round:
            self._num_clients = self._num_clients or len(nodes)
            self._dry_run()
        return messages

    def _dry_run(self) -> None:
        # A copy of the metrics raises errors before clients train.
        self._value_round(
            start=self._initial_model,
            updates=[self._initial_model, self._initial_model],
            metrics=copy.deepcopy(self._metrics),
            num_clients=self._num_clients,
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy aggregate the replies, and add the clients' values to its MetricRecord. For the arguments
        see Flower's ``Strategy.aggregate_train``.
        """
        replies = list(replies)
        values = {}  # by metric and client's name
        try:
            round_index = server_round - 1  # Flower counts rounds from 1
            values = self._measure_and_write(round_index, replies)
        except Exception as error:  # whatever error a metric raises, training continues
            warnings.warn(
                f"The contributions to round {server_round} could not be computed, and training goes on without them: "
                f"{error}",
                stacklevel=2,
            )
        arrays, record = self._original_aggregate(server_round, replies)
        if record is None:
            record = MetricRecord()
        for metric in self._metrics:
            for name in self._client_names:
                record[f"{metric}/{name}"] = values.get((metric, name), math.nan)
        return arrays, record

    def configure_evaluate(self, *args: Any) -> Iterable[Message]:
        """Let the wrapped strategy configure a round's evaluation."""
        return self.strategy.configure_evaluate(*args)

    def aggregate_evaluate(self, *args: Any) -> MetricRecord | None:
        """Let the wrapped strategy aggregate a round's evaluation."""
        return self.strategy.aggregate_evaluate(*args)

    def summary(self) -> None:
        """Log the wrapped strategy's settings."""
        self.strategy.summary()

    def _measure_and_write(
        self, index: int, replies: Sequence[Message]
    ) -> dict[tuple[str, str], float]:
        """Compute the values of a round's clients, ``{(metric, client): value}``, and write them into the run's
        files."""
        weight_key = getattr(self.strategy, "weighted_by_key", "num-examples")
        models = {}
        reported_samples = {}
        for reply in replies:
            if reply.has_error():
                continue
            numbers = _reported_numbers(reply)
            name = self._client_name(reply, numbers)
            if name in models:
                raise ConfigurationError(
                    f"Two clients have the name {name!r}. Give each client its own name."
                )
            models[name] = self._model_of(_only_record(reply.content.array_records))
            reported_samples[name] = numbers.get(weight_key)

        id_by_name = self._register_clients(models)
        updates = {client_id: models[name] for name, client_id in id_by_name.items()}
        samples = {client_id: reported_samples[name] for name, client_id in id_by_name.items()}
        round_values = self._round_values(index, updates, samples)
        if self._files is not None:
            self._files.write(index, round_values, self._client_names, samples)
        return _value_by_metric_and_client(round_values, id_by_name)

    def _client_name(self, reply: Message, numbers: Mapping[str, Any]) -> str:
        node = reply.metadata.src_node_id
        partition = numbers.get("partition-id", node)
        return self._name_of_node.get(node) or str(partition)

    def _round_values(
        self,
        index: int,
        updates: Mapping[int, Any],
        samples: Mapping[int, Any],
    ) -> RoundValues:
        has_no_samples = all(number is None for number in samples.values())
        return self._value_round(
            start=self._initial_model,
            updates=updates,
            metrics=self._metrics,
            num_samples=None if has_no_samples else samples,
            num_clients=self._num_clients,
            round_index=index,
        )

    def _register_clients(self, names: Iterable[str]) -> dict[str, int]:
        """Return the ids of a round's clients by name, ascending. New clients get the next free ids."""
        round_names = set(names)
        new_names = sorted(round_names - set(self._client_names), key=_sort_key)
        num_names = len(self._client_names) + len(new_names)
        limit = self._num_clients or 0
        if num_names > limit:
            raise ConfigurationError(
                f"The clients {new_names} are new, and the first round already had {self._num_clients} clients. Pass "
                "the number of all clients that may ever take part: Contributions(num_clients=...)."
            )
        self._client_names += new_names
        id_by_name = {}
        for client_id, name in enumerate(self._client_names):
            if name in round_names:
                id_by_name[name] = client_id
        return id_by_name

    def _model_of(self, arrays: ArrayRecord) -> Any:
        """Return a model's tensors by name. If the names are not the module's, return a list."""
        state = arrays.to_torch_state_dict()
        has_names_of_module = any(name in state for name in self._module.state_dict())
        if has_names_of_module:
            return state
        return list(state.values())


def _only_record(records: Mapping[str, ArrayRecord]) -> ArrayRecord:
    if len(records) != 1:
        raise ConfigurationError(
            f"A client's reply has the ArrayRecords {list(records)}, but exactly one is expected, with the trained "
            "model. Let the client's app send one ArrayRecord."
        )
    (record,) = records.values()
    return record


def _reported_numbers(reply: Message) -> dict[str, Any]:
    numbers = {}
    for record in reply.content.metric_records.values():
        numbers.update(record.items())
    return numbers


def _value_by_metric_and_client(
    round_values: RoundValues,
    id_by_name: Mapping[str, int],
) -> dict[tuple[str, str], float]:
    value_by_key = {}
    for metric, values in round_values.values.items():
        for name, client_id in id_by_name.items():
            value_by_key[metric, name] = values.overall[client_id].item()
    return value_by_key


def _sort_key(name: str) -> str:
    """Return a key by which names that are numbers are sorted as numbers."""
    if name.isdigit():
        return name.zfill(20)
    return name


def _check_is_new(folder: Path) -> None:
    if (folder / CONTRIBUTIONS).exists():
        raise ConfigurationError(
            f"{folder} holds a run already. Give each run a folder of its own, such as "
            "folder=f'runs/{context.run_id}'."
        )


def _record_without_rounds(
    strategy: Strategy,
    module: nn.Module,
    metrics: Mapping[str, Metric],
) -> dict[str, Any]:
    record = record_head(module, {"aggregator": strategy}, metrics, code_version())
    for metric_info in record["metrics"].values():
        metric_info["to_pay_by"] = False
    return record | {
        "rounds": None,
        "classes": None,
        "class_counts": None,
        "validation": None,
        "first_round": 0,
        "settings": {},
        "hashes": {},
        "fingerprint": {},
        "events": [],
        "of_rounds": type(strategy).__name__,
    }


class _Files:
    """Writer of the files that a :class:`flsv.FederatedLoop` writes into a run's folder."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy,
        module: nn.Module,
        metrics: Mapping[str, Metric],
    ) -> None:
        self._folder = folder.resolve()
        self._metrics = metrics
        self._lock = FolderLock(folder)
        _check_is_new(folder)
        self._record = _record_without_rounds(strategy, module, metrics)
        self._names: list[str] = []  # the names of all clients in the files
        self._results = ResultBuilder(metrics, self._names)
        self._csv = CSV(folder / CONTRIBUTIONS)
        self._logger = TensorBoardLogger(folder, name="", version="")
        self._tensorboard: TensorBoard | None = None
        self._samples: dict[int, int] = {}

    def write(
        self,
        index: int,
        round_values: RoundValues,
        names: Sequence[str],
        samples: Mapping[int, int | None],
    ) -> None:
        """Write a round's values. ``samples`` are the numbers of samples that its clients report, None or 0 if a client
        reports none.
        """
        num_clients = len(round_values.names)
        all_names = list(names)
        for client in range(len(names), num_clients):
            all_names.append(f"not seen ({client})")
        tensorboard = self._writer_for(all_names)

        weights = self._weights(samples, num_clients)
        self._samples |= {client: count or 0 for client, count in samples.items()}
        result = self._results.round_result(index, round_values.values, weights)
        self._csv.write_round(result)
        tensorboard.write_round(result)
        tensorboard.flush()

        self._record |= {
            "clients": all_names,
            "samples": [self._samples.get(client, 0) for client in range(num_clients)],
            "rounds_done": index + 1,
        }
        if result.interval_kinds:
            self._record[INTERVALS] = dict(result.interval_kinds)
        write_record(self._folder, self._record)

    def _weights(self, samples: Mapping[int, int | None], num_clients: int) -> Tensor:
        """Return the weights ``[num_clients]`` in the average, NaN for clients that are not in the round."""
        weights = torch.full((num_clients,), math.nan).double()
        for client, count in samples.items():
            # A client that reports no count has the weight of one sample.
            weights[client] = count or 1
        return weights / weights.nansum()

    def _writer_for(self, names: Sequence[str]) -> TensorBoard:
        """Return the TensorBoard writer. If the clients' names have changed, create a new one."""
        is_first_round = self._tensorboard is None
        if self._tensorboard is not None:
            if names == self._names:
                return self._tensorboard
            self._tensorboard.close()
        if is_first_round:
            self._csv.keep_rows_before(first_round=0)
        self._names[:] = names
        curves = Curves(self._metrics, names, class_names=None)
        self._tensorboard = TensorBoard(self._logger, curves)
        return self._tensorboard

    def finish(self) -> None:
        """Write the end of the run into ``run.json``, and log the folder's path."""
        if self._tensorboard is not None:
            self._tensorboard.close()
            write_record(self._folder, self._record | {"ended": now(), "logged": {}})
            _log.info("Contributions: flsv report %s", self._folder)
        self._lock.release()
