"""What is wrong with arguments is said, by plain parsers before anything is imported that takes seconds."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flsv.cli import main

#: What plain parsers say.
AT_ONCE = [
    ("report . --clinet 3", 2, "unrecognized arguments: --clinet"),
    ("new metrics X", 2, "invalid choice: 'metrics'"),
    ("new metric 3", 2, "'3' is no name of a class"),
    ("init --confg quickstart", 2, "unrecognized arguments: --confg"),
    ("fitt", 2, "Did you mean fit?"),
    *((f"{command} --help", 0, "") for command in ("report", "new", "init")),
    ("--help", 0, ""),
    ("--version", 0, ""),
]


def test_what_plain_parsers_say_waits_for_nothing() -> None:
    code = """if True:
        import sys
        from flsv.cli import main
        for line in sys.argv[1:]:
            *words, expected = line.split()
            try:
                status = main(words)
            except SystemExit as exit:
                status = exit.code
            assert status == int(expected), line
        slow = {"torch", "lightning", "matplotlib", "pandas", "jsonargparse"} & sys.modules.keys()
        assert not slow, slow
    """
    command = [sys.executable, "-c", code, *(f"{line} {status}" for line, status, _ in AT_ONCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for _, _, said in AT_ONCE:
        assert said in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fit --trainer.max_epoch 3", "Did you mean --trainer.max_epochs?"),
        ("fit --config digits --alpha 3", "Did you mean --data.partitioner.alpha or"),
        ("fit --config digits --data.partitioner.alfa 3", "Did you mean --data.partitioner.alpha"),
        ("fit --federation.local_epochs abc", "federation.local_epochs"),
        ("fit --federation.aggregator FedAvgg", "FedAvgg"),
        ("fit --config quickstart --federation.aggregator.server_lrr 1", "server_lrr"),
        ("fit --config quickstrat", "Did you mean --config quickstart"),
        ("compare --config fedavg --data.sauce 1", "--data.sauce"),
        ("test --ckpt_path nope.ckpt", "there is no checkpoint nope.ckpt."),
        ("value --data.sauce digits", "--data.sauce"),
        ("data --ot 3", "--ot"),
        ("retrain . --trainings som", "invalid choice: 'som'"),
        ("retrain nowhere", "there is no folder nowhere"),
        ("repeat many --config a", "invalid int value: 'many'"),
        ("bench --metric cgvs", "there is no metric 'cgvs'"),
        ("bench --federations clinic", "there is no federation 'clinic'"),
        ("report . --client Oslo", "holds no contributions.csv"),
    ],
)
def test_an_error_names_the_option_or_the_value(
    line: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(line.split())
    except SystemExit as stopped:
        status = stopped.code  # type: ignore[assignment]
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_an_evaluation_makes_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--config", "quickstart", "--trainer.default_root_dir", str(tmp_path)]
    assert main(["fit", *options, "--trainer.max_epochs", "1", "-q"]) == 0
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    for command in ("test", "validate", "predict"):
        for checkpoint in ("last", "best"):
            assert main([command, *options, "--ckpt_path", checkpoint]) == 0
    said = capfd.readouterr()
    assert "dirpath has changed" not in said.err + said.out
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == before
    assert (tmp_path / "lightning_logs/version_0/predictions.csv").is_file()


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_predictions_have_the_rows_own_ids(wrapped: bool, preload: bool, tmp_path: Path) -> None:
    draws = random.Random(0)

    def rows(first: int, count: int) -> list[str]:
        made = [(draws.gauss(0, 1), draws.choice("AB")) for _ in range(count)]
        return ["patient,age,ill,ward", *(f"P{first + i},{x:.2f},{int(x > 0)},{w}" for i, (x, w) in enumerate(made))]

    (tmp_path / "train.csv").write_text("\n".join(rows(0, 60)))
    held = rows(100, 12)
    held[3] = "P102,0.5,,A"  # nothing to predict: the row is left out
    (tmp_path / "test.csv").write_text("\n".join(held))
    config: dict[str, object] = {"labels": "ill", "groups": "ward", "columns": {"exclude": ["patient"]}}
    config |= {"source": str(tmp_path / "train.csv"), "test": str(tmp_path / "test.csv")}
    if wrapped:
        given = {"path": "train.csv", "test_path": "test.csv", "target": "ill", "group": "ward", "root": str(tmp_path)}
        source = {"class_path": "flsv.data.TableData", "init_args": {**given, "columns": {"exclude": ["patient"]}}}
        config = {"source": source, "partitioner": "flsv.data.GroupPartitioner"}
    config["loader"] = {"preload": preload}
    file = tmp_path / "run.yaml"
    trainer = {"accelerator": "cpu", "default_root_dir": str(tmp_path / "runs"), "logger": False}
    file.write_text(yaml.safe_dump({"data": config, "trainer": trainer}))
    assert main(["predict", "--config", str(file), "-q"]) == 0
    with next(tmp_path.rglob("predictions.csv")).open() as opened:
        found = list(csv.DictReader(opened))
    kept = [(place, line.split(",")) for place, line in enumerate(held[1:], 2) if line.split(",")[2]]
    assert [row["patient"] for row in found] == [cells[0] for _, cells in kept]
    assert [row["client"] for row in found] == [cells[3] for _, cells in kept]
    assert [row["line"] for row in found] == [str(place) for place, _ in kept]
    assert list(found[0])[:5] == ["index", "line", "client", "patient", "prediction"]
