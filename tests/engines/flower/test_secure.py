"""Secure sums between SuperNodes: the template's federation trains, measures and reports with them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("flwr", reason="needs pip install 'flsv[flower]'")
pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from flower_deployment import SECONDS, SITES, deployment

from flsv.cli import main
from flsv.data import load_image_data

pytestmark = pytest.mark.flower
#: What the template is changed to: an average, values by sums, and validation samples at the sites.
CHANGED = {
    "from flsv.aggregation import ShapFedWA": "from flsv.aggregation import FedAvg",
    "from flsv.metrics import ClassSpecificShapley": "from flsv.metrics import EverybodyElse",
    'ShapFedWA("cssv"), metrics={"cssv": ClassSpecificShapley()}': (
        'FedAvg(), metrics={"loss": EverybodyElse(performance="negative_loss")}'
    ),
    "from flsv import ClassifierClient, FederatedLoop": (
        "from flsv import ClassifierClient, FederatedDataModule, FederatedLoop\nfrom flsv.data import OneClient, Splits"
    ),
    "client_app(make_module, SiteData, make_loop)": (
        "client_app(make_module, lambda node: FederatedDataModule(SiteData(node), OneClient(), batch_size=16, "
        "splits=Splits(server_val=0.0, client_val=0.2)), make_loop, secure=True)"
    ),
    "rounds=3": "rounds=2",
    "timeout=600)": "timeout=600, secure=True)",
}


def made(folder: Path, changed: Mapping[str, str]) -> Path:
    """The template's project with these changes."""
    assert main(["init", "--flower", str(folder)]) == 0
    app = folder / "fedapp" / "federation.py"
    text = app.read_text()
    for before, after in changed.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    app.write_text(text)
    return folder


def test_sites_that_are_set_up_wrongly_end_the_start(tmp_path: Path) -> None:
    """At once; a site's log has the error in full, and the server's its kind and place."""
    wrong = {"self.part = SITES": 'raise ConfigurationError("of Jane Doe")\n        self.part = SITES'}
    imported = {"from flsv.metrics import": "from flsv.errors import ConfigurationError\nfrom flsv.metrics import"}
    folder = made(tmp_path / "app", wrong | imported)
    status = folder / "runs" / "status.json"
    with deployment(folder) as processes:
        processes.run()
        processes.wait_for("run", lambda _: status.is_file() and "running" not in status.read_text(), SECONDS)
    told = json.loads(status.read_text())
    assert told["status"] == "failed"
    assert "cannot take part: it failed with ConfigurationError at federation.py:" in told["why"]
    assert "of Jane Doe" in "".join((folder / f"{site}.log").read_text() for site in SITES)
    assert "Jane Doe" not in (folder / "run.log").read_text()


def test_three_supernodes_sum_in_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "app", CHANGED)
    last = folder / "runs" / "checkpoints" / "last.ckpt"

    def done(_: str) -> bool:
        return last.is_file() and torch.load(last, weights_only=False)["epoch"] == 1

    with deployment(folder, "secure = true\nleast_sites = 3\n") as processes:
        processes.run()
        processes.wait_for("run", done, SECONDS)
    deployed = torch.load(last, weights_only=False)

    monkeypatch.syspath_prepend(folder)
    from fedapp.federation import make_module  # type: ignore[import-not-found]

    module = make_module()
    test = load_image_data("digits").test
    x, y = next(iter(DataLoader(test, batch_size=len(test))))

    def accuracy() -> float:
        return float((module(x).argmax(1) == y).float().mean())

    before = accuracy()
    module.load_state_dict(deployed["state_dict"])
    assert accuracy() > before + 0.3
    assert main(["report", str(folder / "runs")]) == 0
    with (folder / "runs" / "contributions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    values = [float(row["value"]) for row in rows if (row["round"], row["metric"]) == ("1", "loss")]
    assert len(values) == 3
    assert all(math.isfinite(value) and value for value in values)
    # What is of one site by itself is nowhere.
    assert not {"update_norm", "train_loss"} & {row["metric"] for row in rows if row["value"] not in ("", "nan")}
