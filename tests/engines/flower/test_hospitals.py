"""The tutorial's hospitals, each with its table at a site of its own, by the lines of the page on sites."""

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
from helpers.sites import BOSTON_ADDRESS, SiteTransport

pytestmark = pytest.mark.flower

DOCS = Path(__file__).parents[3] / "docs"
TEMPLATE = Path(cli.__file__).parent / "templates" / "flower" / "fedapp" / "federation.py"
HOSPITALS = ["Boston", "Lyon", "Osaka", "Quito"]
ROUNDS = 2


def block_of(page: str, beginning: str) -> str:
    """The code block of a page that begins with this line."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"```py.*?\n(.*?)```", text, flags=re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return block


def with_texts(text: str, changes: Mapping[str, str]) -> str:
    """A text with other texts in place of some that it has."""
    for old_text, new_text in changes.items():
        assert old_text in text
        text = text.replace(old_text, new_text)
    return text


def merge_drafts(clinics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of the page on sites at each hospital, and where the drafts are joined."""
    page = (DOCS / "reference/sites.md").read_text()
    (answers,) = re.findall(
        r'```yaml title="answers.yaml"\n(.*?)```',
        page,
        flags=re.DOTALL,
    )
    command_texts = re.findall(
        r"```bash\nflsv (data .*?)```",
        page,
        flags=re.DOTALL,
    )
    commands = []
    for text in command_texts:
        text_on_one_line = text.replace("\\\n", " ")
        commands.append(text_on_one_line.split())
    draft_command, merge_command = commands

    monkeypatch.chdir(clinics)
    Path("answers.yaml").write_text(answers)
    for name in HOSPITALS:
        arguments = [argument.replace("Boston", name) for argument in draft_command]
        assert cli.main(arguments) == 0
    assert cli.main(merge_command) == 0
    monkeypatch.chdir(clinics.parent)


def load_project(
    path: Path,
    clinics: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """The template's project, with what the page on sites says of tables. Its client and server are
    those that Flower's apps hold."""
    module_and_loop, _ = TEMPLATE.read_text().split("client = client_app")
    module_and_loop = with_texts(
        module_and_loop,
        {"num_classes=10, input_shape=(1, 8, 8)": "num_classes=2, input_shape=(8,)"},
    )
    client_and_server = with_texts(
        block_of("reference/sites.md", "def table(path"),
        {"/data/": f"{clinics}/", "rounds=15": f"rounds={ROUNDS}"},
    )
    imports = "from flsv import FederatedDataModule\nfrom flsv.data import OneClient, Splits\n"
    path.write_text(imports + module_and_loop + client_and_server)
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
    exec(block_of("tutorials/hospitals.md", "from pathlib"), {})
    merge_drafts(tmp_path / "clinics", monkeypatch)
    project = load_project(tmp_path / "federation.py", tmp_path / "clinics", monkeypatch)

    serve_hospitals(project, tmp_path)

    status = json.loads((tmp_path / "runs" / "status.json").read_text())
    assert status["status"] == "finished"
    dictionary = yaml.safe_load((tmp_path / "runs" / "dictionary.yaml").read_text())
    assert dictionary == yaml.safe_load((tmp_path / "clinics" / "dictionary.yaml").read_text())
    table = flsv.read_run(tmp_path / "runs")
    values = table[table["metric"] == "cssv"]
    assert len(values) == ROUNDS * len(HOSPITALS) * 3  # of both classes, and their mean
    assert values["value"].notna().all()
