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
import yaml

import flsv

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flsv import cli
from flsv.engines.remote import RemoteServer, SiteClient
from helpers import pages
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
    answers = block_of(PAGE, "answers.yaml")
    Path("answers.yaml").write_text(answers)

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
        "rounds=15": f"rounds={ROUNDS}",
    }
    text = block_of(PAGE, "federation/fedapp/federation.py")
    project = with_texts(text, changes)
    path = folder / "federation.py"
    path.write_text(project)
    monkeypatch.setattr("flsv.engines.flower.client_app", SiteClient)
    monkeypatch.setattr("flsv.engines.flower.server_app", RemoteServer)
    return runpy.run_path(str(path))


def serve_hospitals(project: Mapping[str, Any], folder: Path) -> None:
    """Run the project's server on its client at each hospital."""
    policy = folder / "flsv-site.toml"
    policy.write_text("questions = []\n")
    sites = {}
    for address, name in enumerate(HOSPITALS, start=BOSTON_ADDRESS):
        node = {
            "site": name,
            "folder": str(folder / name),
            "policy": str(policy),
        }
        client = replace(project["client"])  # one of its own
        answer = partial(client.answer, node=node, sender="server")
        sites[address] = SimpleNamespace(answer=answer)

    project["server"].serve(SiteTransport(sites, HOSPITALS), "run")


def test_hospitals_of_the_pages_share_a_dictionary_and_have_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block_of("tutorials/hospitals.md", "clinics.py"), {})
    merge_drafts()
    project = load_project(tmp_path, monkeypatch)

    serve_hospitals(project, tmp_path)

    status = json.loads((tmp_path / "runs" / "status.json").read_text())
    assert status["status"] == "finished"
    dictionary = yaml.safe_load((tmp_path / "runs" / "dictionary.yaml").read_text())
    assert dictionary == yaml.safe_load((tmp_path / "clinics" / "dictionary.yaml").read_text())
    values = flsv.read_run(tmp_path / "runs")
    values = values[values["metric"] == "value"]
    assert len(values) == ROUNDS * len(HOSPITALS)
    assert values["value"].notna().all()
