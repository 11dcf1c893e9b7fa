"""Page one: its sentences never contradict each other, its numbers are all in a file, and it is about one set of
values."""

import itertools
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from flsv.benchmark import federation, names, truth_table
from flsv.report import Budget, open_run, write_report
from flsv.report.basis import Basis, verdict
from flsv.report.certainty import DRAWN, EVERYBODY, misallocated, moved, moved_by_seeds
from flsv.results.text import shares_in
from flsv.utilities.csv_files import NAN
from helpers.pages import text_of
from helpers.runs import at_fault, make_game, make_run, repeated, retold

RETRAINED = "client,client_name,by,value,low,high,share,majority,seeds,rounds,trainings"
TABLE = Path(__file__).parents[2] / "docs" / "results" / "predicted.csv"
SEEDS = ("share without seed 0", "share without seed 1", "share without seed 2")


def test_values_are_called_suitable_only_if_nothing_speaks_against_payment(tmp_path: Path) -> None:
    run = open_run(make_game(tmp_path, {"sv": [0.4, 0.1]}))
    basis = Basis("sv", "sv", "", [0.4, 0.1], [NAN] * 2, [NAN] * 2, by="accuracy")
    records = ({}, {"of_rounds": "NVFlare"}, {"ended": None})
    flags = ("to_pay_by", "ranks_only", "trained", "judged")
    suitable = []
    for record, *known, majority, seeds in itertools.product(records, *[(False, True)] * 4, (NAN, 0.8), (1, 3)):
        told = {key: value for key, value in {**run.record, **record}.items() if value is not None}
        here = replace(basis, **dict(zip(flags, known)), majority=majority, seeds=seeds)
        if verdict(replace(run, record=told), here) in ("seeds", "judged"):
            suitable.append((record, *known, seeds))
    assert suitable == [({}, True, False, True, False, 3), ({}, True, False, True, True, 3)]
    retrained = replace(here, key="retrained", ranks_only=False, majority=NAN)
    assert verdict(replace(run, record=told), retrained) == "judged"  # the run itself may go on


def retrained(folder: Path, by: str = "accuracy", seeds: str = "0 1 2", majority: float = 0.2) -> Path:
    """Values by retraining that differ from the run's in their order."""
    values, shares = [0.1, 0.3, 0.05, 0.15], [1 / 6, 0.5, 1 / 12, 0.25]
    others = [[0.16, 0.17, 0.17], [0.52, 0.49, 0.49], [0.08, 0.09, 0.08], [0.24, 0.25, 0.26]]
    head, rows = [RETRAINED, "share by accuracy", "share by negative_loss", *SEEDS], []
    for i, (value, share) in enumerate(zip(values, shares)):
        loss = [0.25, 0.4, 0.1, 0.25][i]
        cells = [i, f"client {i}", by, value, value - 0.02, value + 0.02, share, majority, seeds, 3, "all", share, loss]
        rows.append(",".join(map(str, [*cells, *others[i]])))
    (folder / "retrained.csv").write_text(",".join(head) + "\n" + "\n".join(rows) + "\n")
    return folder


def kinds(folder: Path) -> dict[str, Path]:
    """A run, one with values by retraining, a regression, judged values, a run among repeated ones, a metric alone that
    is no basis for payment, and a run with faults."""
    values = {"sv": [0.4, 0.1, -0.05, 0.02], "loo": [0.1, 0.05, -0.01, 0.01]}
    logged = {"val_accuracy": 0.72, "val_balanced_accuracy": 0.7}
    told = {"logged": logged, "validation": {"rows": 1440, "of": "the test set"}}
    found = {
        "run": make_game(folder / "run", values, **told),
        "retrained": retrained(make_game(folder / "retrained", values, **told)),
        "regression": make_game(folder / "regression", {"sv": [0.8, 0.1, -0.5]}, start=-1.7, by="negative_loss"),
        "judged": retrained(make_game(folder / "judged", values), "clients' accuracy"),
        "repeated": repeated(folder / "repeated", [0.4, 0.3, 0.05], [0.2, 0.4, 0.05], [0.0, 0.5, 0.05]),
        "cssv": make_run(folder / "cssv"),
        "faults": make_game(folder / "faults", values, events=[at_fault(1, 1, 3)]),
        "shadow": make_game(folder / "shadow", {"sv": [0.4, 0.1, 0.05]}),
    }
    metric = json.loads((found["shadow"] / "run.json").read_text())["metrics"]["sv"]
    retold(found["shadow"], metrics={"sv": {**metric, "class": "ShadowShapley"}})
    return found


def budget_for(name: str) -> Budget:
    by = {"run": "sv", "faults": "sv", "cssv": "cssv"}.get(name)
    return Budget(12_345.67, by, currency="EUR", judged_by_partners=name == "judged")


@pytest.mark.parametrize("paid", [False, True])
def test_each_number_of_page_one_is_in_a_csv_file(paid: bool, tmp_path: Path) -> None:
    """Dates, seeds and what flsv's own trials gave (3 seeds, 8 %, 9 of 10, ...) are no numbers of the run."""
    for name, folder in kinds(tmp_path).items():
        page = write_report(folder, budget=budget_for(name) if paid else None)
        front = text_of(page).partition("\nAppendix\n")[0]
        front = re.sub(
            r"\d{4}-\d\d-\d\d|seeds? [\d, and]+|9 of 10|--seeds 3|up to \d+ clients|by \d+( to \d+)? %|12 %|85 %"
            r"|class \d",
            "",
            front,
        )
        front = re.sub(r"% \[([\d.]+) to ([\d.]+)\]", r"% \1 % \2 %", front)
        known = pandas.read_csv(folder / "report.csv")["number"].tolist()
        known += [12_345.67] if paid else []
        for token in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?: %)?", front):
            text = token.rstrip(" %").rstrip(",").replace(",", "")
            places, scale = len(text.partition(".")[2]), 100 if token.endswith("%") else 1
            near = 0.51 * 10**-places
            assert any(min(abs(scale * x - float(text)), abs(-scale * x - float(text))) <= near for x in known), (
                name,
                token,
            )


def test_run_that_trained_single_clients_only_ranks(tmp_path: Path) -> None:
    folder = kinds(tmp_path)["shadow"]
    for coalitions, said in ((["0", "1", "2"], "Suitable for a ranking, not for payment"), (["0", "0+1"], "one seed")):
        lines = [f"0,{each},1,0.5\n" for each in coalitions]
        (folder / "coalitions.csv").write_text("# {}\nseed,coalition,round,accuracy\n" + "".join(lines))
        front = " ".join(text_of(write_report(folder)).partition("\nAppendix\n")[0].split())
        assert said in front.replace("a single seed", "one seed")
        assert "Suitable as a basis" not in front


def test_first_page_after_retraining_shows_retrained_values_only(tmp_path: Path) -> None:
    folder = kinds(tmp_path)["retrained"]
    for budget in (None, Budget(1000.0)):
        page = write_report(folder, budget=budget)
        front, _, appendix = text_of(page).partition("\nAppendix\n")
        assert re.findall(r"^\| (\w+) \| 0\.\d+ \[", front, re.MULTILINE) == ["Lyon", "Oslo", "Boston", "Graz"]
        charts = re.findall("<desc>(.*?)</desc>", page.read_text().partition("<aside>")[0])
        assert charts == ["Lyon 0.300, Oslo 0.150, Boston 0.100, Graz 0.0500"]
        assert "By retraining, Lyon contributed most, Graz least." in front
        assert "this run" not in front
        assert "single seed" not in front
        assert "measured in the run itself, with a single seed" in appendix
    assert "Suitable as a basis for payment" in front
    assert "The values come from trainings after the run, and add up to what was gained in those." in front
    judged = text_of(write_report(kinds(tmp_path / "other")["judged"]))
    assert "The partners judged the models on cases of their own" in judged
    assert "Paid again with other seeds, about 29 of these 1,000 would go to other partners." in front
    assert "By loss instead of accuracy, 100 of these 1,000 would be paid to different partners." in front
    one = text_of(write_report(folder, client=1))
    assert "| retraining, measured by accuracy | 0.300 [0.280 to 0.320] |" in one.partition("\nAppendix\n")[0]


@pytest.mark.parametrize("values", [[0.08, 0.04, 0.01, 0.01], [0.4, 0.1, 0.05, 0.02]])
def test_small_gain_is_said_to_be_paid_out_less_exactly(values: list[float], tmp_path: Path) -> None:
    folder = make_game(tmp_path, {"sv": values})
    metric = json.loads((folder / "run.json").read_text())["metrics"]["sv"]
    retold(folder, metrics={"sv": {**metric, "class": "ShadowShapley"}})
    for client in (None, 1):
        said = "raised this score by less than 0.15. In trials with so small a gain" in text_of(
            write_report(folder, client)
        )
        assert said == (sum(values) < 0.15)


def test_a_validation_set_of_mostly_one_class_is_not_called_suitable(tmp_path: Path) -> None:
    folder = retrained(make_game(tmp_path, {"sv": [0.4, 0.1, 0.05, 0.02]}), majority=0.82)
    front = text_of(write_report(folder, budget=Budget(100.0))).partition("\nAppendix\n")[0]
    assert "Not suitable as a basis for payment: 82.0 % of the validation set is one class." in front


def test_estimated_shift_of_payments_between_seeds_is_that_of_the_benchmarks_seeds() -> None:
    """On the benchmark's trained coalitions: two seeds tell how far payments by two others differ from theirs."""
    told, real = [], []
    for name in names():
        values = truth_table(federation(name)).values
        if len(values) < 4 or values.isnan().any():
            continue
        shares = [shares_in(row) for row in values.tolist()]
        pairs = list(itertools.combinations(range(len(values)), 2))
        paid = {pair: shares_in(values[list(pair)].mean(0).tolist()) for pair in pairs}
        told.append(statistics.fmean(moved_by_seeds([shares[a], shares[b]]) for a, b in pairs))
        apart = [(a, b) for a, b in itertools.combinations(pairs, 2) if not {*a} & {*b}]
        real.append(statistics.fmean(moved(paid[a], paid[b]) for a, b in apart))
    assert len(told) > 20
    assert statistics.fmean(told) == pytest.approx(statistics.fmean(real), rel=0.1)
    assert statistics.correlation(told, real) > 0.95
    assert math.isnan(moved_by_seeds([[0.5, 0.5]]))


def test_trials_named_are_those_of_similar_federations() -> None:
    found = [misallocated(12, drawn=False, seeds=1), misallocated(30, drawn=False, seeds=3), misallocated(5, True, 1)]
    assert found == [
        (0.08, "with up to 16 clients, all of them in every round"),
        (0.06, "with up to 16 clients (here there are 30), all of them in every round"),
        (0.04, "with up to 7 clients, some of them drawn for each round"),
    ]


def test_reported_misallocation_is_that_of_the_held_out_federations() -> None:
    table = pandas.read_csv(TABLE)
    drawn, few = table["federation"].str.contains("_of_"), table["clients"] <= 7
    for trials, rows in ((EVERYBODY[0], ~drawn & few), (EVERYBODY[1], ~drawn & ~few), (DRAWN, drawn)):
        mean = table[rows].groupby("way")["misallocated_percent"].mean().round() / 100
        found = mean["alone, predicted"], mean["alone and all but one, predicted, 3 seeds"]
        assert found == (trials.one, trials.several)
