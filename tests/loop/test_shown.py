"""What people who fit from Python see: how a run ended, no warnings every round, and objects as small tables."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from toys import Plain, fit, network, toy_data

from flsv import read_run
from flsv.cli.entry import main
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CumulativeShapley
from flsv.report import open_run
from flsv.report.facts import caveats_of
from flsv.round.result import RoundResult, RunResult, Sink


def test_a_fit_from_python_ends_as_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    with pytest.raises(ConfigurationError, match="has written no contributions"):
        loop.history()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, tmp_path, Plain(network(batch_norm=False)), toy_data(), rounds=3)
    said = capsys.readouterr().out
    assert "Results: " in said
    assert "Report:  flsv report " in said
    texts = [str(each.message) for each in caught]
    assert not [text for text in texts if "LeafSpec" in text or "smaller than the logging interval" in text]
    history = loop.history()
    assert sorted(history["round"].unique()) == [0, 1, 2]
    assert history.equals(read_run(loop.saver.csv))
    assert set(loop.to_frame()["round"]) == {2}


def test_the_end_of_a_fit_says_who_contributed_what_and_what_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--config", "quick start", "-q", "--ckpt_path", "last", "--trainer.max_epochs=2"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/flsv", "fit", *given])
    metrics = {"sv": CumulativeShapley(), "cssv": ClassSpecificShapley()}
    loop = FederatedLoop(metrics=metrics, seed=1)
    fit(loop, tmp_path / "run", Plain(network(batch_norm=False)), toy_data(server_val=0.3), rounds=3)
    said = capsys.readouterr().out
    values = loop.contributions["sv"]
    shares = values.clamp_min(0) / values.clamp_min(0).sum()
    assert [float(share) for share in re.findall(r"([\d.]+) %", said)[1:4]] == pytest.approx(100 * shares, abs=0.051)
    assert said.count("share") == 1  # none by cssv, which says not to pay by it
    most, least = int(values.argmax()), int(values.argmin())
    assert f"By sv, client {most} contributed most, client {least} least." in said or "nobody can be told apart" in said
    assert re.search(r"Accuracy on the validation set (rose|fell) from [\d.]+ % to [\d.]+ %, the values of sv", said)
    assert "other seeds may differ more (flsv repeat)" in said
    lines = [line for line in said.splitlines() if "flsv re" in line][-3:]
    folder = tmp_path / "run"
    assert lines[0] == f"Report:  flsv report {folder}"
    again = "Repeat:  flsv repeat 5 --config 'quick start' --trainer.max_epochs=2  # this was one seed"
    assert lines[1].startswith(again)
    assert lines[2].startswith(f"Retrain: flsv retrain {folder}")


def test_without_a_metric_no_contributions_are_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(FederatedLoop(seed=1), tmp_path, rounds=1)
    said = capsys.readouterr().out
    assert "Contributions" not in said
    assert "No contribution was measured" in said


def test_a_fit_of_nothing_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "-q"]) == 2
    assert "--config quickstart" in capsys.readouterr().err


def test_that_nobody_is_told_apart_is_in_the_closing_lines_the_record_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = CumulativeShapley(performance="accuracy", estimator="permutation", estimator_args={"budget": 30})
    fit(FederatedLoop(metrics={"sv": metric}, seed=1), tmp_path, data=toy_data((4,) * 8, server_val=0.2), rounds=2)
    told = json.loads((tmp_path / "run.json").read_text())["undecided"]["sv"]
    assert told["needed"] >= told["evaluations"] == int(metric.evaluations)  # type: ignore[arg-type]
    line = f"sv: no pair of clients can be told apart at this budget ({told['evaluations']:,} evaluations); about "
    assert line in capsys.readouterr().out
    assert any(text.startswith(line) and text.endswith(".") for text in caveats_of(open_run(tmp_path)))


class Remembers(Sink, L.Callback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (loop,) = [each for each in trainer.callbacks if isinstance(each, FederatedLoop)]  # type: ignore[attr-defined]
        loop._fit.reports.sinks.append(self)  # type: ignore[union-attr]

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
