"""Counts while coalitions are evaluated: on the trainer's bar, and on ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from toys import Plain, fit, network, toy_data

from flsv import Reporting, counting
from flsv.loop import FederatedLoop
from flsv.metrics import CumulativeShapley, PartialFederatedShapley
from flsv.report import progress


class Told:
    """Remembers."""

    def __init__(self) -> None:
        self.counts: list[tuple[str, int, int]] = []
        self.hidden = 0

    def show(self, what: str, done: int, total: int) -> None:
        self.counts.append((what, done, total))

    def hide(self) -> None:
        self.hidden += 1


@pytest.fixture
def told() -> Any:
    listener = Told()
    counting.attach(listener)
    yield listener
    counting.detach(listener)


def federation(**options: Any) -> FederatedLoop:
    return FederatedLoop(metrics={"sv": CumulativeShapley(**options)}, seed=1, reporting=Reporting(table=False))


def run(loop: FederatedLoop, folder: Path, clients: int, **options: Any) -> None:
    data = toy_data((1,) * clients, server_val=0.3, batch_size=4, client_test=0)
    fit(loop, folder, Plain(network(batch_norm=False)), data, rounds=1, **options)


def test_every_coalition_is_counted_once(tmp_path: Path, told: Told) -> None:
    run(federation(), tmp_path, 4)
    assert told.counts[0] == ("coalitions", 0, 16)
    assert [done for _, done, _ in told.counts] == list(range(17))
    assert told.hidden == 1


def test_an_error_takes_the_line_away(tmp_path: Path, told: Told) -> None:
    class Wrong(PartialFederatedShapley):
        def update(self, client_ids: Any, utility: Any, generator: Any = None) -> None:
            counting.more("coalitions", 5)
            raise ArithmeticError

    with pytest.raises(ArithmeticError), pytest.warns(UserWarning, match="discarded"):
        run(FederatedLoop(metrics={"sv": Wrong()}, seed=1), tmp_path, 3)
    assert told.hidden == 1


@pytest.mark.parametrize("make_bar", [RichProgressBar, TQDMProgressBar])
def test_trainers_bars_show_it_and_let_go(make_bar: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    drawn: list[str | None] = []
    before = progress.Terminal._draw

    def draw(self: progress.Terminal) -> None:
        before(self)
        drawn.append(self._bar.get_metrics(self._trainer, self._trainer.lightning_module).get("coalitions"))  # type: ignore[union-attr]

    monkeypatch.setattr(progress.Terminal, "_draw", draw)
    run(federation(), tmp_path, 3, enable_progress_bar=True, callbacks=[make_bar()])
    assert drawn == [*(f"{done}/8" for done in range(9)), None]
    assert not counting._listeners
