"""Secure sums between SuperNodes: the template's federation trains, measures and reports with them."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import lightning as L
import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'flsv[flower]'")
pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from flower_deployment import SECONDS, SITES, deployment

from flsv import FederatedDataModule
from flsv.cli import main
from flsv.data import GroupPartitioner, Splits, load_image_data
from flsv.engines.remote.secure.at_site import identity

pytestmark = pytest.mark.flower
OTHERS = ("Quito", "Perth", "Turin")
SIX = [*SITES, *OTHERS]
#: What the template is changed to: six sites, an average, values by sums, and validation samples at sites and server.
CHANGED = {
    'SITES = ["Boston", "Lyon", "Osaka"]': f"SITES = {SIX}",
    "range(self.part, 1437, 3)": "range(self.part, 1437, 6)",
    "from flsv.aggregation import ShapFedWA": "from flsv.aggregation import FedAvg",
    "from flsv.metrics import ClassSpecificShapley": "from flsv.metrics import EverybodyElse, ShadowShapley",
    'ShapFedWA("cssv"), metrics={"cssv": ClassSpecificShapley()}': (
        'FedAvg(), metrics={"else": EverybodyElse(performance="negative_loss"), "groups": ShadowShapley('
        'coalitions="all", performance="negative_loss", groups=[[0, 1, 2], [3, 4, 5]])}'
    ),
    "from flsv import ClassifierClient, FederatedLoop": (
        "from flsv import ClassifierClient, FederatedDataModule, FederatedLoop\nfrom flsv.data import OneClient, Splits"
    ),
    "client = client_app(make_module, SiteData, make_loop)": (
        "class ServerData(L.LightningDataModule):\n    def val_dataloader(self):\n"
        '        return DataLoader(load_image_data("digits").test, batch_size=360)\n\n\n'
        "client = client_app(make_module, lambda node: FederatedDataModule(SiteData(node), OneClient(), batch_size=16, "
        "splits=Splits(server_val=0.0, client_val=0.2)), make_loop, secure=True)"
    ),
    "rounds=3": "rounds=2",
    "timeout=600)": "timeout=600, secure=True, datamodule=ServerData)",
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


def test_six_supernodes_sum_in_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TLS, keys, and policies that name all peers: the model and the values, of sites and of groups, are those of
    one process without secure sums."""
    folder = made(tmp_path / "app", CHANGED)
    last = folder / "runs" / "checkpoints" / "last.ckpt"
    peers = "".join(f'{site} = "{identity(folder / "sites" / site)}"\n' for site in SIX)
    policy = f"secure = true\nleast_sites = 3\n[peers]\n{peers}"

    def done(_: str) -> bool:
        return last.is_file() and torch.load(last, weights_only=False)["epoch"] == 1

    with deployment(folder, policy, OTHERS) as processes:
        for site in OTHERS:
            processes.start_site(site)
        processes.run()
        processes.wait_for("run", done, SECONDS)
    deployed = torch.load(last, weights_only=False)

    monkeypatch.syspath_prepend(folder)
    for name in ("fedapp", "fedapp.federation"):  # of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    from fedapp.federation import make_loop, make_module  # type: ignore[import-not-found]

    loop, module = make_loop(), make_module()
    data = FederatedDataModule(
        "digits",
        GroupPartitioner(),
        groups=[i % 6 for i in range(1437)],
        batch_size=16,
        val=load_image_data("digits").test,
        splits=Splits(server_val=0.0, client_val=0.2),
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    here = {"max_epochs": 2, "callbacks": [loop], "default_root_dir": tmp_path}
    L.Trainer(logger=False, accelerator="cpu", **here, **quiet).fit(module, data)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(deployed["state_dict"][name], value, rtol=0, atol=1e-5)

    assert main(["report", str(folder / "runs")]) == 0
    with (folder / "runs" / "contributions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for metric in ("else", "groups"):
        told = {int(r["client"]): float(r["value"]) for r in rows if (r["round"], r["metric"]) == ("1", metric)}
        expected = dict(enumerate(loop.contributions[metric].tolist()))
        assert told == pytest.approx(expected, abs=1e-4)
        assert min(map(abs, told.values())) > 1e-3
    # What is of one site by itself is nowhere.
    assert not {"update_norm", "train_loss"} & {row["metric"] for row in rows if row["value"] not in ("", "nan")}
