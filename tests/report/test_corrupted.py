"""Files that were damaged, cut short or made up: they are read as what they say, or one line says what is wrong."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import at_fault, copying, make_run

from flsv.csv_files import as_text
from flsv.errors import ConfigurationError
from flsv.games.retraining import COLUMNS, KeptUtility
from flsv.kept import Kept
from flsv.models.imbalance import OWN_SCORES
from flsv.report import Run, open_run
from flsv.report.for_all import page_for_all
from flsv.report.for_one import page_for_one
from flsv.report.html import to_html
from flsv.report.run_table import CSV, Numbers, csv_lines, rows_of
from flsv.report.shares import Budget, shares_of
from flsv.round.result import Row

NAMES = ("Málaga", "=1+1", "'-x")
ROUNDS = 3
SCORES = [f"{name}_{of}" for name in OWN_SCORES for of in ("alone", "received", "trained")]
NASTY = [
    "",
    "-1",
    "3",
    "nan",
    "inf",
    "1e999",
    "1e300",
    "-1e-320",
    "99999999999999999999",
    "1_0",
    "٣",
    '"',
    "'",
    "=1",
    "\0",
]


def valid(folder: Path) -> Path:
    """All that is read back of a run, its valuation and its retraining, small."""
    make_run(folder, clients=3, classes=2, rounds=ROUNDS, names=NAMES)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(
        json.dumps(
            {**record, "events": [*copying(1, 2), at_fault(1, 1, 2)]},
            ensure_ascii=False,
        )
    )
    (folder / "contributions.csv").unlink()
    file = CSV(folder / "contributions.csv", NAMES)
    file.begin(0)
    for r in range(ROUNDS):
        file.append(round_of(r, [[-0.25 * i for i in range(3)], [0.5 + r] * 3]))
    (folder / "gains.csv").write_text(
        f"client,client_name,tests,{','.join(SCORES)}\r\n"
        + "".join(f"{i},n,shared{',0.5,0.625,nan' * 3}\r\n" for i in range(3))
    )
    (folder / "retrained.csv").write_text(
        "client,client_name,by,value,low,high,share,kernel_shap,majority,seeds,rounds\n"
        + "".join(f"{i},n,accuracy,{0.1 + i},-0.5,3.5,0.25,0.5,nan,0 1,2\n" for i in range(3))
    )
    (folder / "valuation.csv").write_text(
        "client,samples,distance,client_name\n" + "".join(f"{i},{100 + i},{0.5 + i},x\n" for i in range(3))
    )
    (folder / "clients" / "=1+1").mkdir(parents=True)
    (folder / "clients" / "=1+1" / "flagged.csv").write_text("index,label,score,why\n7,Hund,0.5,far\n9,class 1,,far\n")
    return folder


FILES = ("contributions.csv", "gains.csv", "retrained.csv", "valuation.csv", "clients/=1+1/flagged.csv")


def round_of(r: int, ends: Any = None) -> list[Row]:
    overall = [0.5**r + 0.125 * i for i in range(3)]
    by_class = [[value, value - 0.25] for value in overall]
    classes = {"0": "class 0", "1": "class 1"}
    weights = [overall[0], overall[2]]
    numbers = [
        Numbers("cssv", overall, ends=ends),
        Numbers("cssv", by_class, classes),
        Numbers("weight", weights, clients=[0, 2]),
    ]
    return rows_of(r, numbers, NAMES)


def reported(run: Run) -> str:
    """Every page, as it is handed out."""
    shared = [shares for by in (None, "cssv") if (shares := outcome(lambda by=by: shares_of(run, Budget(10.0, by))))]
    shares = shared[0] if shared else None
    own = (to_html(page_for_one(run, i, shares)) for i in range(min(run.num_clients, 4)))
    return "".join([to_html(page_for_all(run, shares)), *own])


def outcome(read: Callable[[], Any]) -> Any:
    """What is read, or None where one line says what is wrong; nothing else comes of it."""
    try:
        return read()
    except ConfigurationError as error:
        said = str(error)
    assert len(said.splitlines()) == 1, said
    return None


@st.composite
def damages(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes that were changed, lost, doubled or put somewhere else; lines likewise; cells that are something else."""
    data = whole
    for _ in range(draw(st.integers(1, 3))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 12))
        lines = data.split(b"\n")
        here, there = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        kind = draw(st.sampled_from(["cut", "change", "lose", "double", "swap", "cell"]))
        if kind == "cut":
            data = data[:at]
        elif kind == "change":
            data = data[:at] + draw(st.binary(max_size=4)) + data[at + length :]
        elif kind == "lose":
            data = data[:at] + data[at + length :]
        elif kind == "double":
            data = b"\n".join([*lines[:here], lines[here], *lines[here:]])
        elif kind == "swap":
            lines[here], lines[there] = lines[there], lines[here]
            data = b"\n".join(lines)
        else:
            cells = lines[here].split(b",")
            cells[draw(st.integers(0, len(cells) - 1))] = draw(st.sampled_from(NASTY)).encode()
            data = b"\n".join([*lines[:here], b",".join(cells), *lines[here + 1 :]])
    return data


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_damaged_folder_is_read_as_it_stands_or_refused_in_one_line(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = valid(Path(place))
        for name in data.draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=2, unique=True)):
            (folder / name).write_bytes(data.draw(damages((folder / name).read_bytes())))
        run = outcome(lambda: open_run(folder, valuation=folder))
        if run is None:
            return
        text = (folder / "contributions.csv").read_bytes()
        rows = list(csv.DictReader(io.StringIO(text[: text.rfind(b"\n") + 1].decode(), newline="")))
        assert len(rows) == len(run.table)
        for row, found in zip(rows, run.table.itertuples(index=False, name=None)):
            index, metric, client, column, value = found[:5]
            assert [row["round"], row["metric"], row["client"], row["class"]] == [
                *map(str, (index, metric, client, column))
            ]
            assert float(row["value"]) == value
            assert client < len(run.record["clients"])
            assert index < run.record.get("rounds", ROUNDS)
            assert row["client_name"] == as_text(run.client_names[client])
        outcome(lambda: reported(run))


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_run_goes_on_with_a_damaged_file_or_refuses_it_in_one_line(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = valid(Path(place)) / "contributions.csv"
        whole = path.read_text().splitlines(keepends=True)
        damaged = data.draw(damages(path.read_bytes()))
        path.write_bytes(damaged)
        file = CSV(path, NAMES)
        if outcome(lambda: file.begin(2)) is None:
            assert path.read_bytes() == damaged
            return
        assert {line.split(",")[0] for line in path.read_text().splitlines()[1:]} <= {"0", "1"}
        file.append(round_of(2))
        assert [line for line in path.read_text().splitlines(keepends=True) if line.startswith("2,")] == [
            line.rsplit(",", 2)[0] + ",,\n" for line in whole if line.startswith("2,")
        ]


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_damaged_trainings_are_used_as_they_stand_or_refused_in_one_line(data: st.DataObject) -> None:
    masks = torch.tensor([[False, False, True], [True, True, False], [True, True, True]])
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "retrained_0.csv")
        KeptUtility(lambda masks: masks.sum(1) / 8, path, {"seed": 0})(masks)
        path.write_bytes(data.draw(damages(path.read_bytes())))
        values = outcome(lambda: KeptUtility(lambda masks: masks.sum(1) / 8, path, {"seed": 0})(masks))
        if values is not None:
            assert values.isfinite().all()
            kept = {row["coalition"]: row["utility"] for row in Kept(path, COLUMNS, {"seed": 0}).rows}
            assert values.tolist() == [kept[tuple(mask.nonzero().flatten().tolist())] for mask in masks]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contributions.csv", "retrained.csv"])
def test_wherever_a_file_was_cut_its_whole_lines_are_read(tmp_path: Path, name: str) -> None:
    folder = valid(tmp_path)
    run, whole = open_run(folder), (folder / name).read_bytes()
    head = whole.index(b"\n") + 1
    for end in range(head, len(whole)):
        (folder / name).write_bytes(whole[:end])
        count = whole[:end].count(b"\n") - 1
        found = open_run(folder)
        assert found.table.equals(run.table[: count if "contr" in name else None])
        if name == "retrained.csv":
            assert sum(map(bool, found.retrained())) == count


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("3,cssv,-1,,0.5,,,,", "client is '-1', expected a whole number"),
        ("2,cssv,3,,0.5,,,,", "client is 3, expected 0 to 2"),
        ("1000000000,cssv,1,,0.5,,,,", "round is 1000000000, expected 2 to 2"),
        ("1,cssv,1,,0.5,,,,", "round is 1, expected 2 to 2"),
        ("2,cssv,1,,0.5,'=1+1,,,", "cssv of client 1 in round 2 is there already"),
        ("2,cssv/stderr,1,,nan,,,,", "value is 'nan', expected a number"),
        ("2,cssv/stderr,1,,1e999,,,,", "value is '1e999', expected a number"),
        ("2,cssv/stderr,1,,0.5,Málaga,,,", "client 1 is called 'Málaga', expected '=1\\+1'"),
        ("2,cssv/stderr,1,,0.5", "5 cells, expected 9"),
        ('2,cssv/stderr,1,"",0.5,,,,"', "unexpected end of data; expected cells"),
        ("2,,1,,0.5,'=1+1,,,", "there is no metric"),
    ],
)
def test_what_no_run_writes_is_said_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = valid(tmp_path) / "contributions.csv"
    number = len(path.read_bytes().splitlines()) + 1
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ConfigurationError, match=rf"contributions.csv, line {number}: {words}"):
        open_run(tmp_path)


def test_a_byte_that_is_no_text_is_said_with_its_line_but_for_a_last_line_that_was_cut(tmp_path: Path) -> None:
    path = valid(tmp_path) / "contributions.csv"
    rows, whole = csv_lines(open_run(tmp_path).table.itertuples(index=False)), path.read_bytes()
    path.write_bytes(whole + b"2,weight,1,,0.5,=1\xc3")
    assert csv_lines(open_run(tmp_path).table.itertuples(index=False)) == rows
    path.write_bytes(whole.replace(b",weight,", b",w\xffight,", 1))
    with pytest.raises(ConfigurationError, match="line 11: .* expected text in UTF-8"):
        open_run(tmp_path)
