"""Other people's kinds of sources, by entry points."""

from importlib.metadata import EntryPoint

import torch
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule
from flsv.data.sources import source
from flsv.data.sources.base import SourceData


class Scans:
    """What ends in .scan, as a package of somebody else's would read it."""

    def match(self, given):
        return isinstance(given.source, str) and given.source.endswith(".scan")

    def open(self, given):
        x = torch.arange(30.0)[:, None]
        return SourceData(TensorDataset(x, torch.arange(30) % 2), class_names=("ill", given.files.root))


def test_an_entry_point_is_asked_first(monkeypatch):
    entry = EntryPoint("scans", f"{__name__}:Scans", "flsv.sources")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Scans)
    monkeypatch.setattr(source, "entry_points", lambda group: [entry] if group == "flsv.sources" else [])
    data = FederatedDataModule("head.scan")
    data.setup("fit")
    assert data.class_names == ("ill", "data")
    assert FederatedDataModule("digits").source == "digits"
