"""What an algorithm is stands in configs/: no table that runs configurations says it again in Python."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from cells import CONFIGS, Cell
from run_table import TABLES, cells_of, read_table

TOOLS = CONFIGS.parent / "tools"
DEFINES = ("flsv.aggregation", "flsv.personalization", "flsv.sampling", "flsv.clients", "flsv.attacks", "flsv.uploads")
#: Base classes and what a measurement puts in the place of a strategy, none of them an algorithm of a table.
ALLOWED = {
    "paper_shapleyfl": {"FedAvg"},
    "paper_guo": {"FixedCohort"},
    "paper_pfedsv": {"PFedSV", "OWN_MODEL", "first_order_weights"},
    "study_parts": {"InRunValues"},
}
MODULES = [path for path in sorted(TOOLS.glob("*.py")) if "from cells import" in path.read_text()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_table_builds_an_algorithm(path: Path) -> None:
    imported = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DEFINES)
        for alias in node.names
    }
    assert imported <= ALLOWED.get(path.stem, set()), f"{path.name}: name a file of configs/ instead of {imported}."


#: What a table changes of an algorithm's own file, by row; the rest is data, network and number of rounds.
STRATEGY = (
    "aggregator",
    "metrics",
    "sampler",
    "personalizer",
    "client_algorithm",
    "local_epochs",
    "server_lr",
    "share",
)
COHORT, LARGER = {"sampler.expected_cohort": 6}, {"sampler.cohort_size": 6}
SUM = {"class_path": "flsv.aggregation.ShapleyWeighted", "init_args": {"metric": "fedsv", "normalize": True}}
LISTED = {
    "FedSV": COHORT,
    "FedSV, by the sum": {**COHORT, "aggregator": SUM},
    "S-FedAvg": LARGER,
    "S-FedAvg, temperature 0.1": {**LARGER, "sampler.temperature": 0.1},
    "AFedSV": COHORT,
    "AFedSV+": COHORT,
    "AFedSV+, cohorts of one size": LARGER,
    "pFedMe": {"local_epochs": 1},
    "FedFomo": {
        "metrics": {"relevance": "flsv.metrics.DomainRelevance", "communication": "flsv.metrics.CommunicationCost"}
    },
    "pFedSV, safeguarded": {"personalizer.safeguard": True},
    "pFedSV, shared extractor": {"personalizer.mode": "extractor"},
    "pFedSV, joining, shared start": {"personalizer.game": "joining", "personalizer.shared": 1.0},
    "pFedSV, joining, half-way": {"personalizer.game": "joining", "personalizer.shared": 0.5},
}


def changed(cell: Cell) -> dict:
    """The overrides of strategies, by short names."""
    return {
        name.removeprefix("federation.").replace("init_args.", ""): value
        for name, value in cell.overrides.items()
        if name.startswith(tuple(f"federation.{part}" for part in STRATEGY))
    }


def test_every_change_of_an_algorithm_is_listed() -> None:
    sources = ("Fashion-MNIST, ", "CIFAR-10, ")
    cells = [
        cell for cell in cells_of(read_table(TABLES / "shapleyfl.yaml"), False, [0]) if cell.column.startswith(sources)
    ]
    dealt = ("pathological, MNIST", "Dirichlet, MNIST")
    columns = (*dealt, *(f"{each}, 100 clients" for each in dealt))
    cells += [cell for cell in cells_of(read_table(TABLES / "pfedsv.yaml"), False, [0]) if cell.column in columns]
    for cell in cells:
        assert changed(cell) == LISTED.get(cell.row, {}), cell.row


@pytest.mark.parametrize(
    ("file", "where", "value"),
    [
        ("fedprox", ("client_algorithm", "mu"), 0.01),
        ("fedamp", ("personalizer", "self_weight"), 0.5),
        ("fedamp", ("client_algorithm", "mu"), 0.0001),
        ("fedfomo", ("personalizer", "num_downloads"), 5),
        ("ifca", ("personalizer", "num_clusters"), 5),
        ("pfedsv", ("personalizer", "k"), 5),
    ],
)
def test_the_tables_values_are_the_files(file: str, where: tuple[str, str], value: float) -> None:
    """The numbers of which there used to be two."""
    federation = yaml.safe_load((CONFIGS / f"{file}.yaml").read_text())["federation"]
    assert federation[where[0]]["init_args"][where[1]] == value
