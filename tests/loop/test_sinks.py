"""Everything that is shown or written is a sink: it gets each round's result, the run's, and is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from toys import fit

from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.round.result import RoundResult, RunResult, Sink


class Remembers(Sink, L.Callback):
    def __init__(self, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (loop,) = [each for each in trainer.callbacks if isinstance(each, FederatedLoop)]  # type: ignore[attr-defined]
        loop._fit.reports.sinks.append(self)  # type: ignore[union-attr]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.fails:
            raise ArithmeticError

    def write(self, result: RoundResult) -> None:
        clients = {row.client for row in result.table if row.metric == "cssv" and not row.column}
        self.calls.append((result.round_index, result.last, clients, result.events))

    def finish(self, result: RunResult) -> None:
        self.calls.append((result.rounds, result.columns, set(result.table["metric"])))

    def close(self, failed: bool = False) -> None:
        self.calls.append(failed)


def test_a_sink_gets_every_result_and_is_closed(tmp_path: Path) -> None:
    sink = Remembers()
    fit(FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1), tmp_path, rounds=2, callbacks=[sink])
    first, last, end, closed = sink.calls
    assert (first, last) == ((0, False, {0, 1, 2}, []), (1, True, {0, 1, 2}, []))
    assert (end[:2], closed) == ((2, {"cssv": "class"}), False)
    assert {"cssv", "samples", "rounds", "weight"} <= end[2]
