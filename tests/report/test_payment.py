"""A budget is shared out to the last cent, on terms that are kept, and what speaks against it is said."""

from __future__ import annotations

import csv
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_game

from flsv import allocate
from flsv.cli import main
from flsv.errors import ConfigurationError
from flsv.report import Terms, open_run, pay, write_report
from flsv.report.payment import payment_by
from flsv.report.repeated import repeated_runs
from flsv.report.verdict import Basis, bases, chosen, contradictions, order_in_words

NAN = float("nan")


def basis(values: list[float], half: float = NAN, **given: Any) -> Basis:
    ends = [[value + sign * half for value in values] for sign in (-1, 1)]
    return Basis(**{"key": "sv", "source": "repeat", "title": "sv", **given}, values=values, low=ends[0], high=ends[1])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("rule", ["zero", "shift", "softmax"])
def test_the_command_shares_out_to_the_cent(tmp_path: Path, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_game(tmp_path, {"sv": [0.4, 0.1, 0.033333, -0.2]})
    assert main(["pay", str(folder), "--budget", "1,000.01", "--rule", rule, "--currency", "EUR"]) == 0
    found = rows(folder / "payment.csv")
    assert sum(Decimal(row["amount"]) for row in found) == Decimal("1000.01")
    expected = allocate(open_run_values(folder), 1000.01, rule, unit=0.01).tolist()  # type: ignore[arg-type]
    assert [float(row["amount"]) for row in found] == expected
    said = capsys.readouterr().out
    assert "1,000.01 EUR, by sv" in said
    assert "nothing tells how far these values swing" in said
    for text in (path.read_text() for path in write_report(folder)):  # the terms are kept
        assert f"{expected[0]:,.2f} EUR" in text
    text = write_report(folder, terms=Terms(50.0, rule), out=folder / "other.md")[0].read_text()  # type: ignore[arg-type]
    assert "1,000.01" not in text
    assert json.loads((folder / "run.json").read_text())["payment"]["budget"] == 1000.01


def open_run_values(folder: Path) -> Any:
    import torch

    return torch.tensor(open_run(folder).final("sv"), dtype=torch.float64)


def test_an_interval_is_what_the_own_value_alone_would_change() -> None:
    found = payment_by(basis([3.0, 1.0], 1.0), Terms(100.0))
    assert found.shares == [0.75, 0.25]
    assert found.low == pytest.approx([2 / 3, 0.0])
    assert found.high == pytest.approx([4 / 5, 2 / 5])
    assert found.amounts == [75, 25]
    alone = payment_by(basis([1.0, -1.0], 2.0), Terms())
    assert alone.low == [0.0, 0.0]  # at its low end nobody is above 0
    assert payment_by(basis([1.0, 1.0]), Terms()).low[0] != 0.0  # nothing is known


def test_who_pays_by_what() -> None:
    found = [basis([1.0, 2.0], source="run", title="one"), basis([2.0, 1.0], title="five")]
    assert chosen(found) is found[1]  # the mean of several runs speaks for a metric
    retrained = basis([1.0, 1.0], key="retrained", source="retrained")
    assert chosen([*found, retrained]) is retrained
    assert chosen([*found, retrained], "sv") is found[1]
    assert chosen([]) is None
    with pytest.raises(ConfigurationError, match=r"by='sw': expected one of sv, retrained"):
        chosen([*found, retrained], "sw")
    with pytest.raises(ConfigurationError, match="after flsv retrain RUN"):
        chosen(found, "retrained")


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    folder = make_game(tmp_path, {"sv": [-0.4, -0.1, -0.2]})
    with pytest.raises(ConfigurationError, match="no client has a claim"):
        pay(folder, Terms(10.0))
    assert not (folder / "payment.csv").exists()
    assert "Nobody can be given a share" in write_report(folder)[1].read_text()
    with pytest.raises(ConfigurationError, match="say the budget"):
        pay(folder, Terms())
    with pytest.raises(ConfigurationError, match="no multiple"):
        Terms(10.005)
    with pytest.raises(ConfigurationError, match="rule"):
        Terms(10.0, "zeros")  # type: ignore[arg-type]


def test_whether_an_order_is_established(tmp_path: Path) -> None:
    run = open_run(make_game(tmp_path, {"sv": [0.4, 0.1, 0.05, -0.2]}))
    values = run.final("sv")
    assert order_in_words(run, basis(values, 0.01)) == "The order is established: Boston, Lyon, Graz, Oslo."
    said = order_in_words(run, basis(values, 0.03))
    assert said == "The order is established in part: Boston, then Lyon and Graz in no certain order, then Oslo."
    assert order_in_words(run, basis(values, 9.0)).startswith("The order is not established")
    assert "One run does not establish an order" in order_in_words(run, basis(values, 0.01, source="run"))
    assert "nothing tells how far these values swing" in order_in_words(run, basis(values))
    assert "no order" in order_in_words(run, basis([0.4, NAN, NAN, NAN], 0.1))


def test_contradictions(tmp_path: Path) -> None:
    """Of -0.315 for certain beside a share of 24.9 % it is said; not of what may be either."""
    run = open_run(make_game(tmp_path, {"sv": [0.4, 0.1, 0.05, -0.2]}))
    first = basis([0.5, 0.3, 0.2, -0.315], 0.01, title="value")
    other = basis([0.4, 0.26, 0.09, 0.249], 0.01, key="retrained", source="retrained", title="retraining")
    said = contradictions(run, [first, other])
    assert said == ["By value the model would be better without Oslo, which has 24.9 % by retraining."]
    assert not contradictions(run, [basis([0.5, 0.3, 0.2, -0.315], 0.4, title="value"), other])
    opposite = basis([0.1, 0.2, 0.3, 0.4], 0.01, key="b", title="b")
    assert "rather the opposite of each other" in contradictions(run, [first, opposite])[0]
    # One run's values are not held against their own mean.
    assert not contradictions(run, [basis([0.1, 0.2, 0.3, -0.4], 0.01), basis([0.4, 0.3, 0.2, 0.1], 0.01)])


def test_metrics_that_are_no_ground_for_a_payment(tmp_path: Path) -> None:
    folder = make_game(tmp_path, {"cost": [1.0, 2.0, 3.0], "sv": [0.4, 0.1, 0.2]})
    record = json.loads((folder / "run.json").read_text())
    record["metrics"]["cost"]["higher_is_better"] = False
    (folder / "run.json").write_text(json.dumps(record))
    assert [each.key for each in bases(open_run(folder))] == ["sv"]


def test_arguments_are_checked_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_game(tmp_path, {"sv": [0.4, 0.1]})
    for wrong, said in (
        (["pay", str(folder)], "--budget 10000"),
        (["pay", str(folder), "--budget", "much"], "expected a number above 0"),
        (["pay", str(folder), "--budget", "1", "--rule", "half"], "invalid choice"),
        (["pay", str(tmp_path / "none"), "--budget", "1"], "there is no folder"),
        (["report", str(folder), "--repeated", "nowhere"], "there is no folder"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert said in capsys.readouterr().err


def test_runs_with_other_seeds_are_set_beside_and_compared_seed_by_seed(tmp_path: Path) -> None:
    out = tmp_path / "repeat"
    for seed in range(5):
        luck = 0.1 * seed  # of all alike: means swing, differences do not
        make_game(out / f"seed_{seed}" / "run", {"sv": [0.3 + luck, 0.2 + luck, 0.19 + luck + 0.1 * (seed % 2)]})
    (out / "repeat.json").write_text("{}")
    run = open_run(out / "seed_1" / "run")
    found = bases(run, repeated_runs(run))
    assert [(each.key, each.source) for each in found] == [("sv", "run"), ("sv", "repeat")]
    assert found[1].values == pytest.approx([0.5, 0.4, 0.43])
    # The intervals meet, but seed by seed the first is above both others.
    assert found[1].low[0] < found[1].high[1]
    said = "The order is established in part: Boston, then Graz and Lyon in no certain order."
    assert order_in_words(run, found[1]) == said
    alone = open_run(make_game(tmp_path / "alone", {"sv": [0.3, 0.2, 0.1]}))
    assert repeated_runs(alone) == []
    assert len(repeated_runs(alone, out)) == 5
    other = open_run(make_game(tmp_path / "other", {"sv": [0.3, 0.2, 0.1]}, hashes={"server": "x"}))
    with pytest.raises(ConfigurationError, match="it has other hashes"):
        repeated_runs(other, out)
    with pytest.raises(ConfigurationError, match="0 runs of flsv repeat"):
        repeated_runs(alone, tmp_path / "alone")
