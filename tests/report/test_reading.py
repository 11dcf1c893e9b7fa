"""A run's folder read after the fact: whole, killed, old, or none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from made_runs import made_value, make_run, write_rows

from flsv.errors import ConfigurationError
from flsv.report import open_run


def test_values_histories_and_names(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path, clients=3, classes=2, rounds=4))
    assert (run.num_clients, run.rounds, run.metrics, run.ended) == (3, 4, ("cssv",), True)
    assert run.final("cssv") == [made_value(i, 0, 3) for i in range(3)]
    assert run.history("cssv", "1").loc[2].tolist() == [made_value(i, 1, 2) for i in range(3)]
    assert run.columns("cssv") == ["0", "1"]
    assert run.column_name("cssv", "1") == "class 1"
    assert run.taken_part() == [4, 4, 4]
    assert open_run(tmp_path / "contributions.csv").table.equals(run.table)


def test_values_stay_until_they_change_and_weights_do_not(tmp_path: Path) -> None:
    make_run(tmp_path, clients=2)
    write_rows(tmp_path, [[0, "cssv", 0, "", 0.5], [0, "weight", 0, "", 1], [1, "cssv", 1, "", 0.25]])
    run = open_run(tmp_path)
    assert run.history("cssv").loc[1].tolist() == [0.5, 0.25]
    weights = run.history("weight")
    assert weights.loc[0, 0] == 1.0
    assert math.isnan(weights.loc[1, 0])


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no folder"):
        open_run(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="no run's folder"):
        open_run(tmp_path)
    make_run(tmp_path / "logs" / "version_0")
    with pytest.raises(ConfigurationError, match=r"runs below it.*version_0"):
        open_run(tmp_path)
    make_run(tmp_path)
    (tmp_path / "contributions.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match="has the columns .a., .b.: expected round"):
        open_run(tmp_path)
    make_run(tmp_path)
    with (tmp_path / "contributions.csv").open("a") as file:
        file.write("4,cssv,zero,,1,Boston,,,\n")
    with pytest.raises(ConfigurationError, match="client is 'zero'"):
        open_run(tmp_path)


def test_a_record_that_is_broken_or_of_another_run_or_version_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    record = json.loads((folder / "run.json").read_text())
    for text in ("{", "[]", "{}", "3"):
        (folder / "run.json").write_text(text)
        with pytest.raises(ConfigurationError, match="is no record of a run"):
            open_run(folder)
    (folder / "run.json").unlink()
    with pytest.raises(ConfigurationError, match="there is no .*run.json"):
        open_run(folder)
    (folder / "run.json").write_text(json.dumps({**record, "version": 2}))
    with pytest.raises(ConfigurationError, match="is of version 2, and this flsv reads version 3"):
        open_run(folder)
    for name in ("clients", "metrics", "events", "hashes"):
        (folder / "run.json").write_text(json.dumps({key: value for key, value in record.items() if key != name}))
        with pytest.raises(ConfigurationError, match=f"it lacks {name}"):
            open_run(folder)
    short = {name: record[name][:1] for name in ("clients", "samples", "class_counts")}
    hashes = {"server": "feed", "0": "00"}
    (folder / "run.json").write_text(json.dumps({**record, **short, "hashes": hashes}))
    with pytest.raises(ConfigurationError, match="line 8: client is 1, expected 0 to 0"):
        open_run(folder)
    one_class = {"classes": record["classes"][:1], "class_counts": [row[:1] for row in record["class_counts"]]}
    (folder / "run.json").write_text(json.dumps({**record, **one_class}))
    with pytest.raises(ConfigurationError, match="a class '1'"):
        open_run(folder)
