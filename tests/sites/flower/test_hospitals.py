"""The tutorial's hospitals, each with its table at a site of its own, by the lines of the page on tables at sites."""

import json
import re
import runpy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flsv

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flsv import FederatedDataModule, cli
from flsv.metrics import ShadowShapley
from helpers import pages
from helpers.fits import trainer_for
from helpers.sites import BOSTON_ADDRESS, SiteTransport

pytestmark = pytest.mark.flower

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "reference/tables_at_sites.md"
HOSPITALS = ["Boston", "Lyon", "Osaka", "Quito"]
ROUNDS = 2


def block_of(page: str, title: str) -> str:
    """The code block of a page that has this title."""
    text = (DOCS / page).read_text()
    blocks = pages.blocks_of_page(text)
    (block,) = [block for block in blocks if block.title == title]
    return str(block.text)


def with_texts(text: str, changes: Mapping[str, str]) -> str:
    """A text with other texts in place of some that it has."""
    for old_text, new_text in changes.items():
        assert old_text in text
        text = text.replace(old_text, new_text)
    return text


def merge_drafts() -> None:
    """Run the page's commands at each hospital, and where the drafts are joined."""
    responses = block_of(PAGE, "answers.yaml")
    Path("answers.yaml").write_text(responses)

    page = (DOCS / PAGE).read_text()
    page_of_long_lines = page.replace("\\\n", " ")
    draft_command, merge_command = re.findall(
        r"^ *flsv (data .*)$",
        page_of_long_lines,
        flags=re.MULTILINE,
    )
    for name in HOSPITALS:
        command = draft_command.replace("$site", name)
        assert cli.main(command.split()) == 0
    assert cli.main(merge_command.split()) == 0


def load_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's project. Its client and server are those that Flower's apps hold."""
    clinics = folder / "clinics"
    changes = {
        "../clinics": str(clinics),
        "ROUNDS = 15": f"ROUNDS = {ROUNDS}",
    }
    text = block_of(PAGE, "federation/fedapp/federation.py")
    project = with_texts(text, changes)
    path = folder / "federation.py"
    path.write_text(project)
    monkeypatch.setattr("flsv.sites.flower.client_app", lambda client: client)
    monkeypatch.setattr("flsv.sites.flower.server_app", lambda server: server)
    return runpy.run_path(str(path))


def serve_hospitals(project: Mapping[str, Any], folder: Path) -> None:
    """Run the project's server on its client at each hospital."""
    policy = folder / "flsv-site.toml"
    policy.write_text("functions = []\n")
    sites = {}
    for address, name in enumerate(HOSPITALS, start=BOSTON_ADDRESS):
        node = {
            "site": name,
            "folder": str(folder / name),
            "policy": str(policy),
        }
        client_of_site = replace(project["client"])
        respond = partial(client_of_site.respond, node=node, sender="server")
        sites[address] = SimpleNamespace(respond=respond)

    project["server"].serve(SiteTransport(sites, HOSPITALS), "run")


def test_hospitals_of_the_pages_have_the_weights_and_values_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block_of("tutorials/hospitals.md", "clinics.py"), {})
    merge_drafts()
    project = load_project(tmp_path, monkeypatch)
    serve_hospitals(project, tmp_path)

    all_tables = FederatedDataModule(
        "clinics",
        labels="died",
        pos_label="yes",
        dictionary="clinics/dictionary.yaml",
    )
    # By default sites train each client alone.
    metric = ShadowShapley(coalitions="singles", performance="average_precision")
    loop = project["make_loop"]().replace(metrics={"value": metric})
    module = project["make_module"]()
    trainer_for(loop, tmp_path, ROUNDS).fit(module, all_tables)

    status = json.loads((tmp_path / "runs" / "status.json").read_text())
    assert status["status"] == "finished"
    checkpoint = torch.load(tmp_path / "runs" / "checkpoints" / "last.ckpt", weights_only=False)
    torch.testing.assert_close(checkpoint["state_dict"], module.state_dict(), rtol=0, atol=0)
    rows = flsv.read_run(tmp_path / "runs")
    rows = rows[rows["metric"] == "value"]
    values_at_end = rows.tail(len(HOSPITALS)).set_index("client_name")["value"]
    expected = loop.contributions["value"].tolist()
    assert values_at_end.to_dict() == dict(zip(HOSPITALS, expected))
