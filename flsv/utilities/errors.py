"""ConfigurationError, and functions that write its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class ConfigurationError(ValueError):
    """Error for invalid arguments, files or combinations of them, raised before training.

    The message says what was wrong, what was expected and what to do. The command line prints it without a traceback.

    Example:
        >>> raise ConfigurationError("num_clients=1: a federation needs at least 2 clients.")
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: num_clients=1: a federation needs at least 2 clients.

    Attributes:
        without_data: the part of the message that quotes no samples, which a site may send to the server, if any.
    """

    def __init__(self, *words: object, without_data: str | None = None) -> None:
        super().__init__(*words)
        self.without_data = without_data


class NotBatched(ConfigurationError):
    """Error: models cannot be trained at once, as rows of stacked tensors.

    Attributes:
        reason: why, without advice.
    """

    def __init__(self, words: str, reason: str | None = None) -> None:
        super().__init__(words)
        self.reason = reason or words


def reason_of(error: Exception) -> str:
    """Return in one line why models cannot be trained at once, after ``error`` was raised.

    Example:
        >>> reason_of(KeyError("rate"))
        "KeyError: 'rate'."
    """
    if isinstance(error, NotBatched):
        return error.reason
    first_line = next(iter(str(error).splitlines()), "").rstrip(".")
    if isinstance(error, ConfigurationError):
        return f"{first_line}."
    return f"{type(error).__name__}: {first_line}."


class Refused(ConfigurationError):
    """Error: a site refuses a message because of its policy, other settings or lateness. Its text quotes no samples."""

    def __init__(self, words: str) -> None:
        super().__init__(words, without_data=words)


class VersionWarning(UserWarning):
    """Warning that numbers may change, since a package has another version than before."""


def need_classes(requester: str, missing: str, instead: str) -> ConfigurationError:
    """Return an error that says what needs classes (``requester``), why they are ``missing``, and what else helps."""
    return ConfigurationError(
        f"{requester}, and the training samples have no classes: {missing}. Give them one whole number each, as an "
        f"attribute `targets` of the data set or as FederatedDataModule(labels=...); or {instead}."
    )


def check_lightning(*things: Any) -> None:
    """Raise ConfigurationError for an object of the package ``pytorch_lightning`` instead of ``lightning``."""
    for thing in things:
        cls = thing if isinstance(thing, type) else type(thing)
        for base in cls.__mro__:
            if base.__module__.startswith("pytorch_lightning."):
                raise ConfigurationError(
                    f"{cls.__name__} is a class of the package pytorch_lightning, not of lightning. Everywhere, write "
                    "`import lightning.pytorch as pl` instead of `import pytorch_lightning as pl`. For another's "
                    "package call flsv.import_as_lightning() before it is imported."
                )


def listed(
    values: Iterable[Any],
    limit: int = 5,
    show: Callable[[Any], str] = str,
) -> str:
    """Join the first ``limit`` values to a text, with "..." if there are more."""
    words = list(map(show, values))
    if len(words) > limit:
        words = [*words[:limit], "..."]
    return ", ".join(words)


def no_run_folder(folder: Path) -> ConfigurationError:
    """Return the error for the folder of a run that is not there, which names runs with similar names."""
    records_beside_it = folder.parent.glob("*/run.json")
    records_below_here = Path().glob("*/*/run.json")
    runs = sorted({str(record.parent) for record in (*records_beside_it, *records_below_here)})
    if not runs:
        hint = (
            "No run is in its place or in this folder. flsv fit makes one, and prints its folder."
        )
    elif similar_names(str(folder), runs):
        hint = nearest(str(folder), runs).strip()
    else:
        hint = f"Runs are in {listed(runs)}."
    return ConfigurationError(f"there is no folder {folder}. {hint}")


#: Similarity of two names, from 0 to 1, from which on one may be meant by the other.
MIN_SIMILARITY = 0.65


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a question for the one or two of some names that are nearest to a misspelt one, or "".

    Example:
        >>> nearest("val_los", ["train_acc", "val_loss", "lr"])
        ' Did you mean val_loss?'
    """
    similar = similar_names(name, names)
    if not similar:
        return ""
    alternatives = " or ".join(similar)
    return f" Did you mean {alternatives}?"


def similar_names(name: str, names: Iterable[str]) -> list[str]:
    """Return the one or two nearest names, in any case.

    Example:
        >>> similar_names("Sgd", ["SGD", "Adam"])
        ['SGD']
    """
    name_by_lower = {known_name.lower(): known_name for known_name in names}
    matches = get_close_matches(
        name.lower(),
        name_by_lower,
        n=2,
        cutoff=MIN_SIMILARITY,
    )
    return [name_by_lower[match] for match in matches]


def in_words(numbers: Sequence[int], limit: int = 6) -> str:
    """Join ascending numbers to a text, and shorten consecutive numbers to ``first .. last``."""
    runs: list[list[int]] = []  # of successive numbers
    for number in numbers:
        continues_run = bool(runs) and number == runs[-1][-1] + 1
        if continues_run:
            runs[-1].append(number)
        else:
            runs.append([number])

    words = []
    for run in runs:
        if len(run) > 2:
            words.append(f"{run[0]} .. {run[-1]}")
        else:
            words.append(", ".join(map(str, run)))
    return listed(words, limit)
