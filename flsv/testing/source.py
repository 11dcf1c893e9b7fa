"""Checks of sources of data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import Dataset, default_collate

from flsv.data import FederatedDataModule, GroupPartitioner, IIDPartitioner, Splits
from flsv.data.contents import content_hashes
from flsv.data.sources.base import Reading, SourceData
from flsv.data.sources.source import Source, open_source, read_part
from flsv.data.sources.table import Table
from flsv.testing.checks import Case, ensure, equal, refused, untouched_rngs
from flsv.testing.fits import samples_of
from flsv.utilities.errors import ConfigurationError


class SourceCase(Case):
    """Source of data under test."""

    def __init__(
        self, part: Source, given: Any, *, broken: Sequence[Any] = (), expected_failures: Any = None, **options: Any
    ) -> None:
        self.given, self.broken, self.options = given, broken, options
        super().__init__(part, expected_failures)

    @property
    def reading(self) -> Reading:
        """Options of reading (label, group, columns, files), from the data module's arguments ``options``."""
        names = {"label": "labels", "group": "groups", "columns": "columns", "files": "files"}
        return Reading(**{mine: self.options[theirs] for mine, theirs in names.items() if theirs in self.options})

    def open(self) -> Any:
        """Let the source open ``given``, and return its training samples."""
        data: Any = self.part.open(self.given, self.reading)
        if not isinstance(data, Dataset | Table | SourceData) and data is not self.given:  # a DataFrame, arrays
            data = read_part(data, self.reading, "what open gives")
        return data.train if isinstance(data, SourceData) else data

    @cached_property
    def opened(self) -> Any:
        """Result of :meth:`open`, which is called once."""
        return self.open()


def matches_its_kind(case: SourceCase) -> None:
    """Check that match returns True for the data that the source opens, and False for all other data. Decide by the
    type, or by the ending of a path. An installed source is asked before flsv's own sources, so it must not take their
    data."""
    x, y = samples_of(0)
    others: list[Any] = [Path("there/is/no.such_kind"), "no_such_name", (x, y), x, [(x, y)], {"train": (x, y)}, 3, None]
    ensure(case.part.match(case.given) is True, f"not True of {case.given!r}")
    for other in others:
        ensure(case.part.match(other) is False, f"not False of {str(other)[:40]!r}")


def opens_samples(case: SourceCase) -> None:
    """Check that open returns a table or a data set of several samples. A data set's samples must fit into one batch,
    and be equal when they are read again; its targets and groups, if any, need an entry for each sample. See
    flsv.data.Source."""
    with untouched_rngs("an open"):
        data = case.opened
    ensure(len(data) > 1, f"{len(data)} training samples")
    if isinstance(data, Table):
        return
    first = [data[0], data[len(data) - 1]]
    ensure(equal(first, [data[0], data[len(data) - 1]]), "another sample when it is read again")
    default_collate(first)
    for name in ("targets", "groups"):
        values = getattr(data, name, None)
        ensure(values is None or len(values) == len(data), f"{name} {values} of {len(data)} samples")


def opens_the_same_again(case: SourceCase) -> None:
    """Check that the data have the same samples in the same order when they are opened again, as a resumed run does.
    Sort listed files."""
    if not isinstance(case.opened, Table):
        one, again = (content_hashes(data, {"all": torch.arange(len(data))}) for data in (case.opened, case.open()))
        ensure(one == again, "others when it is opened again")


def is_dealt_out(case: SourceCase) -> None:
    """Check that a data module can partition all samples between two clients, or by the source's groups, and that each
    client's batches can be read."""
    home = sys.modules[open_source.__module__]
    grouped = "groups" in case.options or getattr(case.opened, "groups", None) is not None
    options = {"partitioner": GroupPartitioner() if grouped else IIDPartitioner(2), **case.options}
    source = str(case.given) if isinstance(case.given, Path) else case.given
    with mock.patch.object(home, "sources", return_value=(case.part, *home.SOURCES)):
        data = FederatedDataModule(source, splits=Splits(server_val=0.2), **options)
        data.setup("fit")
    ensure(data.num_clients > 1 and data.num_samples.min() > 0, f"clients with {data.num_samples.tolist()} samples")
    for client in range(data.num_clients):
        next(iter(data.client_loader(client)))
    dealt = int(data.num_samples.sum()) + len(data.server_val_indices)
    ensure(dealt == len(case.opened), f"{dealt} of {len(case.opened)} samples")


def broken_ones_are_refused(case: SourceCase) -> None:
    """Check that open raises ConfigurationError for data that cannot be read. Say in the message what is wrong."""
    for each in case.broken:
        found = refused(partial(case.part.open, each, case.reading), ConfigurationError)
        ensure(found, f"no error of {each!r}")


SourceCase.checks = (matches_its_kind, opens_samples, opens_the_same_again, is_dealt_out, broken_ones_are_refused)
