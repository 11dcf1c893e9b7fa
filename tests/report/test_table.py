"""The last table: as wide as the terminal, never with a number cut, and after the progress bar."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from toys import fit

from flsv.aggregation import ShapFedWA
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.report.run_table import Numbers, frame, rows_of
from flsv.report.terminal import chosen, client_columns, print_table


def printed(columns_wide: int, names: list[str], columns: dict[str, list[str]], **options: Any) -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(columns_wide))
        print_table("Contributions", names, columns, **options)
    return out.getvalue()


def many_columns(clients: int) -> dict[str, list[str]]:
    draw = torch.Generator().manual_seed(0)
    metrics = ("cssv", "fedsv", "leave_one_out", "relevance")
    known = {name: torch.rand(clients, generator=draw) for name in (*metrics, "weight", "accuracy")}
    known |= dict.fromkeys(("samples", "rounds"), torch.arange(clients) + 100)
    names = [str(i) for i in range(clients)]
    table = frame(rows_of(0, [Numbers(name, values) for name, values in known.items()], names))
    return client_columns(table, metrics, clients)


@pytest.mark.parametrize("wide", [40, 60, 80, 200, 10_000])
def test_every_cell_is_whole_at_any_width(wide: int) -> None:
    columns, names = many_columns(7), [f"Hospital {i}" for i in range(7)]
    text = printed(wide, names, columns)
    assert max(map(len, text.splitlines())) <= wide
    for header, cells in columns.items():
        assert header in text
        for cell in cells:
            assert re.search(rf"(?<![\d.]){re.escape(cell)}(?![\d.])", text), (header, cell)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    parts = text.count("client")
    assert parts == 1 if wide >= 200 else parts > 1
    assert all(text.count(name) == parts for name in names)  # every part says whose rows they are


def test_of_many_clients_the_highest_and_the_lowest_ten() -> None:
    values = torch.arange(100.0).roll(13)
    values[40] = float("nan")
    rows = chosen(values, 100)
    highest = values.nan_to_num(-1).argsort(descending=True)
    assert rows[:10] == highest[:10].tolist()
    assert rows[10:] == [i for i in values.nan_to_num(1e9).argsort().tolist() if values[i] == values[i]][:10][::-1]
    text = printed(80, [str(i) for i in range(100)], {"sv": [f"v{i}" for i in range(100)]}, rows=rows)
    assert len(re.findall(r"v\d+", text)) == 20
    lines = [line for line in text.splitlines() if "\N{HORIZONTAL ELLIPSIS}" in line]
    assert len(lines) == 1
    assert chosen(values[:20], 20) == list(range(20))
    assert chosen(None, 50) == [*range(10), *range(40, 50)]


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

    monkeypatch.setattr("flsv.report.progress.print_contributions", lambda *_: events.append("table"))
    bar = Bar()
    federation = loop()
    fit(federation, tmp_path, rounds=1, enable_progress_bar=True, callbacks=[bar])
    assert events == ["bar stopped", "table"]
    assert "teardown" not in vars(bar)
    fit(federation, tmp_path / "none", rounds=1)
    assert events == ["bar stopped", "table", "table"]
