"""The same federations on one, two and three ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rank_cases import CASES, run_and_die
from rank_processes import Ended, Group, run_ranks
from same_runs import differences
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flsv.cli import main

pytestmark = pytest.mark.slow

OPTIONS = (
    "--data.partitioner=DirichletPartitioner --data.partitioner.init_args.num_clients=4 "
    "--data.partitioner.init_args.alpha=0.5 --model.init_args.network=softmax --trainer.accelerator=cpu "
    "--trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per number of ranks with a folder per federation."""
    root = tmp_path_factory.mktemp("ranks")
    groups = {
        size: Group("run_all", [str(root / str(size)), list(CASES)], size, root / str(size)) for size in (1, 2, 3)
    }
    for size, group in groups.items():
        ended = group.wait()
        assert [rank.code for rank in ended] == [0] * size, "\n".join(rank.output[-3000:] for rank in ended)
    return root


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_to_the_bit(runs: Path, name: str, size: int) -> None:
    assert differences(runs / "1" / name, runs / str(size) / name) == []


def test_what_ranks_exchange(tmp_path: Path) -> None:
    run_ranks("exchanges", [str(tmp_path)], 3, tmp_path)


def test_only_rank_zero_writes(runs: Path) -> None:
    def written(size: int) -> list[str]:
        paths = [path.relative_to(runs / str(size)) for path in (runs / str(size)).rglob("*") if path.is_file()]
        # A file of events is named by its process.
        return sorted(str(path.parent if "events" in path.name else path) for path in paths if path.parent != Path("."))

    assert written(2) == written(3) == written(1)
    assert {"adam_with_steps/version_0", "pfedsv/contributions.csv", "scaffold/last.ckpt"} <= set(written(3))
    pictures = [name for name in written(3) if name.startswith("two_clients/clients/1/")]
    assert any(name.endswith(".png") for name in pictures)


def said(ended: list[Ended], *others: int) -> str:
    """What the ranks that are left said last, all of them with an error."""
    for rank in others:
        assert ended[rank].code == 1, ended[rank].output[-3000:]
    return "\n".join(ended[rank].output for rank in others)


@pytest.mark.parametrize(
    ("killed", "how", "message"),
    [
        (1, "first batch", "another rank is gone"),
        (0, "update", "another rank is gone"),
        (2, "raise", "another rank is gone"),
    ],
)
def test_all_end_with_one_and_the_run_goes_on_from_there(
    runs: Path, tmp_path: Path, killed: int, how: str, message: str
) -> None:
    name = "scaffold"
    ended = Group("run_and_die", [str(tmp_path / "run"), name, killed, how], 3, tmp_path / "first").wait()
    text = said(ended, *({0, 1, 2} - {killed}))
    assert text.count(message) >= 2
    assert ended[killed].code == (1 if how == "raise" else -9)
    again = []
    for size in (1, 2, 3):
        folder = tmp_path / str(size)
        shutil.copytree(tmp_path / "run", folder)
        again.append(Group("run_and_die", [str(folder), name, killed, how], size, tmp_path / f"output{size}"))
    for size, group in zip((1, 2, 3), again):
        assert [rank.code for rank in group.wait()] == [0] * size
        assert differences(runs / "1" / name, tmp_path / str(size)) == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("samples", "have dealt out other data: clients [0, 1, 2, 3, 4] and the server's validation set"),
        ("settings", "federation.aggregator is"),
        ("module", "the module's "),
        ("version", "version of flsv is "),
        ("clock", "max_time (a Timer) would stop one rank in the middle of a round"),
    ],
)
def test_other_ranks_are_refused(tmp_path: Path, how: str, message: str) -> None:
    ended = Group("other_data", [str(tmp_path / "run"), how], 2, tmp_path).wait()
    text = said(ended, 0, 1)
    assert "ConfigurationError" in text
    assert message in text
    assert not list(tmp_path.rglob("*.ckpt"))


def test_ranks_that_do_not_come_to_the_same_stop(tmp_path: Path) -> None:
    text = said(Group("disagree", [str(tmp_path / "run")], 2, tmp_path).wait(), 0, 1)
    assert "round 1: ranks 0 and 1 do not agree on the global model" in text


def test_without_a_seed_all_have_rank_zeros(tmp_path: Path) -> None:
    run_ranks("unseeded", [str(tmp_path / "run")], 2, tmp_path)
    assert (tmp_path / "run/last.ckpt").is_file()


def test_without_a_federation(tmp_path: Path) -> None:
    text = said(Group("no_federation", [str(tmp_path / "run")], 2, tmp_path).wait(), 0, 1)
    assert "has no FederatedLoop among its callbacks" in text


def test_a_rank_that_stops_in_a_round_ends_all(tmp_path: Path) -> None:
    ended = Group("idle_stops", [str(tmp_path / "run")], 2, tmp_path).wait()
    assert "rank 1 of 2 gives up: its round 2 ended before the last batch" in ended[1].output
    assert "another rank is gone" in said(ended, 0)


def test_a_checkpoint_within_a_round(runs: Path, tmp_path: Path) -> None:
    run_ranks("save_within", [str(tmp_path / "two"), "scaffold"], 2, tmp_path / "first")
    (tmp_path / "two/within.ckpt").rename(tmp_path / "two/last.ckpt")
    run_ranks("run_and_die", [str(tmp_path / "two"), "scaffold", -1, ""], 3, tmp_path / "second")
    assert [d for d in differences(runs / "1/scaffold", tmp_path / "two") if "ModelCheckpoint" not in d] == []


def test_a_checkpoint_on_an_exception_is_one_of_the_rounds_start(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = Group("save_on_exception", [str(folder), "kept_momentum"], 3, tmp_path / "first").wait()
    assert "bad sample at this site" in said(ended, 0, 1, 2)
    saved = next((folder / "failed").glob("*.ckpt"))
    saved.rename(folder / "last.ckpt")
    run_ranks("run_and_die", [str(folder), "kept_momentum", -1, ""], 2, tmp_path / "second")
    assert [d for d in differences(runs / "1/kept_momentum", folder) if "ModelCheckpoint" not in d] == []


def test_two_hosts(runs: Path, tmp_path: Path) -> None:
    run_ranks("run_all", [str(tmp_path / "run"), ["kept_momentum"]], 2, tmp_path, nodes=True)
    assert differences(runs / "1/kept_momentum", tmp_path / "run/kept_momentum") == []


def test_torchrun_restarts_by_itself(runs: Path, tmp_path: Path) -> None:
    # The agent of torchrun, on processes that need not import everything again.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
        monitor_interval=0.1,
    )
    elastic_launch(config, run_and_die)(str(tmp_path / "run"), "scaffold", 1, "first batch")
    assert (tmp_path / "run/died").exists()
    assert differences(runs / "1/scaffold", tmp_path / "run") == []


def test_retrained_coalitions_are_shared_out(tmp_path: Path) -> None:
    outputs = {}
    for size in (1, 3):
        ended = run_ranks("retrain", [str(tmp_path)], size, tmp_path / str(size))
        outputs[size] = [
            dict(line.split(" ", 1) for line in e.output.splitlines() if line[:4] in ("RESU", "TRAI", "SIDE"))
            for e in ended
        ]
    assert {told["RESULT"] for size in (1, 3) for told in outputs[size]} == {outputs[1][0]["RESULT"]}
    assert outputs[1][0]["TRAINED"] == "7"
    assert sorted(int(told["TRAINED"]) for told in outputs[3]) == [2, 2, 3]
    expected = json.loads(outputs[1][0]["RESULT"].rsplit(" ", 2)[0])
    for told in (*outputs[1], *outputs[3]):
        for together in (told["SIDE1"], told["SIDE0"]):
            assert json.loads(together) == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from a command line."""
    folder = tmp_path_factory.mktemp("one")
    assert main(command(folder)) == 0
    return run_below(folder)


def run_below(folder: Path) -> Path:
    (run,) = [path.parent for path in folder.rglob("run.json")]
    (run / "checkpoints/last.ckpt").rename(run / "last.ckpt")
    return run


def command(folder: Path) -> list[str]:
    given = "--trainer.max_epochs=2 --federation.reporting.table=false --data.source=digits"
    return ["fit", *given.split(), *OPTIONS.split(), f"--trainer.default_root_dir={folder}"]


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ([], ["--trainer.strategy=federated", "--trainer.devices=2"]),
        (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], []),
    ],
    ids=["strategy", "torchrun"],
)
def test_from_a_command_line(one_process: Path, tmp_path: Path, launcher: list[str], options: list[str]) -> None:
    """As it is typed: torchrun's processes are the ranks of one run, not a run each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ranks = [sys.executable, *launcher, "-m", "flsv", *command(tmp_path), *options]
    done = subprocess.run(ranks, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert differences(one_process, run_below(tmp_path)) == []


def test_a_rank_whose_script_ended_while_it_was_starting_ends_too() -> None:
    rank = os.environ | {"LOCAL_RANK": "1", "FLSV_RANKS_PARENT": str(2**22)}  # no process has a number that high
    make = "from flsv.engines.ranks import FederatedStrategy; FederatedStrategy()"
    ended = subprocess.run([sys.executable, "-c", make], env=rank, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "has ended already" in ended.stderr
