"""The folder of a run: its path, and the names of its files."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from flsv.utilities.csv_files import read_rows
from flsv.utilities.display import display_path
from flsv.utilities.errors import ConfigurationError, listed, no_run_folder

CONTRIBUTIONS = "contributions.csv"
RECORD = "run.json"
#: The values of metrics on each validation sample.
CASE_VALUES = "case_values.pt"
#: The folder of the runs of ``flsv retrain``, in that of the run.
RETRAINED = "retrained"
#: The options of the ``flsv retrain`` that has written this folder, as they were typed.
OPTIONS = "options.txt"
CONFIG = "config.yaml"
#: The data dictionary by which tables were read.
DICTIONARY_FILE = "dictionary.yaml"
#: The list of the finished runs of ``flsv repeat`` or ``flsv retrain``, and the settings that they have in common.
RUNS = "runs.csv"
RUNS_SETTINGS = "settings.json"


def leaves_files(trainer: L.Trainer) -> bool:
    """Return whether a run may write files.

    It does not with ``fast_dev_run``, nor without a logger if no folder is set.

    Example:
        >>> quiet = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False}
        >>> leaves_files(L.Trainer(**quiet)), leaves_files(L.Trainer(default_root_dir="runs", **quiet))
        (False, True)
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning's connectors
        return False
    # A given folder may be ".", but Lightning's default is the working folder's absolute path.
    return bool(trainer.loggers) or trainer.default_root_dir != os.getcwd()


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder of this run's files, which also has the folder ``checkpoints``."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(logger.log_dir)
    version = logger.version
    if not isinstance(version, str):
        version = f"version_{version}"
    return runs_folder(trainer) / version


def runs_folder(trainer: L.Trainer) -> Path:
    """Return the folder of all runs of the first logger. Without a logger it is the trainer's root folder."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    folder = Path(logger.save_dir or trainer.default_root_dir)
    return folder / str(logger.name)


def find_contributions(run: Path) -> Path:
    """Return the path of ``contributions.csv``, given this file or its folder."""
    if run.name == CONTRIBUTIONS:
        folder = run.parent
    else:
        folder = run
    if (folder / CONTRIBUTIONS).is_file():
        return folder / CONTRIBUTIONS
    if not folder.is_dir():
        raise no_run_folder(folder)

    folders_below = [path.parent for path in folder.rglob(CONTRIBUTIONS)]
    if not folders_below:
        raise ConfigurationError(
            f"{folder} has no {CONTRIBUTIONS}, which every run of a federation writes: this is not the folder of a run."
        )
    newest_first = sorted(folders_below, key=_started, reverse=True)
    raise ConfigurationError(
        f"{folder} has no {CONTRIBUTIONS}, but runs below it do, the newest first: {listed(newest_first)}. Name one."
    )


def _started(run: Path) -> str:
    """Return when a run began, in ISO format, or "" without a record of it."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads((run / RECORD).read_bytes())["started"])
    return ""


def repeated_folders(repeat: Path) -> list[Path]:
    """Return the folders of the finished runs that the folder of a ``flsv repeat`` lists."""
    rows = read_rows(repeat / RUNS, {"folder": str})
    return [repeat / row["folder"] for row in rows]


def find_config_of(run: Path) -> Path:
    """Return the path of the configuration in the folder of a run of ``flsv fit``."""
    if (run / CONFIG).is_file():
        return run / CONFIG
    if (run / RECORD).is_file():
        raise ConfigurationError(
            f"{run} has no {CONFIG}, because the run was started from Python. Its module and its data cannot be made "
            "from its folder. In your script, add this line after trainer, module and data are made, in place of "
            "trainer.fit:\n  print(flsv.retrain(trainer, module, data))"
        )
    raise ConfigurationError(f"{run} has no {CONFIG}: name the folder of a run of flsv fit.")


def where_results_are(trainer: L.Trainer, has_ended: bool = True) -> list[str]:
    """Return lines with the folder of a fit's results, and commands for charts and report and, for a ``flsv fit`` that
    has ended, for repetition and retraining.
    """
    run = run_folder(trainer)
    folder = display_path(run)
    lines = [f"Results: {folder} (contributions.csv, checkpoints)"]
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            lines.append(f"Charts:  tensorboard --logdir {display_path(Path(logger.root_dir))}")
    lines.append(f"Report:  flsv report {folder}")

    config = run / CONFIG
    if has_ended and config.is_file():
        repeat = f"flsv repeat 5 --config {display_path(config)}"
        lines.append(f"Repeat:  {repeat}  # 5 seeds")
        lines.append(f"Retrain: flsv retrain {folder}  # more models and seeds: values to pay by")
    return lines
