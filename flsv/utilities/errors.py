"""ConfigurationError, and functions that write its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


class ConfigurationError(ValueError):
    """Error for invalid arguments, files or combinations of them, raised before training.

    The message says what was wrong, what was expected and what to do. The command line prints it without a traceback.

    Example:
        >>> raise ConfigurationError("num_clients=1: a federation needs at least 2 clients.")
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: num_clients=1: a federation needs at least 2 clients.
    """


class VersionWarning(UserWarning):
    """Warning that numbers may change, since a package has another version than before."""


class ColumnError(ConfigurationError):
    """Error for a table's column that cannot be used as it is."""

    # `remedy`: options of flsv.data.Columns with which the column can be used. Lists and mappings are added to those
    # that are set already.

    def __init__(self, message: str, remedy: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.remedy = dict(remedy)


def need_classes(asking: str, missing: str, instead: str) -> ConfigurationError:
    """Return an error that says what needs classes (``asking``), why they are ``missing``, and what else helps."""
    return ConfigurationError(
        f"{asking}, and the training samples have no classes: {missing}. Give them one whole number each, as an "
        f"attribute `targets` of the data set or as FederatedDataModule(labels=...); or {instead}."
    )


def check_lightning(*things: Any) -> None:
    """Raise ConfigurationError for an object of the package ``pytorch_lightning`` instead of ``lightning``."""
    for thing in things:
        kinds = (thing if isinstance(thing, type) else type(thing)).__mro__
        if any(kind.__module__.startswith("pytorch_lightning.") for kind in kinds):
            raise ConfigurationError(
                f"{kinds[0].__name__} is a class of the package pytorch_lightning, not of lightning. Everywhere, write "
                "`import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`."
            )


def listed(values: Iterable[Any], most: int = 5, show: Callable[[Any], str] = str) -> str:
    """Join the first ``most`` values to a text, with "..." if there are more."""
    words = list(map(show, values))
    return ", ".join(words[:most] + ["..."] * (len(words) > most))


def in_words(numbers: Sequence[int], most: int = 6) -> str:
    """Join ascending numbers to a text, and shorten consecutive numbers to ``first .. last``."""
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    runs = [numbers[a:b] for a, b in zip(starts, [*starts[1:], len(numbers)])]
    words = [f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return listed(words, most)
