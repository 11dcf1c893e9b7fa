"""SilentLogger: what a copy of a run, and a run of ``flsv retrain``, have in place of a logger."""

from __future__ import annotations

from functools import cache
from pathlib import PurePath
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment

#: Names of a logger's properties that are folders.
_FOLDERS_OF_LOGGERS = (
    "save_dir",
    "root_dir",
    "log_dir",
)
_NO_FOLDERS = dict.fromkeys(_FOLDERS_OF_LOGGERS)


def _setting(name: str) -> Any:
    return property(lambda self: self._settings[name])


class SilentLogger(Logger):
    """Logger that logs nothing, beside the class of a logger in whose place it is.

    Args:
        settings: what the logger says of itself, such as its name and its folder, by the names of its properties. None:
            its folders are those that :meth:`redirect` sets, without a folder of a name or a version in them.
    """

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self._settings = settings or {"name": "", "version": "", **_NO_FOLDERS}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing

    experiment = property(lambda self: _SilentExperiment(self.save_dir))
    name = _setting("name")
    version = _setting("version")
    save_dir = _setting("save_dir")
    root_dir = _setting("root_dir")
    log_dir = _setting("log_dir")
    group_separator = property(lambda self: "/")

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass

    log_hyperparams = log_graph = save = finalize = after_save_checkpoint = log_metrics

    def redirect(self, folder: str) -> None:
        """Have folders in ``folder`` only."""
        for name in _FOLDERS_OF_LOGGERS:
            logger_folder = str(self._settings[name])
            if not logger_folder.startswith(folder):
                self._settings[name] = folder


class _SilentExperiment(DummyExperiment):
    """Experiment that does nothing, and has a folder."""

    def __init__(self, folder: str | None) -> None:
        self.dir = folder
        self.log_dir = folder
        self.logdir = folder

    def get_logdir(self) -> str | None:
        return self.dir


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def silent_arguments(logger: Any) -> tuple[type, dict[str, Any]]:
    """Return the arguments of :func:`silent_logger` for a logger."""
    settings: dict[str, Any] = {}
    for name in ("name", "version", *_FOLDERS_OF_LOGGERS):
        settings[name] = None
        try:
            value = getattr(logger, name, None)
        except Exception:  # of a service that is not there
            continue
        if isinstance(value, str | int | PurePath):
            settings[name] = value
    return type(logger), settings


def silent_logger(kind: type, settings: dict[str, Any]) -> Any:
    """Return a logger of the class ``kind`` that logs nothing."""
    return _silent_class(kind)(settings)


@cache
def _silent_class(kind: type) -> Any:
    if issubclass(kind, SilentLogger):
        return kind
    # A name of its own: command lines find classes by their names.
    name = f"Silent{kind.__name__}"
    return type(name, (SilentLogger, kind), {"__module__": __name__})
