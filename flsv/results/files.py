"""The names of the files in a run's folder, and the search for them. The module imports little, so that a command says
at once that there is no run."""

from __future__ import annotations

from pathlib import Path

from flsv.utilities.errors import ConfigurationError, listed

CONTRIBUTIONS = "contributions.csv"
RECORD = "run.json"
RETRAINED = "retrained.csv"
CONFIG = "config.yaml"
#: The list of the finished runs of ``flsv repeat``, see :class:`flsv.utilities.result_file.ResultFile`.
RUNS = "runs.csv"


def find_contributions(run: Path) -> Path:
    """Return the path of a run's ``contributions.csv``, given its folder or this file itself. In the folder of
    ``flsv repeat`` it is the first run's.

    Raises:
        ConfigurationError: there is no such file; the message names runs below the folder, if there are any.
    """
    folder = run.parent if run.name == CONTRIBUTIONS else run
    if (folder / CONTRIBUTIONS).is_file():
        return folder / CONTRIBUTIONS
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}. Name a run's, such as lightning_logs/version_0.")
    below = sorted((p.parent for p in folder.rglob(CONTRIBUTIONS)), key=lambda p: p.stat().st_mtime, reverse=True)
    if not below:
        raise ConfigurationError(
            f"{folder} has no {CONTRIBUTIONS}, which every run of a federation writes: this is not the folder of a run."
        )
    if (folder / RUNS).is_file():
        return below[-1] / CONTRIBUTIONS
    raise ConfigurationError(
        f"{folder} has no {CONTRIBUTIONS}, but runs below it do, the newest first: {listed(below)}. Name one."
    )


def find_config_of(run: Path) -> Path:
    """Return the path of the configuration in the folder of a run of ``flsv fit``.

    Raises:
        ConfigurationError: there is no such file.
    """
    if (run / CONFIG).is_file():
        return run / CONFIG
    if (run / RECORD).is_file():
        raise ConfigurationError(
            f"{run} is of a run that was started from Python, and nothing tells how its module and its data are "
            f"made (there is no {CONFIG}). In Python, make them and the Trainer as for the fit: "
            "flsv.retrain(trainer, module, data) gives the values of flsv retrain."
        )
    raise ConfigurationError(f"{run} has no {CONFIG}: name the folder of a run of flsv fit.")
