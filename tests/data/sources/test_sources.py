"""Other people's kinds of sources, by entry points."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule, GroupPartitioner
from flsv.data.sources import source
from flsv.data.sources.base import SourceData
from flsv.errors import ConfigurationError


class Scans:
    """What ends in .scan, as a package of somebody else's would read it: one number a line, and its class."""

    def match(self, given):
        return isinstance(given, Path) and given.suffix == ".scan"

    def open(self, given, reading):
        rows = torch.tensor([[float(each) for each in line.split()] for line in given.read_text().splitlines()])
        data = TensorDataset(rows[:, :1], rows[:, 1].long())
        data.classes = ("ill", "well")
        return data


class Series:
    """A folder with the slices of a body, as DICOM has it."""

    def match(self, given):
        return isinstance(given, Path) and given.is_dir() and any(given.glob("*.slice"))

    def open(self, given, reading):
        slices = torch.tensor([float(path.read_text()) for path in sorted(given.glob("*.slice"))])
        return slices[:, None], [path.stem[0] for path in sorted(given.glob("*.slice"))]


class Pairs:
    """What is neither a data set nor a table yet."""

    def match(self, given):
        return given == "pairs"

    def open(self, given, reading):
        return torch.arange(60.0).reshape(30, 2), ["ill", "well"] * 15


class Registry:
    """What has splits of its own."""

    def match(self, given):
        return given == "registry://scans"

    def open(self, given, reading):
        x = torch.arange(30.0)[:, None]
        train, test = TensorDataset(x, torch.arange(30) % 2), TensorDataset(x[:4], torch.zeros(4))
        wards = {"groups": torch.arange(30) % 3, "group_names": ("a", "b", "c")}
        return SourceData(train, test=test, class_names=("ill", reading.files.root), labeled=True, **wards)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        source, "installed", lambda group: (Scans, Series, Pairs, Registry) if group == "flsv.sources" else ()
    )
    source.sources.cache_clear()
    yield
    source.sources.cache_clear()


def scan(path: Path, shift: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row + shift} {row % 2}\n" for row in range(20)))
    return path


def test_an_entry_point_is_asked_first(tmp_path):
    data = FederatedDataModule(str(scan(tmp_path / "head.scan")))
    data.setup("fit")
    assert data.class_names == ("ill", "well")
    assert int(data.num_samples.sum()) == 18
    assert FederatedDataModule("digits").source == "digits"


def test_it_reads_clients_and_what_is_held_out(tmp_path):
    for place in ("Boston.scan", "Lyon.scan", "test.scan"):
        scan(tmp_path / "files" / place)
        scan(tmp_path / "folders" / place.removesuffix(".scan") / "head.scan")
    seen = []
    for given in (
        {"source": str(tmp_path / "files")},
        {"source": str(tmp_path / "folders")},
        {
            "clients": {name: str(tmp_path / "files" / f"{name}.scan") for name in ("Boston", "Lyon")},
            "test": str(tmp_path / "folders" / "test"),
        },
    ):
        data = FederatedDataModule(**given)
        data.setup("fit")
        assert data.client_names == ("Boston", "Lyon")
        seen.append((data.content_hashes(), len(next(iter(data.test_dataloader()))[0])))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1] == 20


@pytest.mark.parametrize("labels", [None, "diagnosis"])
def test_what_has_splits_of_its_own_is_dealt_as_a_whole(labels):
    data = FederatedDataModule("registry://scans", GroupPartitioner(), labels=labels)
    data.setup("fit")
    assert data.class_names == ("ill", data.files.root)
    assert data.client_names == ("a", "b", "c")
    assert len(next(iter(data.test_dataloader()))[0]) == 4
    with pytest.raises(ConfigurationError, match="client 'a': registry://scans has splits of its own"):
        FederatedDataModule(clients={"a": "registry://scans", "b": "registry://scans"}).setup("fit")
    with pytest.raises(ConfigurationError, match="test: the source has test data of its own"):
        FederatedDataModule("registry://scans", test=(torch.zeros(2, 1), [0, 1])).setup("fit")
