"""The tutorial's hospitals, each with its table at a SuperNode: what one process computes, to the bit."""

import ast
import csv
import json
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flsv import FederatedDataModule
from flsv.cli import main
from flsv.data import Splits
from helpers.fits import trainer_for
from helpers.sites import start_deployment

pytestmark = pytest.mark.flower

DOCS = Path(__file__).parents[3] / "docs"
HOSPITALS = ["Boston", "Lyon", "Osaka", "Quito"]
ROUNDS = 2
WITH_DICTIONARY = pytest.param(True, marks=pytest.mark.long)
COLUMNS = """{
            "exclude": ["insurer", "patient", "admitted"],
            "dates": {"discharged": "admitted"},
            "min_rows": 5,
        }"""


def block_of(page: str, beginning: str) -> str:
    """The code block of a page that begins with this line."""
    blocks = re.findall(r"```py.*?\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return block


def with_texts(text: str, changes: Mapping[str, str]) -> str:
    """A text with other texts in place of some that it has."""
    for old_text, new_text in changes.items():
        assert old_text in text
        text = text.replace(old_text, new_text)
    return text


def write_project(folder: Path, clinics: Path, columns: str) -> None:
    """The template's project, with what the page on sites says of tables, and these columns."""
    assert main(["init", "--flower", str(folder), "--quiet"]) == 0

    path = folder / "fedapp" / "federation.py"
    module_and_loop, _ = path.read_text().split("client = client_app")
    module_and_loop = with_texts(
        module_and_loop,
        {"num_classes=10, input_shape=(1, 8, 8)": "num_classes=2, input_shape=(8,)"},
    )
    runs = folder / "runs"
    client_and_server = with_texts(
        block_of("reference/sites.md", "def table(path"),
        {
            "/data/": f"{clinics}/",
            COLUMNS: columns,
            "rounds=15": f"rounds={ROUNDS}",
            '"runs"': f'"{runs}"',
        },
    )
    imports = "from flsv import FederatedDataModule\nfrom flsv.data import OneClient, Splits\n"
    path.write_text(imports + module_and_loop + client_and_server)


def fit_in_one_process(
    project: dict[str, Any], clinics: Path, folder: Path
) -> tuple[LightningModule, FederatedDataModule]:
    """The same module, loop and tables in one process, which writes the values into the folder."""
    data = FederatedDataModule(
        clinics,
        labels="died",
        pos_label="yes",
        columns=ast.literal_eval(COLUMNS),
        splits=Splits(server_val=0.0),
    )
    module = project["make_module"]()
    trainer_for(project["make_loop"](), folder, ROUNDS).fit(module, data)
    return module, data


def values_in(folder: Path) -> list[dict[str, str]]:
    """The rows of contributions.csv that metrics have written."""
    (path,) = folder.rglob("contributions.csv")
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["metric"] == "cssv"]


def draft_dictionary(clinics: Path, path: Path) -> None:
    """The dictionary that ``flsv data`` drafts of the tables."""
    options = {
        "--data.source": str(clinics),
        "--data.labels": "died",
        "--data.pos_label": "yes",
        "--data.columns": json.dumps(ast.literal_eval(COLUMNS)),
        "--write": str(path),
    }
    words = [word for option in options.items() for word in option]
    assert main(["data", *words]) == 0


@pytest.mark.parametrize("has_dictionary", [False, WITH_DICTIONARY])
def test_hospitals_at_supernodes_equal_one_process_bitwise(tmp_path, monkeypatch, has_dictionary):
    monkeypatch.chdir(tmp_path)
    exec(block_of("tutorials/hospitals.md", "from pathlib"), {})
    clinics = tmp_path / "clinics"
    folder = tmp_path / "app"
    columns = COLUMNS
    if has_dictionary:
        dictionary = tmp_path / "dictionary.yaml"
        draft_dictionary(clinics, dictionary)
        columns = repr({"encoder": str(dictionary)})
    write_project(folder, clinics, columns)

    policy = 'questions = ["flsv.engines.remote.tables:table_summary"]\n'
    with start_deployment(folder, policy, HOSPITALS) as processes:
        processes.supervise("rounds")
        processes.wait_for("rounds", lambda log: "the run has finished" in log)

    monkeypatch.syspath_prepend(folder)
    project = runpy.run_path(str(folder / "fedapp" / "federation.py"))
    module, data = fit_in_one_process(project, clinics, tmp_path / "one")

    if not has_dictionary:
        encoder = json.loads((folder / "runs" / "encoder.json").read_text())
        assert encoder == data.encoding

    checkpoint = torch.load(folder / "runs" / "checkpoints" / "last.ckpt", weights_only=False)
    for name, value in module.state_dict().items():
        assert torch.equal(checkpoint["state_dict"][name], value), name

    values = values_in(folder / "runs")
    assert len(values) == ROUNDS * len(HOSPITALS) * 3  # of both classes, and their mean
    assert values == values_in(tmp_path / "one")
