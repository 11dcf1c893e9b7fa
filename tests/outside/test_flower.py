"""Any strategy with its clients' values: the numbers of value_round, the model of the strategy, and what is refused."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

import flsv
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    CosineGradientShapley,
    CumulativeShapley,
    ShadowShapley,
)
from flsv.outside.flower import Contributions
from flsv.report import Budget, write_report
from flsv.utilities.errors import ConfigurationError
from helpers.ports import free_ports
from helpers.sites import BIN

pytestmark = pytest.mark.flower
APP = Path(__file__).parents[1] / "engines" / "flower_app"
FAILS = "fails"  # instead of a number of samples: the client answers with an error


def make_net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def make_batches() -> list[Any]:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
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
    ) -> None:
        self._remaining_rounds = iter(sizes_by_round)
        self._names = names
        self._partition_ids = partition_ids or {}
        self.sizes: dict[int, Any] = {}  # of the round that comes next
        self.prepare_next_round()

    def prepare_next_round(self) -> None:
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

        replies = [self.answer(message) for message in messages]
        self.prepare_next_round()
        return replies

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        # A reply refers to its message's ids, which Flower's own grid sets.
        message.metadata.__dict__.update(_message_id=f"m{node}", _src_node_id=1, _run_id=1)
        TaskIdentity._node_id = node  # the sender of the reply

        num_samples: Any = self.sizes[node]
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
    generator = torch.Generator().manual_seed(seed)
    trained_state = {}
    for name, value in arrays.to_torch_state_dict().items():
        trained_state[name] = value + torch.randn(value.shape, generator=generator) / 5
    return ArrayRecord(trained_state)


@pytest.fixture(autouse=True)
def _as_a_task(monkeypatch):
    """Flower numbers messages by the task that makes them; there are no tasks here."""
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1, raising=False)


def run_with_values(
    grid: Grid, rounds: int = 1, metrics: Any = None, module: Any = None, **options: Any
) -> Any:
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
    result = strategy.start(grid, initial_model, num_rounds=rounds)  # type: ignore[arg-type]

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

    message = r"round 2 could not be valued.*\['3'\] were not there .*num_clients"
    with pytest.warns(UserWarning, match=message):
        records = run_with_values(grid, rounds=3)

    is_without_value = [math.isnan(record["value/1"]) for record in records]
    assert is_without_value == [False, True, False]


class FailsInRound1(CosineGradientShapley):
    def update(self, *, round_index: int, client_vectors: Tensor) -> None:  # type: ignore[override]
        if round_index == 1:
            raise RuntimeError("no luck")


def test_a_value_that_fails_does_not_end_the_training():
    sizes = {1: 10, 2: 20}
    with pytest.warns(
        UserWarning, match="round 2 could not be valued, and training goes on without: no luck"
    ):
        records = run_with_values(
            Grid(sizes, sizes, sizes), rounds=3, metrics={"value": FailsInRound1()}
        )

    assert len(records) == 3


@pytest.mark.parametrize(
    ("metric", "module", "why"),
    [
        (ContributionEstimation(), None, "asks for .*clients.* only a FederatedLoop has"),
        (ShadowShapley(), None, "asks for .*coalitions.* only a FederatedLoop has"),
        (CumulativeShapley(performance="val_f1", mode="max"), None, "val_f1"),
        (CumulativeShapley(), nn.Linear(5, 3), "does not fit the module"),
    ],
)
def test_contributions_that_cannot_be_measured_are_refused_before_training(metric, module, why):
    grid = Grid({1: 10, 2: 20}, {})
    with pytest.raises(ConfigurationError, match=why):
        run_with_values(grid, metrics={"value": metric}, module=module)
    assert grid.sizes == {1: 10, 2: 20}  # still that of the first round: nobody was sent anything


def test_contributions_refuse_a_folder_that_holds_a_run(tmp_path):
    run_with_values(Grid({1: 10, 2: 20}), folder=tmp_path)
    with pytest.raises(ConfigurationError, match="holds a run"):
        run_with_values(Grid({1: 10, 2: 20}), folder=tmp_path)


def test_contributions_wrap_wrapped_strategies_and_pass_attributes_on():
    clipped = DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 1e6, 2)
    strategy = Contributions(
        clipped, make_net(), make_batches(), metrics={"value": CumulativeShapley()}
    )

    assert strategy.clipping_norm == 1e6

    result = strategy.start(
        Grid({1: 10, 2: 20}), ArrayRecord(make_net().state_dict()), num_rounds=1
    )  # type: ignore[arg-type]

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

    result = strategy.start(Grid({1: 10, 2: 20}), arrays, num_rounds=1)  # type: ignore[arg-type]

    (expected,) = run_with_values(Grid({1: 10, 2: 20}))
    values = result.train_metrics_clientapp[1]
    assert dict(values) == dict(expected)


@pytest.fixture
def folder_of_two_rounds(tmp_path):
    """The folder of a Flower run of two clients."""
    sizes = {1: 10, 2: 20}
    run_with_values(
        Grid(sizes, sizes, names=("Boston", "Lyon")),
        rounds=2,
        metrics={"value": CumulativeShapley(), "cssv": ClassSpecificShapley()},
        folder=tmp_path,
    )
    return tmp_path


def test_report_of_a_flower_run_is_labelled_and_has_no_shares(folder_of_two_rounds):
    page = write_report(folder_of_two_rounds).read_text()
    page_of_client = write_report(folder_of_two_rounds, client="Boston").read_text()

    assert "These are values of single rounds that FedAvg ran" in page
    assert "<span>share" not in page
    assert "The training has not finished" not in page
    assert "These are values of single rounds" in page_of_client


def test_report_with_a_budget_refuses_to_pay_by_values_of_single_rounds(folder_of_two_rounds):
    with pytest.raises(ConfigurationError, match="values of single rounds that FedAvg ran"):
        write_report(folder_of_two_rounds, budget=Budget(100))

    page = write_report(folder_of_two_rounds, budget=Budget(100, by="value")).read_text()

    assert "Do not pay by these values" in page
    assert "These are values of single rounds that FedAvg ran" in page
    assert "<span>share" not in page


def test_flower_run_writes_event_files_of_the_run_and_of_each_client(folder_of_two_rounds):
    event_files = folder_of_two_rounds.rglob("events.out*")
    folder_names = {path.parent.name for path in event_files}
    assert folder_names == {folder_of_two_rounds.name, "Boston", "Lyon"}


# ---- flwr run


@pytest.fixture
def superlink(tmp_path):
    """Flower's simulation of three SuperNodes, with a SuperLink of its own; what `flwr` needs to find it."""
    pytest.importorskip("ray", reason="needs pip install 'flwr[simulation]'")
    home = tmp_path / "flwr"
    port, *_ = free_ports(2)
    home.mkdir()
    settings = (
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    (home / "config.toml").write_text(settings)
    env = {
        **os.environ,
        "FLWR_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    options = f"--insecure --simulation --host 127.0.0.1 --port {port} --disable-runtime-dependency-installation"
    log = (tmp_path / "link.log").open("w")
    link = subprocess.Popen(
        ["flower-superlink", *options.split()],
        cwd=tmp_path,
        env=env,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )

    try:
        deadline = time.monotonic() + 900
        while "Uvicorn running" not in (tmp_path / "link.log").read_text():
            assert time.monotonic() < deadline, (tmp_path / "link.log").read_text()
            time.sleep(0.2)
        run_flwr(env, "federation", "simulation-config", "--num-supernodes", "3")
        yield env
    finally:
        os.killpg(link.pid, signal.SIGTERM)
        link.wait(60)


def run_flwr(env: dict[str, str], *command: str) -> str:
    done = subprocess.run(["flwr", *command], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fedavg_by_hand(rounds: Any, task: Any) -> tuple[Tensor, Tensor]:
    metrics = {
        "value": CumulativeShapley(performance="negative_loss"),
        "cssv": ClassSpecificShapley(),
    }
    for initial, states, samples in rounds:
        values = flsv.value_round(
            task.Net(),
            initial,
            states,
            task.val_loader(),
            metrics=metrics,
            num_samples=samples,
        )

    return values["value"], values["cssv"]


def test_flwr_run_has_the_values_of_value_round_and_the_model_of_the_strategy(
    tmp_path, superlink, monkeypatch
):
    app = shutil.copytree(APP, tmp_path / "app")
    configuration = app / "pyproject.toml"
    settings = configuration.read_text()
    settings = settings.replace("fedapp.server_app:app", "fedapp.compared:app")
    configuration.write_text(settings.replace('folder = "runs"', f'folder = "{tmp_path}"'))

    printed = run_flwr(superlink, "run", str(app), "--stream")

    assert (tmp_path / "kept.pt").is_file(), printed

    strategies = torch.load(tmp_path / "kept.pt", weights_only=False)
    monkeypatch.syspath_prepend(app)
    earlier_imports = [module for module in sys.modules if module.startswith("fedapp")]

    for module in earlier_imports:
        monkeypatch.delitem(sys.modules, module)

    from fedapp import task  # type: ignore[import-not-found]

    for name in ("FedAvg", "FedAdam", "Halfway"):
        _, plain_model, plain_records, plain_rounds = strategies[name, False]
        rounds, model, records, num_rounds = strategies[name, True]

        for key, value in plain_model.items():
            assert torch.equal(value, model[key]), name
        assert plain_rounds == num_rounds == (12 if name == "Halfway" else 0)
        record = records[len(rounds)]
        plain_record = plain_records[len(rounds)]
        assert {key: record[key] for key in plain_record} == plain_record
        for metric, values in zip(("value", "cssv"), fedavg_by_hand(rounds, task)):
            assert [record[f"{metric}/{client}"] for client in range(3)] == values.tolist(), name
        page = write_report(tmp_path / name).read_text()
        assert f"values of single rounds that {name} ran" in page

    weight_of_fedavg = strategies["FedAvg", True][1]["layer.weight"]
    weight_of_fedadam = strategies["FedAdam", True][1]["layer.weight"]

    assert (weight_of_fedavg - weight_of_fedadam).abs().max() > 0.01
