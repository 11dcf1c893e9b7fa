"""What people who fit from Python see: how a run ended, no warnings every round, and objects as small tables."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from toys import Plain, fit, network, toy_data

from flsv import read_run
from flsv.cli.entry import main
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CumulativeShapley


def test_a_fit_from_python_ends_as_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
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
    assert "cosine" in loop.metrics["cssv"]._repr_html_()


def test_before_a_fit_there_is_something_to_show_too() -> None:
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()})
    with pytest.raises(ConfigurationError, match="has written no contributions"):
        loop.history()
    assert "0 rounds" in ClassSpecificShapley(3, 2)._repr_html_()


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
