"""What stands in the report of all."""

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flsv.report import drawing, write_report
from flsv.results.text import NONE, number
from flsv.utilities.csv_files import NAN
from helpers.pages import text_of
from helpers.runs import NAMES, made_value, make_run

NASTY = ("a|b <b>x</b>", "</title><script>alert(1)</script>", "[x](http://evil)", "`c` *d* & \\e")


def text(folder: Path) -> str:
    return text_of(write_report(folder))


def test_report_of_all_has_every_clients_name_value_and_hash(tmp_path: Path) -> None:
    page = text(make_run(tmp_path))
    for client in range(4):
        assert NAMES[client] in page
        assert number(made_value(client, 0, 4)) in page or f"{made_value(client, 0, 4):.3f}" in page
        assert f"{client:02d}" * 8 in page  # its hash
    parts = ("Class by class", "Over the rounds", "class 2", "4402", "0.875", "77123", "cosine")
    assert not [part for part in (*parts, "more is better") if part not in page]


def test_whiskers_reach_from_a_value_to_the_ends_of_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(drawing, "draw_bars", lambda axis, values, names, **options: seen.update(options))
    drawing.bars(["Boston", "Lyon"], [0.5, 1.0], [[0.25, NAN], [1.25, NAN]])
    assert seen["errors"][:, 0].tolist() == [0.25, 0.75]
    assert np.isnan(seen["errors"][:, 1]).all()


def test_report_loads_no_other_file_and_escapes_names(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path, names=NASTY)).read_text(encoding="utf-8")
    fetched = r"<(script|link|img|iframe|object|b|a)\b|<[^>]* (src|href|on\w+)=|url\(|@import"
    assert not re.search(fetched, page)
    assert all(html.escape(name) in page for name in NASTY)


def test_charts_have_titles_and_descriptions_and_are_reproducible(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    charts = re.findall(r"<svg.*?</svg>", page)
    assert len(charts) == 4  # bars on page one and in the appendix, and two histories
    head = r'<svg class="chart" role="img" viewBox="[\d. ]+">\s*<title>[^<]+</title><desc>[^<]+</desc>'
    for chart in charts:
        assert re.match(head, chart)
        assert "Boston" in re.findall("<desc>(.*?)</desc>", chart)[0]
        assert "#000000" not in chart  # black is the page's ink, which is white on a dark screen
        assert not re.search(r"metadata|<style|clip-path| id=\"(figure|axes|patch)|20\d\d-\d\d", chart)
    assert write_report(tmp_path).read_text(encoding="utf-8") == page


def test_page_of_a_killed_run_says_that_it_has_not_ended(tmp_path: Path) -> None:
    assert "The training has not finished" in text(make_run(tmp_path / "killed", ended=False, rounds=2))
    assert "0 rounds" in text(make_run(tmp_path / "early", ended=False, rounds=0))


def test_never_drawn_client_is_shown_as_a_dash_and_not_0(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    kept = [x for x in (folder / "contributions.csv").read_text().splitlines() if x.split(",")[2] != "1"]
    (folder / "contributions.csv").write_text("\n".join(kept) + "\n")
    page = text(folder)
    assert f"| Lyon | {NONE} |" in page
    assert "No value, which is not the same as a value of 0: Lyon." in page
    assert "A dash means that the client was never drawn" in page
