"""A run whose sampled values tell nobody apart says so, and how many evaluations would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import fit, toy_data

from flsv import FederatedLoop
from flsv.metrics import CumulativeShapley
from flsv.report import open_run
from flsv.report.facts import caveats_of


def played(folder: Path, **options: Any) -> FederatedLoop:
    metric = CumulativeShapley(performance="accuracy", **options)
    loop = FederatedLoop(metrics={"sv": metric}, seed=1)
    fit(loop, folder, data=toy_data((4,) * 12, server_val=0.2), rounds=2)
    return loop


def test_it_is_in_the_closing_lines_the_record_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = played(tmp_path, estimator="permutation", estimator_args={"budget": 60})
    (path,) = tmp_path.rglob("run.json")
    record = json.loads(path.read_text())
    told = record["undecided"]["sv"]
    assert told["evaluations"] == int(loop.metrics["sv"].evaluations)  # type: ignore[arg-type]
    assert told["needed"] >= told["evaluations"]
    line = f"sv: no pair of clients can be told apart at this budget ({told['evaluations']:,} evaluations); about "
    assert line in capsys.readouterr().out
    assert any(text.startswith(line) and text.endswith(".") for text in caveats_of(open_run(path.parent)))
