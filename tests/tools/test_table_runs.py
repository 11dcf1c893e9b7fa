"""Cells: what is built from files, overrides and a seed, and what a short run counts."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import table_presets
import table_runs
import torch
from table_presets import Operators, Preset, Work, counted, gpu_seconds, main, work_of
from table_runs import Cell, built, federated_loop, global_accuracy, seeded
from table_statistics import gather, means

from flsv.cli.parser import make_cli

pytestmark = pytest.mark.slow

ATTACKS = [{"class_path": "flsv.attacks.SignFlip", "init_args": {"fraction": 0.2, "seed": 0}}]
CELL = Cell(
    "FedProx",
    "digits",
    3,
    ("digits.yaml", "scenarios/shapleyfl_closed_set.yaml", "fedprox.yaml"),
    {"data.splits.max_samples": 400, "federation.uploads": ATTACKS},
)


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


def test_every_seed_is_the_cells() -> None:
    with built(CELL, "data") as cli:
        data, loop = cli.datamodule, federated_loop(cli.trainer)
        random = (data.splits, data.partitioner, data.corruptions[0], loop.uploads[0])
        assert [each.seed for each in random] == [3, 3, 3, 3]
        assert cli.config.seed_everything == cli.config.federation.seed == 3
        assert loop.client_algorithm.mu == 0.01
        assert data.partitioner.num_clients == 5
        assert data.splits.max_samples == 400


def test_a_seed_that_no_file_says_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all seeds of a table would have one partition."""
    monkeypatch.setattr(table_runs, "CONFIGS", tmp_path)
    text = "data: {partitioner: {class_path: flsv.data.IIDPartitioner, init_args: {num_clients: 2}}}"
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match="another seed than the cell's, 3"), built(Cell("r", "c", 3, ("a.yaml",)), "."):
        pass


def test_seeded() -> None:
    assert seeded({"seed": 0, "a": [{"seed": 1, "b": "seed"}], "c": 2}, 7) == {
        "seed": 7,
        "a": [{"seed": 7, "b": "seed"}],
        "c": 2,
    }


def test_the_command_is_the_same_run(tmp_path: Path) -> None:
    """With the seed that the files have; typed by hand, but for what keeps it quiet."""
    cell = replace(CELL, files=("digits.yaml", "fedprox.yaml"), seed=1, overrides={"trainer.max_epochs": 1})
    found = global_accuracy(cell, "data")
    files = [p.replace("configs/", f"{table_runs.CONFIGS}/") for p in shlex.split(cell.command)[2:]]
    quiet = [f"--{name}={table_runs._written(value)}" for name, value in table_runs.QUIET.items()]
    cli = make_cli([*files, *quiet, "--trainer.default_root_dir", str(tmp_path)], run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    scores = cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]
    assert 100 * scores["test_accuracy"] == found["accuracy"]
    assert global_accuracy(replace(cell, seed=2), "data")["accuracy"] != found["accuracy"]


def test_columns_by_name_or_by_its_beginning() -> None:
    cells = [replace(CELL, column=column) for column in ("a, MNIST", "a, MNIST, 100 clients", "b")]
    assert table_presets._columns(cells, ["a, MNIST"]) == {"a, MNIST"}
    assert table_presets._columns(cells, ["a"]) == {"a, MNIST", "a, MNIST, 100 clients"}
    assert table_presets._columns(cells, ["b", "c"]) == {"b"}


def test_operators_are_counted() -> None:
    with Operators() as count:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert count.flops == 2 * 2 * 3 * 4
    assert count.operators == 3


def test_the_estimate_follows_rounds_batches_and_samples() -> None:
    cell = replace(CELL, overrides={"data.splits.max_samples": 600, "trainer.max_epochs": 2})
    short = {"data.splits.max_samples": 300}
    whole, few = work_of(cell, "data"), work_of(replace(cell, overrides=short), "data")
    assert whole.rounds == 2
    assert few.batches < whole.batches < 2.5 * few.batches
    assert whole.samples == pytest.approx(2 * few.samples, rel=0.02)
    found = counted(cell, short, "data")
    assert found["operators"] > 100
    launching = found["operators"] * table_presets.SECONDS_PER_OPERATOR * whole.batches / few.batches
    assert found["gpu_seconds"] == pytest.approx(2 * launching)
    assert not table_runs.WATCHING
    twice = replace(cell, overrides={**cell.overrides, "federation.local_epochs": 2})
    assert work_of(twice, "data") == Work(2, 2 * whole.batches, 2 * whole.samples)
    longer = counted(replace(cell, overrides={**cell.overrides, "trainer.max_epochs": 20}), short, "data")
    assert longer["gpu_seconds"] == pytest.approx(10 * found["gpu_seconds"])


def test_large_networks_are_estimated_by_samples() -> None:
    """A short run's batches are not full: by batches, its floating-point operations would be too few."""
    count = Operators()
    count.operators, count.flops = 10, int(2e13)
    assert gpu_seconds(count, Work(1, 2, 20), Work(5, 4, 80)) == pytest.approx(5 * 4)
    count.flops = 0
    assert gpu_seconds(count, Work(1, 2, 20), Work(5, 4, 80)) == pytest.approx(5 * 2 * 1e-4)
    count.in_games = 6  # once a round
    assert gpu_seconds(count, Work(1, 2, 20), Work(5, 4, 80)) == pytest.approx(5 * (2 * 4e-5 + 6e-5))


def test_games_are_counted() -> None:
    """They are played on other threads, where torch's modes count nothing."""
    files = ("digits.yaml", "s_fedavg.yaml")
    found = counted(replace(CELL, files=files, overrides={}), {"data.splits.max_samples": 300}, "data")
    assert found["in_games"] > 100
    assert counted(replace(CELL, overrides={}), {"data.splits.max_samples": 300}, "data")["in_games"] == 0


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Preset(
        "made_up",
        lambda full, seeds: [replace(CELL, seed=s, overrides={"trainer.max_epochs": 50 if full else 1}) for s in seeds],
        lambda results, cells: means(gather(results, lambda r: r["accuracy"]), ["FedProx"]),
        {"data.splits.max_samples": 300},
    )
    arguments = ["--kept", str(tmp_path / "kept.jsonl"), "--out", str(tmp_path / "out.md")]
    main(preset, None, [*arguments, "--full", "--short"])
    assert "hours on one GPU" in (tmp_path / "out.md").read_text()
    assert "GiB of memory" in (tmp_path / "out.md").read_text()
    assert not (tmp_path / "kept.jsonl").exists()
    monkeypatch.setattr(table_presets, "counted", None)  # what is kept is not counted again
    main(preset, None, [*arguments, "--full", "--short"])
    monkeypatch.undo()
    main(preset, None, [*arguments, "--finished"])
    assert "0 of 5 cells are finished." in (tmp_path / "out.md").read_text()
    main(preset, None, [*arguments, "--list", "--seeds", "2"])
    assert capsys.readouterr().out.count("--config configs/fedprox.yaml --seed_everything=1") == 1
    with pytest.raises(SystemExit):
        main(preset, None, [*arguments, "--rows", "nobody"])


def test_what_takes_long_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    columns = ("small", "large, MNIST", "large, CIFAR-10")
    preset = Preset(
        "made_up",
        lambda full, seeds: [
            Cell("row", column, 0, ("fedavg.yaml",), {"n": n}, "made_up_cells:marked")
            for n, column in enumerate(columns)
        ],
        lambda results, cells: " and ".join(cell.column for cell in cells if cell.key in results),
        {},
        asked=("large",),
    )

    def told(*more: str) -> str:
        main(preset, None, ["--kept", str(tmp_path / "kept.jsonl"), "--root", str(tmp_path), "--workers", "1", *more])
        return capsys.readouterr().out

    alone = told()
    assert "\nsmall\n" in alone
    assert "Left out, until --columns names them or --all is said: large, MNIST; large, CIFAR-10." in alone
    assert told("--finished") == "small\n\n1 of 3 cells are finished.\n"  # what there is, of all columns
    named = told("--columns", "large, MNIST")
    assert "\nlarge, MNIST\n" in named
    assert "Left out" not in named
    assert "\nsmall and large, MNIST and large, CIFAR-10\n" in told("--all")
    assert told("--list").count("# large") == told("--list", "--full").count("# large") == 2  # every cell's command
    columns = columns[1:]
    with pytest.raises(SystemExit):
        told()
    assert "no cell has these rows and columns. Left out, until --columns names them" in capsys.readouterr().err
