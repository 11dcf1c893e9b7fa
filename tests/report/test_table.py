"""The last table: as wide as the terminal, never with a number cut, and after the progress bar."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from rich.console import Console
from toys import fit

from flsv.aggregation import ShapFedWA
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.report.run_table import Numbers, RunTable
from flsv.report.terminal import chosen, class_columns, client_columns, make_console, numbers, print_table


def printed(width: int, names: list[str], columns: dict[str, list[str]], **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, "Contributions", names, columns, **options)
    return console.file.getvalue()  # type: ignore[attr-defined]


def many_columns(clients: int) -> dict[str, list[str]]:
    draw = torch.Generator().manual_seed(0)
    metrics = ("cssv", "fedsv", "leave_one_out", "relevance")
    known = {name: torch.rand(clients, generator=draw) for name in (*metrics, "weight", "accuracy")}
    known |= dict.fromkeys(("samples", "rounds"), torch.arange(clients) + 100)
    names = [str(i) for i in range(clients)]
    table = RunTable.of_round(0, [Numbers(name, values) for name, values in known.items()], names)
    return client_columns(table, metrics, clients)


@pytest.mark.parametrize("width", [40, 60, 80, 200, 10_000])
def test_every_cell_is_whole_at_any_width(width: int) -> None:
    columns, names = many_columns(7), [f"Hospital {i}" for i in range(7)]
    text = printed(width, names, columns)
    assert max(map(len, text.splitlines())) <= width
    for header, cells in columns.items():
        assert header in text
        for cell in cells:
            assert re.search(rf"(?<![\d.]){re.escape(cell)}(?![\d.])", text), (header, cell)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    parts = text.count("client")
    assert parts == 1 if width >= 200 else parts > 1
    assert all(text.count(name) == parts for name in names)  # every part says whose rows they are


@pytest.mark.parametrize("width", [60, 80, 200])
def test_ten_classes_are_whole_too(width: int) -> None:
    values = torch.linspace(-1, 1, 50).reshape(5, 10)
    text = printed(width, list("01234"), class_columns(values))
    for cell in ("-1.00", "1.00", "-.63", ".14"):
        assert cell in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_of_many_clients_the_highest_and_the_lowest_ten() -> None:
    values = torch.arange(100.0).roll(13)
    values[40] = float("nan")
    rows, gap = chosen(values, 100)
    highest = values.nan_to_num(-1).argsort(descending=True)
    assert rows[:10] == highest[:10].tolist()
    assert rows[10:] == [i for i in values.nan_to_num(1e9).argsort().tolist() if values[i] == values[i]][:10][::-1]
    assert gap == 10
    text = printed(80, [str(i) for i in range(100)], {"sv": [f"v{i}" for i in range(100)]}, rows=rows, gap=gap)
    assert len(re.findall(r"v\d+", text)) == 20
    lines = [line for line in text.splitlines() if "\N{HORIZONTAL ELLIPSIS}" in line]
    assert len(lines) == 1
    assert chosen(values[:20], 20) == (list(range(20)), 20)
    assert chosen(None, 50)[0] == [*range(10), *range(40, 50)]


def test_small_values_are_not_all_0() -> None:
    assert numbers([0.00123, -0.00045]) == ["0.00123", "-0.00045"]


def test_what_rounds_to_0_has_no_sign() -> None:
    assert numbers([0.5, -0.0001, -0.0, -0.5]) == ["0.500", "0.000", "0.000", "-0.500"]
    assert class_columns([[-0.001, 0.25], [0.5, 0.5]]) == {"0": [".00", ".50"], "1": [".25", ".50"]}


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width > 1000
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console().width == 60


def loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, seed=1, **options)


@pytest.mark.parametrize("make_bar", [RichProgressBar, TQDMProgressBar])
def test_it_is_printed_when_the_bar_has_stopped(
    make_bar: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich erases what is printed under its live bar; the bar's teardown is what stops it."""
    events: list[str] = []

    class Bar(make_bar):  # type: ignore[misc]
        def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            super().teardown(trainer, pl_module, stage)
            if isinstance(self, RichProgressBar):
                assert not self.progress.live.is_started
            events.append("bar stopped")

    monkeypatch.setattr("flsv.report.reporter.Reporter.table", lambda *_: events.append("table"))
    bar = Bar()
    federation = loop()
    fit(federation, tmp_path, rounds=1, enable_progress_bar=True, callbacks=[bar])
    assert events == ["bar stopped", "table"]
    assert "teardown" not in vars(bar)
    fit(federation, tmp_path / "none", rounds=1)
    assert events == ["bar stopped", "table", "table"]


def test_nothing_is_printed_later_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fail(L.Callback):
        def on_train_end(self, *_: Any) -> None:
            raise ArithmeticError

    printed: list[str] = []
    monkeypatch.setattr("flsv.report.reporter.Reporter.table", lambda *_: printed.append("table"))
    bar = TQDMProgressBar()
    with pytest.raises(ArithmeticError):
        fit(loop(), tmp_path, rounds=1, enable_progress_bar=True, callbacks=[bar, Fail()])
    assert "teardown" not in vars(bar)
    assert not printed
