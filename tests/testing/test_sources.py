"""flsv's own sources of data, and a stranger's, pass the checks of :mod:`flsv.testing`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from flsv.data import Reading
from flsv.data.sources.source import SOURCES
from flsv.errors import ConfigurationError
from flsv.testing import check_source

X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


class Archive:
    """Samples of a NumPy file with ``x`` and ``y``, called ``.samples``."""

    def match(self, given: Any) -> bool:
        return isinstance(given, Path) and given.suffix == ".samples"

    def open(self, given: Path, reading: Reading) -> Dataset:
        try:
            held = np.load(given)
            return TensorDataset(torch.from_numpy(held["x"]), torch.from_numpy(held["y"]))
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(f"{given} holds no samples: {error}. Save x and y.") from error


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    with (tmp_path / "all.samples").open("wb") as file:
        np.savez(file, x=X.numpy(), y=Y.numpy())
    return tmp_path / "all.samples"


def test_a_strangers_source(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.samples").write_bytes(b"no archive")
    check_source(Archive(), archive, broken=[tmp_path / "bad.samples", tmp_path / "none.samples"])


def test_tables(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "ill": Y})
    frame.to_csv(tmp_path / "a.csv", index=False)
    table = SOURCES[0]
    check_source(table, tmp_path / "a.csv", labels="ill")
    columns = next(kind for kind in SOURCES if kind.match(frame))
    check_source(columns, frame, labels="ill")


class JSONLines:
    """As ``docs/howto/own_source.md`` has it."""

    def match(self, given: Any) -> bool:
        return isinstance(given, Path) and given.suffix == ".jsonl"

    def open(self, given: Path, reading: Reading) -> pd.DataFrame:
        return pd.read_json(given, lines=True)


def test_what_gives_a_dataframe(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "ill": Y, "ward": ["east", "west"] * 10})
    frame.to_json(tmp_path / "visits.jsonl", orient="records", lines=True)
    check_source(JSONLines(), tmp_path / "visits.jsonl", labels="ill")
    check_source(JSONLines(), tmp_path / "visits.jsonl", labels="ill", groups="ward")


#: Asked one after the other, so that the last ones match what those before them read.
LATE = {"matches_its_kind": "kinds that are asked before it have taken the others"}


@pytest.mark.parametrize(
    ("given", "failures"),
    [((X, Y), LATE), (TensorDataset(X, Y), LATE), ("digits", LATE)],
    ids=["arrays", "data set", "images"],
)
def test_objects_and_names(given: Any, failures: dict[str, str]) -> None:
    check_source(next(kind for kind in SOURCES if kind.match(given)), given, expected_failures=failures)
