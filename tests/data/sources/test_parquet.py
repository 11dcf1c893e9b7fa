"""A Parquet file gives what a CSV file of the same rows gives."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from flsv.cli import main
from flsv.data import Columns, FederatedDataModule, Splits
from flsv.data.sources.source import SOURCES
from flsv.errors import ConfigurationError
from flsv.testing import check_source

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'flsv[parquet]'")
EXAMPLE = Path(__file__).parents[3] / "examples" / "parquet.yaml"


@pytest.fixture
def frame() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    age = draw.normal(50, 10, 90)
    return pd.DataFrame(
        {
            "patient": range(90),
            "ward": np.array(["a", "b", "c"])[draw.integers(0, 3, 90)],
            "age": np.where(draw.random(90) < 0.1, np.nan, age),
            "smokes": draw.random(90) < 0.3,
            "drug": np.array(["none", "x", "y"])[draw.integers(0, 3, 90)],
            "ill": np.where(age > 52, "yes", "no"),
        }
    )


def dealt(**given) -> FederatedDataModule:
    data = FederatedDataModule(
        labels="ill", columns=Columns(exclude=["patient"]), splits=Splits(server_val=0.2, client_test=0.1), **given
    )
    data.setup("fit")
    return data


def save(frame: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        frame.assign(smokes=frame["smokes"].astype(int)).to_csv(path, index=False)
    else:
        frame.to_parquet(path)


def check_equal(one: FederatedDataModule, other: FederatedDataModule) -> None:
    assert one.client_names == other.client_names
    assert one.class_names == other.class_names
    assert one.content_hashes() == other.content_hashes()
    for client in range(one.num_clients):
        for split in ("train", "test"):
            for mine, theirs in zip(one.client_loader(client, split), other.client_loader(client, split), strict=True):
                assert all(map(torch.equal, mine, theirs))


def test_a_file_by_client_and_what_is_held_out(frame, tmp_path):
    for ending in ("csv", "parquet"):
        for ward, rows in frame.groupby("ward"):
            save(rows.drop(columns="ward"), tmp_path / ending / f"{'test' if ward == 'c' else ward}.{ending}")
    found = [dealt(source=str(tmp_path / ending)) for ending in ("csv", "parquet")]
    check_equal(*found)
    assert found[0].client_names == ("a", "b")
    tests = [next(iter(data.test_dataloader())) for data in found]
    assert all(map(torch.equal, *tests))


def test_the_example_runs(frame, tmp_path, monkeypatch, capsys):
    save(frame, tmp_path / "wards.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    quick = ["--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
    assert main(["fit", "--config", str(EXAMPLE), "--data.files.root", str(tmp_path), *quick]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{ward} ", out, re.M) for ward in "abc")


def test_what_cannot_be_read(frame, tmp_path, monkeypatch):
    (tmp_path / "wards.parquet").write_bytes(b"PAR1, and no more")
    with pytest.raises(ConfigurationError, match=r"source: .*wards\.parquet cannot be read as a Parquet file"):
        dealt(source=str(tmp_path / "wards.parquet"))
    save(frame, tmp_path / "wards.parquet")
    with pytest.raises(ConfigurationError, match=r"wards\.parquet has no column 'ills' .*Did you mean 'ill'"):
        FederatedDataModule(str(tmp_path / "wards.parquet"), labels="ills").setup("fit")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r'pip install "flsv\[parquet\]"'):
        dealt(source=str(tmp_path / "wards.parquet"))


def test_it_is_a_source_like_any(frame, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1, and no more")
    save(frame, tmp_path / "wards.parquet")
    given = tmp_path / "wards.parquet"
    check_source(SOURCES[0], given, broken=[tmp_path / "broken.parquet"], labels="ill", groups="ward")
