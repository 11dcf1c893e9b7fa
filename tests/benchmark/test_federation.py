"""The benchmark's federations: what their files say, and what is said where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flsv.benchmark import federation, names
from flsv.benchmark.federation import FOLDER
from flsv.errors import ConfigurationError


def test_two_sets_and_no_other() -> None:
    tuning, held_out = names("tuning"), names("held_out")
    assert sorted([*tuning, *held_out]) == names()
    assert len(tuning) >= 8
    assert len(held_out) >= 8
    with pytest.raises(ConfigurationError, match="no set"):
        names("training")


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("digits")])
def test_the_digits_need_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLSV_DATA_ROOT", raising=False)
    each = federation(name)
    assert each.available
    data = each.datamodule()
    assert data.num_clients == 6 or each.circles
    for kind, bad in each.badness().items():
        assert 0 < int(bad.sum()) < data.num_clients
        if kind in ("label_noise", "feature_noise", "duplicates"):
            assert set(bad.nonzero().flatten().tolist()) <= set(data.malicious)


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLSV_DATA_ROOT", str(tmp_path))
    mnist = federation("mnist_sizes")
    assert mnist.missing == ["MNIST/raw"]
    with pytest.raises(ConfigurationError, match="Set FLSV_DATA_ROOT"):
        mnist.datamodule()


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    said = yaml.safe_load((FOLDER / "digits_sizes.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**said, "rounds": 3}))
    assert (federation(str(path)).name, federation(str(path)).rounds) == ("mine", 3)
    path.write_text(yaml.safe_dump({**said, "round": 3}))
    with pytest.raises(ConfigurationError, match="expected a mapping with title"):
        federation(str(path))
    path.write_text(yaml.safe_dump({**said, "model": {"class_path": "flsv.NoSuchModule"}}))
    with pytest.raises(ConfigurationError, match="the federation mine"):
        federation(str(path)).module()
    path.write_text(yaml.safe_dump({**said, "circles": -1}))
    with pytest.raises(ConfigurationError, match="circles=-1"):
        federation(str(path))
    with pytest.raises(ConfigurationError, match="there is no federation 'nothing'"):
        federation("nothing")
