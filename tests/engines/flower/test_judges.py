"""Three SuperNodes that judge coalitions' models give what one process gives."""

import csv
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flsv import FederatedDataModule
from flsv.cli import main
from flsv.data import GroupPartitioner, Splits
from helpers.fits import trainer_for
from helpers.sites import NAMES, deployment

pytestmark = pytest.mark.flower

#: What the project's file is given in the place of its last lines: no server has data, and sites hold some out.
JUDGED = """
from flsv import FederatedDataModule
from flsv.data import OneClient, Splits
from flsv.metrics import PartialFederatedShapley, ShadowShapley

def site_data(node):
    splits = Splits(server_val=0.0, client_val=0.25)
    return FederatedDataModule(SiteData(node), OneClient(), splits=splits)


def make_loop():
    metrics = {"value": ShadowShapley(judges="clients"), "sv": PartialFederatedShapley(judges="clients")}
    return FederatedLoop(metrics=metrics, seed=0)


client = client_app(make_module, site_data, make_loop)
server = server_app(make_module, make_loop, SITES, rounds=3, num_classes=10, folder="runs", timeout=600)
"""


#: What the sites' policy allows: both questions of the judges.
QUESTIONS = 'questions = ["flsv.games.judges:judge", "flsv.games.judges:judge_coalitions"]\n'


def test_values_of_coalitions_judged_by_supernodes_equal_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "app"
    assert main(["init", "--flower", str(folder), "--quiet"]) == 0
    project = folder / "fedapp" / "federation.py"
    project.write_text(
        project.read_text().split("def make_loop")[0] + JUDGED.replace('"runs"', repr(str(folder / "runs")))
    )
    with deployment(folder, QUESTIONS) as processes:
        processes.supervise("rounds")
        processes.wait_for("rounds", lambda log: "the run has" in log)
        asked = (folder / f"{NAMES[0]}.log").read_text().count("flsv.games.judges:judge")
    # before training, the model at its start and end, and in each round two games and the predicted one
    assert asked == 12, (folder / "rounds.log").read_text()
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.startswith("fedapp")]:
        monkeypatch.delitem(sys.modules, name)
    from fedapp.federation import make_loop, make_module  # type: ignore[import-not-found]

    loop, splits = make_loop(), Splits(server_val=0.0, client_val=0.25)
    groups = [index % 3 for index in range(1437)]
    data = FederatedDataModule("digits", GroupPartitioner(), groups=groups, batch_size=16, splits=splits)
    trainer_for(loop, tmp_path, 3).fit(make_module(), data)
    with (folder / "runs" / "contributions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["round"] == "2"]
    for metric, values in loop.contributions.items():
        told = {
            int(row["client"]): float(row["value"]) for row in rows if (row["metric"], row["class"]) == (metric, "")
        }
        found = torch.tensor([told[client] for client in range(3)])
        # a site trains its own model beside the run's, one process after it: equal but for rounding
        tolerance = 1e-5 if metric == "value" else 0.0
        torch.testing.assert_close(found, values.as_subclass(torch.Tensor), rtol=tolerance, atol=tolerance)
