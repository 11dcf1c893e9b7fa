"""What each command writes: into a run only what is the run's, and nothing over a file of the user."""

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.entry import FLSV_COMMANDS, LIGHTNING_COMMANDS
from helpers.runs import write_config

#: ``{command: (arguments, files that it may write)}``. ``RUN`` stands for the folder of a run.
NEW_RUN = r"lightning_logs/.*"
EVALUATE = "--config federation.yaml --config logger.yaml --data.batch_size 7 --ckpt_path last"
COMMANDS = {
    "fit": ("--config federation.yaml", NEW_RUN),
    "validate": (EVALUATE, "nothing"),
    "test": (EVALUATE, "nothing"),
    "predict": (EVALUATE, "RUN/predictions.csv"),
    "repeat": ("2 --config federation.yaml --out runs", r"runs/.*"),
    "data": ("--config federation.yaml", "nothing"),
    "value": ("--config federation.yaml --out values", r"values/.*"),
    "retrain": ("RUN --seeds 1 --jobs 1 --trainings singles", r"RUN/(retrained.*|\.lock)"),
    "report": ("RUN", "RUN/report.html"),
    "init": ("project", r"project/.*"),
}
RUN_FOLDER = "out/hosp/a"
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


def test_commands_whose_writes_are_watched_are_all_commands():
    assert set(COMMANDS) == {*LIGHTNING_COMMANDS, *FLSV_COMMANDS}


# Where a logger matters, the tests below have both.
@pytest.mark.slow
@pytest.mark.parametrize("project_folder", ["CSVLogger"], indirect=True)
@pytest.mark.parametrize("command", COMMANDS)
def test_command_writes_only_what_it_says(command, project_copy):
    arguments, permitted = COMMANDS[command]
    before_command = digests_of_files(project_copy)

    assert main([command, *arguments.replace("RUN", RUN_FOLDER).split()]) == 0

    after_command = digests_of_files(project_copy)
    changed = set(before_command.items()) - set(after_command.items())
    pattern = permitted.replace("RUN", RUN_FOLDER)
    new_files = after_command.keys() - before_command.keys()

    assert changed == set()
    assert [name for name in new_files if not re.fullmatch(pattern, name)] == []
    assert bool(new_files) == (permitted != "nothing")


@pytest.mark.fast_rows("TensorBoardLogger")
def test_fit_without_a_folder_leaves_the_users_configuration(project_copy, capsys):
    files = digests_of_files(project_copy)
    options = ["--config=federation.yaml", "--trainer.logger=false"]
    assert main(["fit", *options]) == 0
    assert files.items() <= digests_of_files(project_copy).items()


@pytest.mark.fast_rows
@pytest.mark.parametrize("folder", [".", "here"])
def test_fit_refuses_a_folder_with_a_configuration_that_is_not_a_runs(folder, project_copy, capsys):
    Path("here").mkdir()
    Path("here/config.yaml").write_text(NOTES)
    files = digests_of_files(project_copy)
    options = [f"--trainer.default_root_dir={folder}", "--trainer.logger=false"]

    assert main(["fit", "--config=federation.yaml", *options]) == 2
    assert "config.yaml was not written by a run" in capsys.readouterr().err
    assert digests_of_files(project_copy) == files


FIT = ["fit", "--config=federation.yaml", "--config=logger.yaml"]


@pytest.mark.fast_rows
def test_fit_refuses_the_folder_of_another_run(project_copy, capsys):
    files = digests_of_files(project_copy)

    assert main(FIT) == 2

    assert f"{RUN_FOLDER} holds a run already. Give this run a folder" in capsys.readouterr().err
    assert digests_of_files(project_copy) == files


@pytest.mark.fast_rows
def test_resumed_fit_keeps_the_metrics_of_the_runs_first_part(project_copy):
    """Under another name, where the logger writes them into a file."""
    metrics = project_copy / RUN_FOLDER / "metrics.csv"
    has_metrics = metrics.exists()
    former_metrics = metrics.read_bytes() if has_metrics else b""

    assert main([*FIT, "--trainer.max_epochs=2", "--ckpt_path=last"]) == 0

    renamed = project_copy / RUN_FOLDER / "metrics_1.csv"
    assert renamed.exists() == has_metrics
    if has_metrics:
        assert renamed.read_bytes() == former_metrics


@pytest.mark.fast_rows
def test_predictions_outside_a_run_leave_the_users_file(project_copy):
    shutil.copy(f"{RUN_FOLDER}/checkpoints/last.ckpt", "model.ckpt")
    options = ["--config=federation.yaml", "--ckpt_path=model.ckpt"]
    assert main(["predict", *options]) == 0
    assert Path("predictions_1.csv").read_text() == NOTES
    assert Path("predictions.csv").read_text().startswith("index,")
