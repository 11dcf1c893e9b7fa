"""The command line, as a user types it: what it prints, and how it ends."""

import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.configs import packaged_names
from flsv.cli.entry import FLSV_COMMANDS
from flsv.cli.options import SECTION_TITLES
from flsv.cli.parser import make_cli
from flsv.utilities.atomic_files import FolderLock
from helpers.forked import Forked
from helpers.runs import Tracker, write_config


def test_help_lists_every_subcommand(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main([])

    text = capsys.readouterr().out
    for subcommand in ("fit", "validate", "test", "predict", *FLSV_COMMANDS):
        assert f"\n    {subcommand} " in text, subcommand


@pytest.mark.parametrize("command", [["retrain", "run"], ["predict"]])
def test_commands_that_torchrun_would_run_twice_are_refused(command, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "id")
    assert main(command) == 2
    message = rf"flsv {command[0]} .*Start it without torchrun\."
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
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


CALLBACK_THAT_INTERRUPTS = """
import lightning as L


class Interrupts(L.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.current_epoch == {round_index}:
            raise KeyboardInterrupt
"""


@pytest.fixture
def fit_until(tmp_path, monkeypatch, capsys):
    """``fit_until(round_index)``: interrupt a fit in this round, and return what it prints."""

    def fit_and_interrupt(round_index):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        module = f"interrupts_{round_index}"
        Path(f"{module}.py").write_text(CALLBACK_THAT_INTERRUPTS.format(round_index=round_index))
        options = ["--config", str(write_config(Path("federation.yaml")))]
        options += ["--federation.reporting.table", "true", "--trainer.max_epochs", "2"]
        options += ["--trainer.callbacks", f"{module}.Interrupts"]

        assert main(["fit", *options]) == 128 + signal.SIGINT
        return capsys.readouterr().out

    handler = signal.getsignal(signal.SIGINT)
    yield fit_and_interrupt
    # Lightning ignores SIGINT from then on.
    signal.signal(signal.SIGINT, handler)


@pytest.mark.slow
def test_fit_interrupted_before_a_checkpoint_prints_no_results(fit_until):
    printed = fit_until(round_index=0)

    assert "Contributions" not in printed
    assert "Results:" not in printed
    assert "--ckpt_path last" not in printed


@pytest.mark.slow
def test_fit_interrupted_after_a_checkpoint_prints_results_and_how_to_resume(fit_until):
    printed = fit_until(round_index=1)

    assert "Contributions" in printed
    assert "Results: lightning_logs/version_0" in printed
    assert printed.endswith("Go on:   the same command with --ckpt_path last\n")


@pytest.mark.fast_rows("value*")
@pytest.mark.parametrize(
    "command",
    ["value --config digits --out {}", "fit --config digits --trainer.default_root_dir={}"],
)
def test_output_folder_below_a_file_is_refused(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"

    assert main(command.format(folder).split()) == 2

    message = rf"nothing can be written into {folder}.* Not a directory. Name another folder"
    error = capsys.readouterr().err
    assert re.search(rf"^flsv: error: .*{message}", error, flags=re.MULTILINE)


@pytest.mark.parametrize("command", ["repeat 2 --config digits --out {}", "retrain {}"])
def test_command_in_a_folder_that_another_run_has_locked_is_refused(command, tmp_path, capsys):
    config_of_run = tmp_path / "config.yaml"
    config_of_run.touch()

    with FolderLock(tmp_path):
        assert main(command.format(tmp_path).split()) == 2

    assert f"another run is writing into {tmp_path}: wait for its end" in capsys.readouterr().err


@pytest.mark.slow
def test_config_yaml_is_written_into_the_trackers_run_folder(tmp_path):
    config = write_config(tmp_path / "federation.yaml")
    options = [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=helpers.runs.Tracker"]

    assert main(["fit", "--config", str(config), *options]) == 0

    run_folder = tmp_path / Tracker.name / Tracker.version
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


@pytest.fixture(scope="module")
def help_of_fit():
    """The help in a terminal of 80 columns."""
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit):
            main(["fit", "--help"])
    return printed.getvalue()


def summary_of(help_text):
    summary, *_ = help_text.split("Configurations that come with flsv")
    return summary


def test_help_of_fit_has_a_summary_the_configurations_and_ordered_sections(help_of_fit):
    assert "One epoch is one\nround." in summary_of(help_of_fit)
    assert all(name in help_of_fit for name in packaged_names())
    positions = [help_of_fit.index(f"\n{title}") for title in SECTION_TITLES.values()]
    assert positions == sorted(positions)


PRIVATE = (
    "flsv.testing",
    "TinyClassifier",
    "PlainModule",
    "torchvision.datasets",
    "<class '",
    ".help [",
)


def test_help_of_fit_offers_public_classes_only(help_of_fit):
    assert [name for name in PRIVATE if name in help_of_fit] == []
    pattern = r"--federation.aggregator AGGREGATOR[^)]*classes: [^)]*\bFedAvg,"
    assert re.search(pattern, help_of_fit)


@pytest.mark.slow
def test_examples_in_the_help_of_fit_are_options_of_a_fit(help_of_fit):
    words = ["--config", "quickstart"]
    for line in summary_of(help_of_fit).splitlines():
        if line.startswith("  --"):
            option, value, *_explanation = line.split()
            words += [option, value]

    loop = make_cli(words, run=False).loop

    assert type(loop.aggregator).__name__ == "FedAdam"
    assert loop.local_epochs == 2


def main_with_a_closed_pipe(words):
    """Run a command whose output is a pipe that nobody reads."""
    standard_output = 1
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.dup2(write_end, standard_output)
    sys.stdout = open(standard_output, "w", closefd=False)  # noqa: SIM115
    sys.__stdout__ = sys.stdout
    status = main(words)
    sys.stdout.flush()
    return status


@pytest.mark.slow
def test_command_goes_on_when_its_output_is_no_longer_read(tmp_path):
    write_config(tmp_path / "federation.yaml")
    command = ["fit", "--config", "federation.yaml"]

    status, output = Forked(tmp_path, main_with_a_closed_pipe, command).wait()

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
#: Hints by commands with misspelt files.
HINTS = {
    "fit --config quickstrat": "Did you mean quickstart?",
    "fit --config quickstart --config=shapfd": "Did you mean shapfed",
    "fit -c zzz": "With flsv come afedsv, ",
    "data --config quickstrat": "Did you mean quickstart?",
}


def test_misspelt_file_is_told_before_torch_is_imported():
    process = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_TORCH, *HINTS],
        capture_output=True,
        text=True,
    )

    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [f"{words} 2" for words in HINTS]
    _, *errors = process.stderr.split("flsv: error: ")
    for error, hint in zip(errors, HINTS.values(), strict=True):
        assert hint in error
