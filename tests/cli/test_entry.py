"""The command line, as a user types it."""

from __future__ import annotations

import csv
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flsv.cli import main
from flsv.cli.entry import OWN
from flsv.data import FederatedDataModule, IIDPartitioner

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "digits.yaml")


def run(*arguments: str) -> int:
    return main([*arguments, "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"])


def fit(folder: Path, *arguments: str) -> int:
    return run("fit", "--config", QUICKSTART, "--trainer.default_root_dir", str(folder), *arguments)


def contributions(folder: Path) -> str:
    (file,) = folder.rglob("contributions.csv")
    return file.read_text()


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == text
    for name in ("fit", "validate", "test", "predict", "compare", "value", "report", "init"):
        assert f"\n    {name} " in text, name


@pytest.mark.parametrize("given", [["compare", "--config", "fedavg"], ["repeat", "2"], ["predict"], ["validate"]])
def test_what_torchrun_would_do_twice_is_refused(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    assert main(given) == 2
    assert f"flsv {given[0]}" in (said := capsys.readouterr().err)
    assert "Start it without torchrun." in said


def test_a_closing_line_and_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rounds = ("--trainer.max_epochs", "1")
    assert fit(Path("here there"), *rounds) == 0
    out = capfd.readouterr().out
    folder = "'here there/lightning_logs/version_0'"
    assert f"Results: {folder}" in out
    assert "tensorboard --logdir 'here there/lightning_logs'" in out
    assert f"flsv report {folder}" in out
    assert main(["report", "here there/lightning_logs/version_0"]) == 0
    assert "report.html'" in capfd.readouterr().out
    for quiet in ("--quiet", "-q"):
        command = ["fit", quiet, "--config", QUICKSTART, "--trainer.default_root_dir", "quiet", *rounds]
        assert main(command) == 0
        said = capfd.readouterr()
        assert re.fullmatch(r"Results: quiet/lightning_logs/version_\d .*\n", said.out)
        assert "GPU available" not in said.err
        assert "Epoch" not in said.err
    assert main(["report", "-q", "quiet/lightning_logs/version_0", "--client", "1"]) == 0
    assert capfd.readouterr().out == "Report: quiet/lightning_logs/version_0/clients/1/report.html\n"
    assert (tmp_path / "quiet/lightning_logs/version_0/clients/1/report.html").is_file()


def test_what_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stops.py").write_text(
        "import lightning as L\n\n\nclass Stops(L.Callback):\n"
        "    def on_train_batch_start(self, trainer, *_):\n"
        "        if trainer.current_epoch == 2:\n"
        "            raise KeyboardInterrupt\n"
    )
    options = ["--config", QUICKSTART, "--trainer.callbacks", "stops.Stops", "--trainer.max_epochs", "3"]
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stopped:
            main(["fit", *options])
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from then on
    assert stopped.value.code == 130
    said = capsys.readouterr().out
    assert "Contributions" in said
    assert "Results: lightning_logs/version_0" in said
    (line,) = (line for line in said.splitlines() if line.startswith("Go on:   flsv "))
    assert shlex.split(line.removeprefix("Go on:   flsv ")) == ["fit", *options, "--ckpt_path", "last"]


def test_something_is_on_the_screen_at_once_and_nothing_into_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, quiet, said in ((True, [], "flsv repeat: loading PyTorch\n"), (True, ["-q"], ""), (False, [], "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with pytest.raises(SystemExit):
            main(["repeat", "--help", *quiet])
        assert capsys.readouterr().err == said


def test_a_reader_who_has_had_enough_gets_no_traceback() -> None:
    code = (
        "import time; from flsv.cli import main; print(flush=True); time.sleep(1); raise SystemExit(main(['--help']))"
    )
    done = subprocess.run(f"{shlex.join([sys.executable, '-c', code])} | head -n 1", shell=True, capture_output=True)
    assert done.stderr == b""


def test_predict_writes_its_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(tmp_path, "--trainer.max_epochs", "1") == 0
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    options = ["--config", QUICKSTART, "--trainer.default_root_dir", str(tmp_path / "predicted")]
    assert run("predict", *options, "--ckpt_path", str(checkpoint)) == 0
    (file,) = tmp_path.rglob("predictions.csv")
    assert re.search(r"predictions\.csv'? \(360 samples\)", capsys.readouterr().out)  # quoted, if its path needs it
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["index"]) for row in rows] == list(range(360))
    chances = torch.tensor([[float(row[str(j)]) for j in range(10)] for row in rows])
    assert chances.sum(1).allclose(torch.ones(360), atol=1e-4)
    assert [int(row["prediction"]) for row in rows] == chances.argmax(1).tolist()
    # Against the test set itself: as good as Lightning says.
    data = FederatedDataModule("digits", IIDPartitioner(2))
    data.setup("test")
    y = torch.cat([labels for _, labels in data.test_dataloader()])
    right = sum(int(row["prediction"]) == label for row, label in zip(rows, y.tolist())) / 360
    assert run("test", *options, "--ckpt_path", str(checkpoint)) == 0
    assert f"{right:.4f}"[:5] in capsys.readouterr().out


def test_configs_compose_and_validate_test_predict_follow(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = tmp_path / "more.yaml"
    more.write_text(
        "trainer: {max_epochs: 1}\ndata: {partitioner: {class_path: IIDPartitioner, init_args: {num_clients: 3}}}\n"
    )
    assert fit(tmp_path, "--config", str(more)) == 0
    assert "2,,0." in contributions(tmp_path)
    assert "3,,0." not in contributions(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == ["best.ckpt", "last.ckpt"]
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    options = ["--config", QUICKSTART, "--ckpt_path", str(checkpoint), "--trainer.default_root_dir", str(tmp_path)]
    for command in ("validate", "test", "predict"):
        assert run(command, *options) == 0
        assert command != "test" or "test_accuracy" in capfd.readouterr().out
        capfd.readouterr()
        assert run(command, *options, "--quiet") == 0
        assert capfd.readouterr().out == ""


def test_a_configuration_that_cannot_work_is_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(tmp_path, "--config", "shapfed_wa", "--federation.aggregator.metric", "nope") == 2
    error = capsys.readouterr().err
    assert "flsv: error: aggregator ShapFedWA(metric='nope') reads the metric 'nope'" in error
    assert "Traceback" not in error
    assert fit(tmp_path, "--data.partitioner.num_clients", "1") == 2
    error = capsys.readouterr().err
    assert "flsv: error: DirichletPartitioner(num_clients=1): expected a whole number of at least 2" in error
    assert fit(tmp_path / "empty", "--ckpt_path", "last") == 2
    assert "no checkpoint below" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", *OWN])
def test_help_fits_a_terminal_of_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert f"flsv {command}" in " ".join(lines).replace("flsv [options]", "flsv")
    assert [line for line in lines if len(line) > 80 or "``" in line or ":func:" in line] == []


def test_a_file_that_is_no_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser would read a text file for the option's value, which here is a data set's name."""
    (tmp_path / "notes.txt").write_text("digits")
    assert fit(tmp_path, "--data.source", str(tmp_path / "notes.txt")) == 2
    assert main(["value", "--config", QUICKSTART, "--data.source", str(tmp_path / "notes.txt")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flsv: error: ")]
    assert len(lines) == 2
    assert all("notes.txt' was found" in line for line in lines)
