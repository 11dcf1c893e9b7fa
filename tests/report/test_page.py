"""What stands in a report, and what does not stand on one client's page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import NAMES, at_fault, copying, made_value, make_run
from page_text import text_of

from flsv.report import open_run, write_report
from flsv.report.text import NONE, number

NASTY = ("a|b <b>x</b>", "</title><script>alert(1)</script>", "[x](http://evil)", "`c` *d* & \\e")


def html_of(folder: Path, **options: object) -> str:
    return write_report(folder, **options).read_text(encoding="utf-8")  # type: ignore[arg-type]


def texts(folder: Path, **options: object) -> str:
    return text_of(write_report(folder, **options))  # type: ignore[arg-type]


class Parser(HTMLParser):
    """Finds whether tags are closed, and what would be fetched or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.data: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open += [tag] if tag != "meta" else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {tag, *(name for name, _ in attrs)}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data.append(data)


def test_everybody_is_in_the_report_of_all(tmp_path: Path) -> None:
    text = texts(make_run(tmp_path))
    for client in range(4):
        assert NAMES[client] in text
        assert number(made_value(client, 0, 4)) in text or f"{made_value(client, 0, 4):.3f}" in text
        assert f"{client:02d}" * 8 in text  # its hash
    parts = ("Class by class", "Over the rounds", "class 2", "0.875", "1.96 standard errors", "77123", "cosine")
    assert not [part for part in (*parts, "more is better") if part not in text]
    assert (tmp_path / "report.html").read_text().count("<svg") == 3  # bars, and two histories


def test_the_interval_is_that_of_the_standard_errors_or_the_metrics_own(tmp_path: Path) -> None:
    folder = make_run(tmp_path, stderr=False)
    assert open_run(folder).ends("cssv") is None
    with (folder / "contributions.csv").open("a") as file:
        for client in range(4):
            file.write(f"4,cssv/stderr,{client},,0.5,{NAMES[client]},,,\n")
    found = open_run(folder).ends("cssv")
    assert found is not None
    assert found[0][2] == pytest.approx(made_value(2, 0, 4) - 0.98)
    lines = (folder / "contributions.csv").read_text().splitlines()
    rows = [line[:-1] + "-1,2.5" if line.split(",")[1:4:2] == ["cssv", ""] else line for line in lines]
    (folder / "contributions.csv").write_text("\n".join(rows) + "\n")
    assert open_run(folder).ends("cssv") == ([-1] * 4, [2.5] * 4)


def test_the_file_needs_nothing_else_and_names_do_no_harm(tmp_path: Path) -> None:
    html = html_of(make_run(tmp_path, names=NASTY))
    parser = Parser(html)
    fetched = {"script", "link", "img", "iframe", "object", "b", "a", "src", "href", "onload", "onclick"}
    assert not parser.seen & fetched
    assert "url(" not in html
    assert "@import" not in html
    for name in NASTY:
        assert any(name in data for data in parser.data), name


def test_charts_say_what_they_show_and_are_the_same_to_the_byte(tmp_path: Path) -> None:
    html = html_of(make_run(tmp_path))
    charts = re.findall(r"<svg.*?</svg>", html)
    assert len(charts) == 3
    for chart in charts:
        assert re.match(
            r'<svg class="chart" role="img" viewBox="[\d. ]+">\s*<title>[^<]+</title><desc>[^<]+</desc>', chart
        )
        assert "Boston" in re.findall("<desc>(.*?)</desc>", chart)[0]
        assert "#000000" not in chart  # black is the page's ink, which is white on a dark screen
        assert not re.search(r"metadata|<style|clip-path| id=\"(figure|axes|patch)|20\d\d-\d\d", chart)
    assert html_of(tmp_path) == html


OWN = 3


def run_with_everything(folder: Path, others: tuple[int, ...] = (0, 1, 2, 4)) -> Path:
    """Five clients. Client 3 is as it is; the others' go to ``others``."""
    place = dict(zip((0, 1, 2, 4), others)) | {OWN: OWN}
    names = [""] * 5
    for client, to in place.items():
        names[to] = NAMES[client]
    make_run(folder, clients=5, names=tuple(names))
    lines = (folder / "contributions.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines[1:]]
    moved = [
        [r, name, str(place[int(i)]), *cells, NAMES[int(i)], "", "", ""] for r, name, i, *cells, _, _, _, _ in rows
    ]
    (folder / "contributions.csv").write_text("\n".join([lines[0], *map(",".join, moved)]) + "\n")
    record = json.loads((folder / "run.json").read_text())
    for what in ("samples", "class_counts"):
        known = record[what]
        record[what] = [known[next(c for c in place if place[c] == i)] for i in range(5)]
    hashes = {str(place[i]): record["hashes"][str(i)] for i in place}
    record["hashes"] = {"server": "feedfacefeedface", **hashes}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_one_clients_page_has_its_own_values_and_means(tmp_path: Path) -> None:
    mean = sum(made_value(i, 0, 4) for i in range(5)) / 5
    text = texts(run_with_everything(tmp_path), client="Oslo")
    own = ("Oslo", f"{made_value(OWN, 0, 4):.3f}", "121", "03" * 8, f"{mean:.2g}", "5 of 5")
    assert not [each for each in own if each not in text]
    # From the seed the others' parts of the data follow, settings name clients, and columns may be other clients.
    assert not [each for each in ("77123", "SignFlip", "feedface", *NAMES[:3]) if each in text]
    record = tmp_path / "run.json"
    record.write_text(record.read_text().replace('"per_class": true', '"per_class": false'))
    assert "Class by class" in text
    assert "Class by class" not in texts(tmp_path, client="Oslo")


def test_one_clients_page_does_not_depend_on_which_of_the_others_is_who(tmp_path: Path) -> None:
    """Whatever the others are called, and whoever of them has which value or samples: it is the same page,
    to the byte. So there is nothing on it but functions of all of them together."""
    first = html_of(run_with_everything(tmp_path / "a"), client=OWN)
    second = html_of(run_with_everything(tmp_path / "b", others=(2, 4, 0, 1)), client=OWN)
    assert first == second
    assert texts(tmp_path / "a") != texts(tmp_path / "b")


def test_a_killed_run(tmp_path: Path) -> None:
    assert "has not come to its end" in texts(make_run(tmp_path / "killed", ended=False, rounds=2))
    assert "0 rounds" in texts(make_run(tmp_path / "early", ended=False, rounds=0))


def test_never_drawn_is_a_dash_and_not_0(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    kept = [x for x in (folder / "contributions.csv").read_text().splitlines() if x.split(",")[2] != "1"]
    (folder / "contributions.csv").write_text("\n".join(kept) + "\n")
    text = texts(folder)
    assert f"| Lyon | {NONE} | {NONE} |" in text
    assert "1 clients were never drawn" in text


def test_who_copies_is_told_without_the_others_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path, clients=5)
    record = json.loads((folder / "run.json").read_text())
    events = [at_fault(1, 2, 2), at_fault(2, 1, 2), *copying(2, 3)]
    (folder / "run.json").write_text(json.dumps({**record, "events": events}))
    own = texts(folder, client="Graz")
    assert "In 1 of the 2 rounds" in own
    assert "Your updates and another participant's were found to be the same" in own
    assert not any(name in own for name in ("Lyon", "Oslo"))
