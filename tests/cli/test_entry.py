"""The command line, as a user types it: what it prints, and how it ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.configs import packaged_names
from flsv.cli.entry import FLSV_COMMANDS
from flsv.cli.options import SECTION_TITLES
from flsv.cli.parser import make_cli
from flsv.utilities.atomic_files import FolderLock
from helpers.forked import Forked
from helpers.runs import write_config


def test_help_lists_every_subcommand(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main([])

    text = capsys.readouterr().out
    for subcommand in ("fit", "validate", "test", "predict", *FLSV_COMMANDS):
        assert f"\n    {subcommand} " in text, subcommand


@pytest.mark.parametrize("command", [["retrain", "run"], ["predict"]])
def test_commands_that_torchrun_would_run_twice_are_refused(command, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    assert main(command) == 2
    message = rf"flsv {command[0]} .*Start it without torchrun\."
    assert re.search(message, capsys.readouterr().err)


def test_fit_and_report_print_folder_and_further_commands(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = str(write_config(tmp_path / "federation.yaml"))
    folder = "here there/lightning_logs/version_0"

    assert main(["fit", "--config", config, "--trainer.default_root_dir=here there"]) == 0

    out = capfd.readouterr().out
    assert f"Results: '{folder}'" in out
    assert "tensorboard --logdir 'here there/lightning_logs'" in out
    assert f"flsv report '{folder}'" in out

    assert main(["report", folder]) == 0
    assert "report.html'" in capfd.readouterr().out


@pytest.mark.slow
def test_quiet_fit_and_report_print_the_folder_and_the_page_only(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = str(write_config(tmp_path / "federation.yaml"))
    folder = "quiet/lightning_logs/version_0"

    assert main(["fit", "--config", config, "-q", "--trainer.default_root_dir=quiet"]) == 0

    printed = capfd.readouterr()
    assert re.fullmatch(rf"Results: {folder} .*\n", printed.out)
    assert "GPU available" not in printed.err
    assert "Epoch" not in printed.err

    page = f"{folder}/clients/1/report.html"

    assert main(["report", "-q", folder, "--client", "1"]) == 0
    assert capfd.readouterr().out == f"Report: {page}\n"
    assert Path(page).is_file()


@pytest.mark.fast_rows
@pytest.mark.parametrize("epoch", [0, 1])
def test_stopped_fit_prints_the_command_that_resumes_it(epoch, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(f"stops{epoch}.py").write_text(
        "import lightning as L\n\n\nclass Stops(L.Callback):\n"
        "    def on_train_batch_start(self, trainer, *_):\n"
        f"        if trainer.current_epoch == {epoch}:\n"
        "            raise KeyboardInterrupt\n"
    )
    options = ["--config", str(write_config(Path("federation.yaml")))]
    options += ["--federation.reporting.table", "true"]
    options += ["--trainer.max_epochs", "2"]
    options += ["--trainer.callbacks", f"stops{epoch}.Stops"]
    monkeypatch.setattr(sys, "argv", ["flsv", "fit", *options])

    handler = signal.getsignal(signal.SIGINT)
    try:
        assert main() == 130
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on

    printed = capsys.readouterr().out
    has_round = epoch > 0

    assert ("Contributions" in printed) is has_round
    assert ("Results: lightning_logs/version_0" in printed) is has_round

    # Before a checkpoint was saved, last would be another run's.
    resumes = printed.endswith("Go on:   the same command with --ckpt_path last\n")
    assert resumes is has_round


#: Commands that write, where.
WRITING = {
    "fit": "--config digits --trainer.default_root_dir={}",
    "repeat": "2 --config digits --out {}",
    "value": "--config digits --out {}",
    "retrain": "{}",
}


@pytest.mark.fast_rows("value")
@pytest.mark.parametrize("name", ["fit", "value"])
def test_output_folder_below_a_file_is_refused(name, tmp_path, capsys):
    (tmp_path / "file").touch()
    options = WRITING[name].format(tmp_path / "file" / "out")
    assert main([name, *options.split()]) == 2
    assert re.search(
        rf"^flsv: error: .*nothing can be written into {tmp_path}/file/out.* Not a directory. Name another folder",
        capsys.readouterr().err,
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize("name", ["repeat", "retrain"])
def test_command_in_a_folder_that_another_run_has_locked_is_refused(name, tmp_path, capsys):
    (tmp_path / "config.yaml").touch()  # of the run to retrain
    with FolderLock(tmp_path):
        assert main([name, *WRITING[name].format(tmp_path).split()]) == 2
    assert f"another run is writing into {tmp_path}: wait for its end" in capsys.readouterr().err


def test_config_yaml_is_written_into_the_trackers_run_folder(tmp_path):
    config = [
        "--config",
        str(write_config(tmp_path / "federation.yaml")),
        f"--trainer.default_root_dir={tmp_path}",
    ]

    assert main(["fit", *config, "--trainer.logger=helpers.runs.Tracker"]) == 0
    run_folder = tmp_path / "7" / "of_run"  # as Tracker names it
    names = {path.name for path in run_folder.iterdir()}
    assert {"config.yaml", "run.json", "contributions.csv"} <= names


@pytest.mark.parametrize("command", ["fit", "retrain", "value"])
def test_help_fits_a_terminal_of_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    with pytest.raises(SystemExit):
        main([command, "--help"])

    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 80, line
        assert "``" not in line


def test_help_of_fit_begins_with_what_users_change_and_offers_public_classes(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    text = capsys.readouterr().out

    summary, *_ = text.split("Configurations that come with flsv")
    assert "One epoch is one\nround." in summary
    assert all(name in text for name in packaged_names())
    titles = [text.index(f"\n{title}") for title in SECTION_TITLES.values()]
    assert titles == sorted(titles)
    for private in (
        "flsv.testing",
        "TinyClassifier",
        "PlainModule",
        "torchvision.datasets",
        "<class '",
        ".help [",
    ):
        assert private not in text
    assert re.search(r"--federation.aggregator AGGREGATOR[^)]*classes: [^)]*\bFedAvg,", text)

    # The examples are options that a fit takes.
    words = ["--config", "quickstart"]
    for line in summary.splitlines():
        if line.startswith("  --"):
            words += line.split()[:2]
    loop = make_cli(words, run=False).loop
    assert type(loop.aggregator).__name__ == "FedAdam"
    assert loop.local_epochs == 2


def main_without_a_reader(words):
    """The command at the beginning of a pipe whose other end is closed, in a process of its own, which ends so."""
    standard_output = 1
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.dup2(write_end, standard_output)
    sys.stdout = open(standard_output, "w", closefd=False)  # noqa: SIM115
    sys.__stdout__ = sys.stdout
    status = main(words)
    sys.stdout.flush()  # as Python does at its end
    return status


def test_command_goes_on_when_its_output_is_no_longer_read(tmp_path):
    write_config(tmp_path / "federation.yaml")
    command = ["fit", "--config", "federation.yaml"]

    status, output = Forked(tmp_path, main_without_a_reader, command).wait()

    assert status == 0, output
    assert "Traceback" not in output
    assert list(tmp_path.rglob("last.ckpt"))


RUN_WITHOUT_TORCH = """
import sys

from flsv.cli.entry import main

for words in sys.argv[1:]:
    print(words, main(words.split()))
assert "torch" not in sys.modules
"""
#: Commands with a misspelt file, and what is said.
MISSPELT = {
    "fit --config quickstrat": "Did you mean quickstart?",
    "fit --config quickstart --config=shapfd": "Did you mean shapfed",
    "fit -c zzz": "With flsv come afedsv, ",
    "data --config quickstrat": "Did you mean quickstart?",
}


def test_misspelt_file_is_told_before_torch_is_imported():
    finished = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_TORCH, *MISSPELT],
        capture_output=True,
        text=True,
    )

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [f"{words} 2" for words in MISSPELT]
    errors = finished.stderr.split("flsv: error: ")[1:]
    for error, hint in zip(errors, MISSPELT.values(), strict=True):
        assert hint in error
