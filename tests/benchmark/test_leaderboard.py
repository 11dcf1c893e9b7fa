"""The leaderboard has a row per metric, can be sorted, and gives what a paper needs."""

from __future__ import annotations

import csv
import html
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flsv.benchmark.leaderboard import COLUMNS, write_leaderboard
from flsv.benchmark.registry import METRICS, Entry
from flsv.benchmark.summary import Cost, Summary

NAN = float("nan")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


def made(of: float) -> Summary:
    scores = {"a": of, "b": of - 0.2}
    sets = {"tuning": of, "held_out": of - 0.2, "fresh": NAN}
    return Summary(scores, sets, 0.02, 0.5, 0.1, {}, 0.9, 0.9, 0.0, 0.0, 0.0, {})


@pytest.fixture
def page(tmp_path: Path) -> Path:
    summaries = {"size": made(0.4), "Mine_2": made(0.9), "cgsv": made(0.7)}
    entries = {"size": METRICS["size"], "cgsv": METRICS["cgsv"], "Mine_2": Entry("Mine", "benchmark_part.Mine")}
    vars(entries["Mine_2"])["needed"] = ("losses",)
    known: Any = {"a": (None, SimpleNamespace(ceiling=0.95))}
    costs = {"cgsv": Cost(0.0012, 3.0, 1.0)}
    names = write_leaderboard(tmp_path, summaries, entries, known, costs)
    assert names == ["leaderboard.html", "leaderboard.csv"]
    return tmp_path / "leaderboard.html"


def test_rows_are_the_best_first(page: Path) -> None:
    with page.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert [row["metric"] for row in rows] == ["Mine_2", "cgsv", "size"]
    assert (rows[1]["all"], rows[1]["tuning"], rows[1]["held_out"], rows[1]["fresh"]) == ("0.60", "0.70", "0.50", "")
    assert (rows[1]["cpu_ms"], rows[1]["evaluations"], rows[1]["needs"]) == ("1.2", "3", "updates")
    assert rows[0]["needs"] == "losses"
    text = html.unescape(page.read_text())
    assert r"\texttt{Mine\_2} & $0.80 \pm 0.02$ & 0.90 & 0.70 & -- & 0.50 & 0.10 & -- \\" in text
    assert "@software{flsv," in text
    cited = yaml.safe_load((Path(__file__).parents[2] / "CITATION.cff").read_text())
    assert f"title = {{{cited['title']}}}" in text
    assert "comes to 0.95" in text
    assert re.findall(r'<tr class="own"><td>(\w+)', text) == ["Mine_2"]  # one's own stands out


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (name one by the variable CHROMIUM)")
def test_a_click_sorts(page: Path, tmp_path: Path) -> None:
    def order(*clicks: str) -> list[str]:
        clicked = "".join(f"heads[{list(COLUMNS).index(name)}].click();" for name in clicks)
        looked = tmp_path / "clicked.html"
        looked.write_text(page.read_text().replace("</body>", f"<script>{clicked}</script></body>"))
        quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}/profile")
        command = [str(CHROMIUM), *quiet, "--dump-dom", looked.as_uri()]
        seen = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        return re.findall(r"<tr[^>]*><td>(\w+)", seen)

    assert order() == ["Mine_2", "cgsv", "size"]
    assert order("all") == ["size", "cgsv", "Mine_2"]  # it was sorted by it: the other way
    assert order("metric", "metric") == ["cgsv", "Mine_2", "size"]
    assert order("cpu_ms") == ["cgsv", "Mine_2", "size"]  # what is not known comes last
