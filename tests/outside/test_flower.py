"""Any strategy with its clients' values: the numbers of value_round, the model of the strategy, and what is refused."""

import math
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    Result,
)
from flwr.supercore.task_identity import TaskIdentity

import flsv
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    CumulativeShapley,
    ShadowShapley,
)
from flsv.outside.flower import Contributions
from flsv.payment import Budget, write_report
from helpers import make_generator, refused, warns

pytestmark = pytest.mark.flower
FAILS = "fails"  # instead of a number of samples: the client answers with an error


def make_net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def make_batches() -> list[Any]:
    x = torch.randn(30, 4, generator=make_generator(1))
    return [(x, x[:, :3].argmax(1))]


class Grid:
    """Clients that answer at once.

    ``sizes_by_round`` has, for each round, the number of samples by node id. A node that is missing is absent.
    """

    def __init__(
        self,
        *sizes_by_round: dict[int, Any],
        names: tuple[str, ...] = (),
        partition_ids: dict[int, int] | None = None,
    ):
        self._remaining_rounds = iter(sizes_by_round)
        self._names = names
        self._partition_ids = partition_ids or {}
        self.sizes: dict[int, Any] = {}  # of the round that comes next
        self.rounds: list[tuple[Any, list[Any]]] = []  # the model that was sent, and the replies'
        self.prepare_next_round()

    def prepare_next_round(self):
        self.sizes = next(self._remaining_rounds, {})

    def get_node_ids(self) -> list[int]:
        return [*self.sizes]

    def get_nodes(self) -> list[NodeInfo]:
        names = self._names or [""] * len(self.sizes)
        return [NodeInfo(node_id=node, name=name) for node, name in zip(self.sizes, names)]

    def send_and_receive(self, messages: Iterable[Message], timeout: float) -> list[Message]:
        messages = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        if not messages:
            return []  # nobody evaluates

        initial_model = messages[0].content["arrays"].to_torch_state_dict()
        replies = [self.response(message) for message in messages]
        models = []
        for reply in replies:
            if not reply.has_error():
                models.append(reply.content["arrays"].to_torch_state_dict())
        self.rounds.append((initial_model, models))
        self.prepare_next_round()
        return replies

    def response(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        # A reply refers to its message's ids, which Flower's own grid sets.
        message.metadata.__dict__.update(_message_id=f"m{node}", _src_node_id=1, _run_id=1)
        TaskIdentity._node_id = node  # the sender of the reply

        num_samples = self.sizes[node]
        if num_samples == FAILS:
            return Message(Error(code=5, reason=FAILS), reply_to=message)

        numbers = {"num-examples": num_samples}
        if node in self._partition_ids:
            numbers["partition-id"] = self._partition_ids[node]
        arrays = train_by_noise(message.content["arrays"], seed=node)
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(numbers)})
        return Message(content, reply_to=message)


def train_by_noise(arrays: ArrayRecord, seed: int) -> ArrayRecord:
    """In place of a training: the model with noise added."""
    generator = make_generator(seed)
    trained_state = {}
    for name, value in arrays.to_torch_state_dict().items():
        trained_state[name] = value + torch.randn(value.shape, generator=generator) / 5
    return ArrayRecord(trained_state)


@pytest.fixture(autouse=True)
def _as_a_task(monkeypatch):
    """Flower numbers messages by the task that makes them; there are no tasks here."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1, raising=False)


def run_with_values(grid: Grid, rounds: int = 1, metrics=None, module=None, **options):
    """The metrics that Flower has recorded, of each round."""
    metrics = {"value": CumulativeShapley()} if metrics is None else metrics
    strategy = Contributions(
        FedAvg(fraction_evaluate=0.0),
        module or make_net(),
        make_batches(),
        metrics=metrics,
        **options,
    )
    initial_model = ArrayRecord(make_net().state_dict())
    result = strategy.start(grid, initial_model, num_rounds=rounds)

    return [*result.train_metrics_clientapp.values()]


@pytest.mark.parametrize(
    ("grid_options", "sorted_names"),
    [
        # The third client is registered without a name.
        ({"names": ("Boston", "Lyon", "")}, ["3", "Boston", "Lyon"]),
        ({"partition_ids": {1: 9, 2: 8, 3: 7}}, ["7", "8", "9"]),
        ({}, ["1", "2", "3"]),
    ],
    ids=["registration", "replies", "node id"],
)
def test_client_names_come_from_the_registration_or_else_replies_or_else_the_node_id(
    grid_options, sorted_names
):
    grid = Grid({1: 10, 2: 20, 3: 30}, **grid_options)

    (record,) = run_with_values(grid)

    columns = [column for column in record if column.startswith("value/")]
    assert columns == [f"value/{name}" for name in sorted_names]


def test_failed_or_absent_client_is_nan_in_its_round_and_keeps_its_sum(tmp_path):
    everybody = {1: 10, 2: 20, 3: 30}
    second_fails = {1: 10, 2: FAILS, 3: 30}
    second_is_absent = {1: 10, 3: 30}
    grid = Grid(everybody, second_fails, second_is_absent, everybody)

    records = run_with_values(grid, rounds=4, folder=tmp_path / "run", num_clients=4)

    for round_index, has_value in enumerate(
        [
            [True, True, True],
            [True, False, True],
            [True, False, True],
            [True, True, True],
        ]
    ):
        values = [records[round_index][f"value/{name}"] for name in (1, 2, 3)]
        assert [not math.isnan(value) for value in values] == has_value

    table = flsv.read_run(tmp_path / "run")
    rows_of_second = table[(table["metric"] == "value") & (table["client_name"] == "2")]

    assert set(rows_of_second["round"]) <= {0, 3}
    assert rows_of_second["value"].iloc[-1] == records[3]["value/2"]
    assert set(table["client_name"]) == {"1", "2", "3"}  # the fourth has never come
    assert "not seen (3)" in write_report(tmp_path / "run").read_text()


def test_client_beyond_num_clients_leaves_only_its_round_without_values():
    sizes = {1: 10, 2: 20}
    with_a_third = {**sizes, 3: 30}
    grid = Grid(sizes, with_a_third, sizes)

    message = r"round 2 could not be computed.*\['3'\] are new.*num_clients"
    with warns(message):
        records = run_with_values(grid, rounds=3)

    is_without_value = [math.isnan(record["value/1"]) for record in records]
    assert is_without_value == [False, True, False]


@pytest.mark.parametrize(
    ("metric", "module", "why"),
    [
        (ContributionEstimation(), None, "needs .*clients.* only a FederatedLoop"),
        (ShadowShapley(), None, "needs .*trained.* only a FederatedLoop"),
        (CumulativeShapley(performance="val_f1", mode="max"), None, "val_f1"),
        (CumulativeShapley(), nn.Linear(5, 3), "does not fit the module"),
    ],
)
def test_contributions_that_cannot_be_measured_are_refused_before_training(metric, module, why):
    grid = Grid({1: 10, 2: 20}, {})
    with refused(why):
        run_with_values(grid, metrics={"value": metric}, module=module)
    assert grid.sizes == {1: 10, 2: 20}  # still that of the first round: nobody was sent anything


def test_contributions_refuse_a_folder_that_holds_a_run(tmp_path):
    run_with_values(Grid({1: 10, 2: 20}), folder=tmp_path)
    with refused("holds a run"):
        run_with_values(Grid({1: 10, 2: 20}), folder=tmp_path)


def test_contributions_wrap_wrapped_strategies_and_pass_attributes_on():
    clipped = DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 1e6, 2)
    strategy = Contributions(
        clipped, make_net(), make_batches(), metrics={"value": CumulativeShapley()}
    )

    assert strategy.clipping_norm == 1e6

    result = strategy.start(
        Grid({1: 10, 2: 20}), ArrayRecord(make_net().state_dict()), num_rounds=1
    )

    assert not math.isnan(result.train_metrics_clientapp[1]["value/1"])


def test_arrays_without_names_are_in_the_modules_order():
    strategy = Contributions(
        FedAvg(fraction_evaluate=0.0),
        make_net(),
        make_batches(),
        metrics={"value": CumulativeShapley()},
    )
    state = make_net().state_dict()
    arrays = ArrayRecord([value.numpy() for value in state.values()])

    result = strategy.start(Grid({1: 10, 2: 20}), arrays, num_rounds=1)

    (expected,) = run_with_values(Grid({1: 10, 2: 20}))
    values = result.train_metrics_clientapp[1]
    assert dict(values) == dict(expected)


def test_report_of_single_rounds_says_not_to_pay(tmp_path):
    run_with_values(Grid({1: 10, 2: 20}), folder=tmp_path)

    page = write_report(tmp_path, budget=Budget(100)).read_text()

    assert "Do not pay by these values" in page
    assert "These are values of single rounds that FedAvg ran" in page
    assert "<span>share" not in page


def test_flower_run_writes_event_files_of_the_run_and_of_each_client(tmp_path):
    sizes = {1: 10, 2: 20}
    run_with_values(Grid(sizes, sizes, names=("Boston", "Lyon")), rounds=2, folder=tmp_path)

    folder_names = set()
    for event_file in tmp_path.rglob("events.out*"):
        folder_names.add(event_file.parent.name)

    expected_names = {
        tmp_path.name,
        "Boston",
        "Lyon",
    }
    assert folder_names == expected_names


# ---- the strategy's own model and record


class Halfway(FedAvg):
    """Moves half of the way to the average, in a random order that torch's generator draws, and counts its rounds."""

    done = 0

    def start(self, *args, **kwargs) -> Result:
        self.done = 10
        return super().start(*args, **kwargs)

    def configure_train(self, server_round, arrays, *args):
        self.model_sent = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, *args)

    def aggregate_train(self, *args) -> tuple[ArrayRecord, MetricRecord]:
        arrays, _ = super().aggregate_train(*args)
        self.done += 1
        noise = torch.randn(()) / 10  # reported, so that the draws can be compared
        next_model = {}
        for name, average in arrays.to_torch_state_dict().items():
            next_model[name] = (self.model_sent[name] + average) / 2 + noise
        return ArrayRecord(next_model), MetricRecord({"noise": noise.item()})


def two_metrics() -> dict[str, Any]:
    return {
        "value": CumulativeShapley(performance="negative_loss"),
        "cssv": ClassSpecificShapley(),
    }


@pytest.mark.parametrize("make_strategy", [FedAvg, FedAdam, Halfway])
def test_strategy_keeps_its_model_and_record_and_has_the_values_of_value_round(
    tmp_path, make_strategy
):
    sizes = {1: 10, 2: 20, 3: 30}
    models = []
    records = []
    num_rounds = 2
    for is_valued in (False, True):
        torch.manual_seed(0)
        grid = Grid(sizes, sizes)
        strategy = make_strategy(fraction_evaluate=0.0)
        if is_valued:
            strategy = Contributions(
                strategy, make_net(), make_batches(), metrics=two_metrics(), folder=tmp_path
            )
        initial_model = ArrayRecord(make_net().state_dict())
        result = strategy.start(
            grid,
            initial_model,
            num_rounds=num_rounds,
        )
        models.append(result.arrays.to_torch_state_dict())
        records.append(dict(result.train_metrics_clientapp[2]))
        assert getattr(strategy, "done", 12) == 12

    plain_model, model = models
    plain_record, record = records
    for name, tensor in plain_model.items():
        assert torch.equal(model[name], tensor)
    assert {name: record[name] for name in plain_record} == plain_record

    metrics = two_metrics()
    for round_model, updates in grid.rounds:
        values = flsv.value_round(
            make_net(),
            round_model,
            updates,
            make_batches(),
            metrics=metrics,
            num_samples=[*sizes.values()],
        )
    for name in metrics:
        assert [record[f"{name}/{node}"] for node in sizes] == values[name].tolist()


def test_app_of_the_page_writes_a_run(tmp_path):
    app = runpy.run_path(str(Path(__file__).with_name("server_app.py")))["app"]
    sizes = {1: 10, 2: 20, 3: 30}
    config = {"folder": str(tmp_path), "num-server-rounds": 2}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)

    app(Grid(sizes, sizes), context)

    table = flsv.read_run(tmp_path)
    assert set(table["round"]) == {0, 1}
    assert {"value", "cssv"} <= set(table["metric"])
