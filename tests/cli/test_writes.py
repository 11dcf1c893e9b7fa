"""What each command writes: into a run only what is the run's, and nothing over a file of the user."""

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.entry import FLSV_COMMANDS, LIGHTNING_COMMANDS
from helpers.runs import write_config

RUN_FOLDER = "out/hosp/a"
EVALUATE = "--config federation.yaml --config logger.yaml --data.batch_size 7 --ckpt_path last"
#: Arguments of the commands that write files, and a pattern of these files.
WRITING_COMMANDS = {
    "fit": ("--config federation.yaml", r"lightning_logs/.*"),
    "predict": (EVALUATE, f"{RUN_FOLDER}/predictions.csv"),
    "repeat": ("1 --config federation.yaml --out runs", r"runs/.*"),
    "value": ("--config federation.yaml --out values", r"values/.*"),
    "retrain": (
        f"{RUN_FOLDER} --seeds 1 --jobs 1 --trainings singles",
        rf"{RUN_FOLDER}/(retrained.*|\.lock)",
    ),
    "report": (RUN_FOLDER, f"{RUN_FOLDER}/report.html"),
    "init": ("project", r"project/.*"),
}
#: Arguments of the commands that write nothing.
READING_COMMANDS = {
    "validate": EVALUATE,
    "test": EVALUATE,
    "data": "--config federation.yaml",
}
NOTES = "# agreed with Lyon on 3 May\n"
LOGGER = """
trainer:
  logger:
    class_path: lightning.pytorch.loggers.%s
    init_args: {save_dir: out, name: hosp, version: a}
"""


def digests_of_files(folder):
    """Return a digest of each file below a folder."""
    digests = {}
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(folder).as_posix()
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


@pytest.fixture(scope="module", params=["CSVLogger", "TensorBoardLogger"])
def project_folder(request, tmp_path_factory):
    """A folder with a run and with files of the user."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_config(Path("federation.yaml"))
        Path("logger.yaml").write_text(LOGGER % request.param)
        # The user's, with names that flsv gives files in its own folders.
        Path("config.yaml").write_text(NOTES)
        Path("predictions.csv").write_text(NOTES)
        options = ["--config=federation.yaml", "--config=logger.yaml"]
        assert main(["fit", *options]) == 0

    return folder


@pytest.fixture
def project_copy(project_folder, tmp_path, monkeypatch):
    """A copy of the project, as the working folder."""
    folder = tmp_path / "copy"
    shutil.copytree(project_folder, folder)
    monkeypatch.chdir(folder)
    return folder


with_csv_logger = pytest.mark.parametrize("project_folder", ["CSVLogger"], indirect=True)


def test_commands_whose_writes_are_watched_are_all_commands():
    assert {*WRITING_COMMANDS, *READING_COMMANDS} == {*LIGHTNING_COMMANDS, *FLSV_COMMANDS}


@pytest.mark.by_turn
@pytest.mark.slow
@with_csv_logger
@pytest.mark.parametrize("command", WRITING_COMMANDS)
def test_command_changes_no_file_and_writes_only_what_it_says(command, project_copy):
    arguments, pattern = WRITING_COMMANDS[command]
    initial_files = digests_of_files(project_copy)

    assert main([command, *arguments.split()]) == 0

    files = digests_of_files(project_copy)
    assert initial_files.items() <= files.items()
    new_names = files.keys() - initial_files.keys()
    assert new_names
    assert [name for name in new_names if not re.fullmatch(pattern, name)] == []


@pytest.mark.by_turn
@pytest.mark.slow
@with_csv_logger
@pytest.mark.parametrize("command", READING_COMMANDS)
def test_command_that_shows_results_writes_nothing(command, project_copy):
    initial_files = digests_of_files(project_copy)
    assert main([command, *READING_COMMANDS[command].split()]) == 0
    assert digests_of_files(project_copy) == initial_files


@pytest.mark.fast_rows("TensorBoardLogger")
def test_fit_without_a_logger_leaves_the_users_configuration(project_copy):
    initial_files = digests_of_files(project_copy)
    assert main(["fit", "--config=federation.yaml", "--trainer.logger=false"]) == 0
    assert initial_files.items() <= digests_of_files(project_copy).items()


@with_csv_logger
@pytest.mark.fast_rows
@pytest.mark.parametrize("folder", [".", "notes"])
def test_fit_refuses_a_folder_with_a_configuration_that_no_run_wrote(folder, project_copy, capsys):
    Path("notes").mkdir()
    Path("notes/config.yaml").write_text(NOTES)
    initial_files = digests_of_files(project_copy)
    options = [f"--trainer.default_root_dir={folder}", "--trainer.logger=false"]

    assert main(["fit", "--config=federation.yaml", *options]) == 2

    assert "config.yaml was not written by a run" in capsys.readouterr().err
    assert digests_of_files(project_copy) == initial_files


FIT = ["fit", "--config=federation.yaml", "--config=logger.yaml"]


@pytest.mark.fast_rows
def test_fit_refuses_the_folder_of_another_run(project_copy, capsys):
    initial_files = digests_of_files(project_copy)

    assert main(FIT) == 2

    assert f"{RUN_FOLDER} holds a run already. Give this run a folder" in capsys.readouterr().err
    assert digests_of_files(project_copy) == initial_files


@pytest.mark.slow
@with_csv_logger
def test_resumed_fit_keeps_the_first_parts_metrics_csv_under_another_name(project_copy):
    run = project_copy / RUN_FOLDER
    metrics_of_first_part = (run / "metrics.csv").read_bytes()

    assert main([*FIT, "--trainer.max_epochs=2", "--ckpt_path=last"]) == 0

    assert (run / "metrics_1.csv").read_bytes() == metrics_of_first_part


@with_csv_logger
def test_predictions_outside_a_run_leave_the_users_file(project_copy):
    shutil.copy(f"{RUN_FOLDER}/checkpoints/last.ckpt", "model.ckpt")
    options = ["--config=federation.yaml", "--ckpt_path=model.ckpt"]
    assert main(["predict", *options]) == 0
    assert Path("predictions_1.csv").read_text() == NOTES
    assert Path("predictions.csv").read_text().startswith("index,")
