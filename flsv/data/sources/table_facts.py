"""Facts about a table, which a package of its own reads: its data dictionary, its columns, data warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from flsv.utilities.errors import ConfigurationError


class DataDictionary(Protocol):
    """The meaning of the columns of tables, such as :class:`flsv.tables.Dictionary`."""

    @property
    def target(self) -> str:
        """The column to predict."""

    @property
    def classes(self) -> Sequence[str] | None:
        """The names of the target's classes."""

    @property
    def positive(self) -> str | None:
        """The positive one of two classes."""

    @property
    def hash(self) -> str:
        """Digest of all that it says."""

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain values."""

    def to_text(self) -> str:
        """Return the text of its file."""


if TYPE_CHECKING:
    DictionaryOptions: TypeAlias = DataDictionary | Mapping[str, Any] | str | Path | None
else:
    # The command line can give options, or the path of a file.
    DictionaryOptions = dict[str, Any] | str | None


def name_as_text(name: Any) -> Any:
    """Convert the name of a column, which may be a number, to text. Return any other argument unchanged."""
    if isinstance(name, Integral | str) and not isinstance(name, bool):
        return str(name).strip()
    return name


def target_of(labels: Any, dictionary: DataDictionary) -> str:
    """Return the column to predict, which the argument ``labels`` or the dictionary names."""
    target = dictionary.target or labels
    if labels is None and target:
        return dictionary.target
    if labels != target or not isinstance(labels, str):
        raise ConfigurationError(
            f"labels={labels!r}, but the data dictionary has target: {dictionary.target!r}. Name the column to predict "
            "in one of them only."
        )
    return labels


@dataclass(frozen=True)
class ColumnCard:
    """Description of a table's column: how it is read, and which training rows have no value, bool ``[N]``."""

    name: str
    read_as: str
    is_missing: np.ndarray


@dataclass(frozen=True)
class TableWarning:
    """Data warning about a column of a site."""

    site: str
    column: str
    text: str

    def __str__(self) -> str:
        return f"{self.column} of {self.site}: {self.text}"
