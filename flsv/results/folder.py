"""The folder of a run: where results are written, what files are called, and the lock that keeps it to one run."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import lightning as L
from annotated_types import Ge
from filelock import FileLock, Timeout
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from flsv.utilities.atomic_files import check_writable
from flsv.utilities.declared import checked
from flsv.utilities.display import shown
from flsv.utilities.errors import ConfigurationError

#: Pictures of a metric in a run, unless something else is asked for; TensorBoard keeps as many.
PICTURES = 10


@checked
@dataclass(frozen=True)
class Reporting:
    """The choice of what a run shows and writes; none of it changes a number.

    Args:
        per_class: log per-class contributions to the loggers too (the CSV always has them).
        figures: rounds between two figures of a metric in TensorBoard (and after the last round); 0: none; None: ten in
            the run.
        table: print a table of the clients at the end.
        files: write ``contributions.csv``, ``run.json`` and the clients' pictures, and keep the run's folder to this
            run. A trainer with neither a logger nor a ``default_root_dir`` has no folder for them.

    Raises:
        ConfigurationError: a number out of range, an unknown word.

    Example:
        >>> Reporting(figures=0).table
        True
    """

    per_class: bool = True
    figures: Annotated[int, Ge(0)] | None = None
    table: bool = True
    files: bool = True

    def draws(self, round_index: int, rounds: int | None) -> bool:
        """Return whether figures are drawn after a round.

        Args:
            round_index: from 0.
            rounds: number of rounds of the run; None or -1 where that is open.

        Example:
            >>> [index for index in range(25) if Reporting().draws(index, 25)]
            [2, 5, 8, 11, 14, 17, 20, 23, 24]
        """
        known = rounds if rounds is not None and rounds > 0 else None
        every = (-(-known // PICTURES) if known else PICTURES) if self.figures is None else self.figures
        return bool(every) and (round_index + 1 == known or (round_index + 1) % every == 0)


CONTRIBUTIONS = "contributions.csv"
RECORD = "run.json"
RETRAINED = "retrained.csv"


def leaves_files(trainer: L.Trainer) -> bool:
    """Return whether a run may write into :func:`run_folder`: not in a ``fast_dev_run``, which leaves no
    trace; nor where that is the working folder because neither a logger nor a ``default_root_dir`` is given.

    Example:
        >>> quiet = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False}
        >>> leaves_files(L.Trainer(**quiet)), leaves_files(L.Trainer(default_root_dir="runs", **quiet))
        (False, True)
    """
    # What is given may be ".", but what Lightning takes in its place is a whole path.
    somewhere = bool(trainer.loggers) or trainer.default_root_dir != os.getcwd()
    return somewhere and not trainer.fast_dev_run  # type: ignore[attr-defined]  # set by Lightning's connectors


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder of this run's files: that into which Lightning's ``ModelCheckpoint`` puts ``checkpoints``.

    ``trainer.log_dir`` is that too for TensorBoard and CSV loggers; of other loggers (MLflow, Weights & Biases) it is
    the folder of all their runs.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(logger.log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return runs_folder(trainer) / version


def runs_folder(trainer: L.Trainer) -> Path:
    """Return the folder of the first logger's runs; without a logger, the root folder."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)


def where_results_are(trainer: L.Trainer) -> list[str]:
    """Say where a fit's results are and what can be done with them, in lines with commands to paste."""
    folder = shown(run_folder(trainer))
    lines = [f"Results: {folder} (contributions.csv, checkpoints)"]
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        lines.append(f"Charts:  tensorboard --logdir {shown(runs_folder(trainer))}")
    lines.append(f"Report:  flsv report {folder}")
    if (arguments := arguments_of_fit()) is None:
        return lines
    return [
        *lines,
        f"Repeat:  flsv repeat 5 {arguments}  # this was one seed: other seeds may differ more",
        f"Retrain: flsv retrain {folder}  # what each client is worth by training without it",
    ]


def arguments_of_fit() -> str | None:
    """Return the arguments of ``flsv fit`` in this process, for another command; None in another program."""
    if Path(sys.argv[0]).parts[-1:] != ("flsv",) and Path(sys.argv[0]).parts[-2:] != ("flsv", "__main__.py"):
        return None
    if sys.argv[1:2] != ["fit"]:
        return None
    return re.sub(r" (--ckpt_path[ =]\S+|-q|--quiet)(?= |$)", "", " " + shlex.join(sys.argv[2:])).strip()


#: Seconds that who is about to let go of a folder is waited for.
PATIENCE = 1.0


class FolderLock:
    """Keeps a folder to this run until :meth:`release`, or until the process is gone, however it went.

    The lock is the system's, on the file ``.lock`` in the folder, which stays.

    Args:
        folder: made if it is not there.

    Raises:
        ConfigurationError: another run holds the folder, or it cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> lock = FolderLock(folder)
        >>> FolderLock(folder)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        flsv.utilities.errors.ConfigurationError: another run is writing into ...
        >>> lock.release()
        >>> FolderLock(folder).release()
    """

    def __init__(self, folder: Path) -> None:
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / ".lock", timeout=PATIENCE, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigurationError(
                f"another run is writing into {folder}: wait for its end, or give this one a folder of its own "
                "(--out, --trainer.default_root_dir, or the logger's name)."
            ) from None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        self._lock.release()
