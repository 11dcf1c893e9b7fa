"""DataFrames: what the file has, what the loop knows, and that they agree."""

from __future__ import annotations

from pathlib import Path

from made_runs import made_value, make_run
from toys import fit

import flsv
from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley
from flsv.report.run_table import COLUMNS


def test_read_run_is_tidy(tmp_path: Path) -> None:
    frame = flsv.read_run(make_run(tmp_path, clients=3, classes=2, rounds=4))
    assert tuple(frame.columns) == COLUMNS
    assert not frame.duplicated(["round", "metric", "client", "class"]).any()
    of_class = frame[(frame["metric"] == "cssv") & (frame["class"] == "1") & (frame["client_name"] == "Lyon")]
    assert of_class["value"].tolist() == [made_value(1, 1, r) for r in range(4)]
    assert set(of_class["class_name"]) == {"class 1"}
    overall = frame[(frame["metric"] == "cssv") & frame["class"].isna()]
    table = overall.pivot(index="round", columns="client_name", values="value")
    assert table.shape == (4, 3)
    assert table.loc[3, "Graz"] == made_value(2, 0, 3)


def test_a_loops_frame_is_the_last_of_its_runs(tmp_path: Path) -> None:
    metrics = {"cssv": ClassSpecificShapley(), "sv": CumulativeShapley(), "cost": CommunicationCost()}
    loop = FederatedLoop(
        ShapFedWA("cssv"), metrics, seed=1, evaluation=ClientEvaluation(every=1), reporting=Reporting(table=False)
    )
    fit(loop, tmp_path, rounds=2)
    now, run = loop.to_frame(), flsv.read_run(tmp_path)
    assert tuple(now.columns) == COLUMNS
    assert set(now["round"]) == {1}
    keys = ["metric", "client", "class"]
    last = run[run["metric"] != "update_norm"].fillna({"class": ""}).groupby(keys, as_index=False)["value"].last()
    both = now.fillna({"class": ""}).merge(last, on=keys, how="outer", suffixes=("_now", "_run"), indicator=True)
    assert set(both["_merge"]) == {"both"}
    assert (both["value_now"] == both["value_run"]).all()
    assert {"cssv", "sv", "sv/stderr", "weight", "accuracy", "cost"} <= set(now["metric"])
    assert set(now.loc[(now["metric"] == "cost") & now["class"].notna(), "class"]) == {"up", "down"}
