"""Where the samples come from: every kind of source says whether it is what was given, and opens it.

A package of somebody else's brings another kind by an entry point of the group ``flsv.sources``, which names a class
with the two methods of :class:`Source`; such kinds are asked first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import lightning as L
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flsv.data.labels import class_names_of
from flsv.data.sources.arrays import is_array, is_pair_of_arrays
from flsv.data.sources.base import Given, SourceData
from flsv.data.sources.given import find_place, own_source
from flsv.data.sources.images import folder_layout
from flsv.data.sources.module import module_source, stream
from flsv.data.sources.named import is_known, load_image_data
from flsv.data.tables.table import TABLES, is_columnar
from flsv.errors import ConfigurationError


class Source(Protocol):
    """A kind of source.

    Example:
        >>> class Numbers:
        ...     def match(self, given):
        ...         return isinstance(given.source, range)
        ...     def open(self, given):
        ...         x = torch.tensor(given.source).float()[:, None]
        ...         return SourceData(TensorDataset(x, torch.zeros(len(x), dtype=torch.long)))
        >>> import torch
        >>> given = Given(range(7))
        >>> Numbers().match(given), len(Numbers().open(given).train)
        (True, 7)
    """

    def match(self, given: Given) -> bool:
        """Whether this is its kind of source."""

    def open(self, given: Given) -> SourceData:
        """Its samples, and what else it has to offer.

        Raises:
            ConfigurationError: it cannot be read, with what can.
        """


class _Clients:
    """Everybody's data, given by name."""

    def match(self, given: Given) -> bool:
        return given.clients is not None

    def open(self, given: Given) -> SourceData:
        return own_source(given.clients or {}, given.held, given.reading, clients=True)


class _Module:
    """A LightningDataModule."""

    def match(self, given: Given) -> bool:
        return isinstance(given.source, L.LightningDataModule)

    def open(self, given: Given) -> SourceData:
        said = [name for name in ("val", "test", "columns") if getattr(given, name) is not None]
        if said:
            raise ConfigurationError(
                f"{said[0]} says how data are read, but a {type(given.source).__name__} reads its own. Say it there."
            )
        return module_source(given.source)


class _Path:
    """A table, or a folder with a folder or a table of each client."""

    def match(self, given: Given) -> bool:
        place = self._place(given)
        if place is None:
            return False
        return place.suffix.lower() in TABLES if place.is_file() else folder_layout(place).kind == "clients"

    def open(self, given: Given) -> SourceData:
        place = self._place(given)
        assert place is not None
        if place.is_file():
            return own_source({"source": given.source}, given.held, given.reading)
        if given.groups is not None:
            raise ConfigurationError(
                f"groups={given.groups!r}: {place} has a folder or a file per client, which says whose the samples "
                "are. Leave groups out."
            )
        layout = folder_layout(place)
        return own_source(layout.clients, _filled(given.held, layout.held_out), given.reading, clients=True)

    @staticmethod
    def _place(given: Given) -> Path | None:
        named = not isinstance(given.source, str) or is_known(given.source)
        return None if named else find_place(given.source, given.files.root)


class _Images:
    """Images by name, of an archive or of a folder."""

    def match(self, given: Given) -> bool:
        return isinstance(given.source, str)

    def open(self, given: Given) -> SourceData:
        files = given.files
        data = load_image_data(given.source, files.root, files.download, files.image_size)
        held = _filled(given.held, {"val": data.val, "test": data.test})
        if given.val is None and given.test is None:
            return SourceData(data.train, data.val, test=data.test, class_names=data.class_names)
        # What is given besides has to mean the same by its classes' numbers.
        if type(data.train) is TensorDataset:
            for part in (data.train, data.val, data.test):
                if part is not None:
                    part.classes = data.class_names  # type: ignore[attr-defined,union-attr]
        return own_source({"source": data.train}, held, given.reading)


class _ByName:
    """Splits by name, as Hugging Face's ``DatasetDict`` has them."""

    def match(self, given: Given) -> bool:
        return isinstance(given.source, Mapping)

    def open(self, given: Given) -> SourceData:
        source = given.source
        known = {"train": "train", "test": "test", "validation": "val", "valid": "val", "val": "val"}
        if "train" not in source or any(name not in known for name in source):
            raise ConfigurationError(
                f"source is a {type(source).__name__} of {', '.join(map(str, list(source)[:5])) or 'nothing'}: as a "
                "source it has train and perhaps validation and test. Data by client are given as clients={...}."
            )
        found = {known[str(name)]: part for name, part in source.items()}
        return own_source({"source": found.pop("train")}, _filled(given.held, found), given.reading)


class _Arrays:
    """``(X, y)``, an object with columns, or a pair of such for training and testing."""

    def match(self, given: Given) -> bool:
        whole = given.source
        single = is_pair_of_arrays(whole) or is_array(whole) or is_columnar(whole) or isinstance(whole, DataLoader)
        return single or self._is_pair(whole)

    def open(self, given: Given) -> SourceData:
        if not self._is_pair(given.source):
            return own_source({"source": given.source}, given.held, given.reading)  # which refuses a DataLoader
        train, test = given.source
        return own_source({"source": train}, _filled(given.held, {"test": test}), given.reading)

    @staticmethod
    def _is_pair(whole: Any) -> bool:
        pair = isinstance(whole, list | tuple) and len(whole) == 2 and not is_pair_of_arrays(whole)
        return pair and not all(isinstance(part, Dataset) for part in whole)


class _DataSets:
    """A map-style data set, or ``(train, test)``."""

    def match(self, given: Given) -> bool:
        return True

    def open(self, given: Given) -> SourceData:
        found = dataset_source(given.source)
        if given.val is None and given.test is None:
            return found
        return own_source({"source": found.train}, _filled(given.held, {"test": found.test}), given.reading)


SOURCES: tuple[Source, ...] = (_Clients(), _Module(), _Path(), _Images(), _ByName(), _Arrays(), _DataSets())


def open_source(given: Given) -> SourceData:
    """The data that were given, by the first kind of source that they are of.

    Raises:
        ConfigurationError: what cannot be read, with what can.

    Example:
        >>> len(open_source(Given("digits")).train)
        1437
    """
    others = [entry.load()() for entry in entry_points(group="flsv.sources")]
    return next(kind for kind in (*others, *SOURCES) if kind.match(given)).open(given)


def _filled(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What is held out, as given or else as found with the source."""
    twice = [name for name, each in found.items() if each is not None and given.get(name) is not None]
    if twice:
        raise ConfigurationError(f"{twice[0]}: the source has {twice[0]} data of its own. Leave it out.")
    return {name: found.get(name) if given.get(name) is None else given[name] for name in ("val", "test")}


def source_name(source: Any) -> str:
    """The name given, or the types of what was given."""
    if isinstance(source, str):
        return source
    return ", ".join(type(part).__name__ for part in (source if isinstance(source, list | tuple) else [source]))


def dataset_source(datasets: Dataset | Sequence[Dataset]) -> SourceData:
    """Training data, or training and test data.

    Raises:
        ConfigurationError: anything but one or two map-style data sets.
    """
    pair: list[Any] = list(datasets) if isinstance(datasets, list | tuple) else [datasets]
    for part in pair:
        if isinstance(part, IterableDataset):
            raise ConfigurationError(stream(type(part).__name__))
    if not 1 <= len(pair) <= 2 or not all(hasattr(part, "__getitem__") and hasattr(part, "__len__") for part in pair):
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise ConfigurationError(
            f"source=({kinds}): expected a training data set or (training, test), each with __len__ and __getitem__; "
            f"or a LightningDataModule, the name of a data set, the path of a file or a folder, arrays (X, y), a "
            f"DataFrame or a Hugging Face data set."
        )
    return SourceData(pair[0], test=pair[1] if len(pair) == 2 else None, class_names=class_names_of(pair[0]))
