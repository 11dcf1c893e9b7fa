"""flsv's own sources of data, and a stranger's, pass the checks of :mod:`flsv.testing`."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.data import Reading
from flsv.data.sources.source import SOURCES
from flsv.testing import check_source

X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


def kind_of(given: Any) -> Any:
    return next(kind for kind in SOURCES if kind.match(given))


class JSONLines:
    """As ``docs/howto/own_source.md`` has it."""

    def match(self, given: Any) -> bool:
        return isinstance(given, Path) and given.suffix == ".jsonl"

    def open(self, given: Path, reading: Reading) -> pd.DataFrame:
        return pd.read_json(given, lines=True)


def test_table_sources_pass_the_checks(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "ill": Y, "ward": ["east", "west"] * 10})
    frame.drop(columns="ward").to_csv(tmp_path / "a.csv", index=False)
    frame.to_json(tmp_path / "visits.jsonl", orient="records", lines=True)
    (tmp_path / "empty.csv").touch()
    check_source(SOURCES[0], tmp_path / "a.csv", broken=[tmp_path / "empty.csv"], labels="ill")
    check_source(kind_of(frame), frame, labels="ill")
    check_source(JSONLines(), tmp_path / "visits.jsonl", labels="ill", groups="ward")


@pytest.mark.parametrize("given", [(X, Y), TensorDataset(X, Y), "digits"], ids=["arrays", "data set", "images"])
def test_object_sources_pass_the_checks(given: Any) -> None:
    """Asked one after the other: the last ones match what those before them read."""
    late = {"matches_its_kind": "kinds that are asked before it have taken the others"}
    check_source(kind_of(given), given, expected_failures=late)
