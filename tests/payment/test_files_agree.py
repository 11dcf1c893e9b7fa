"""Each value has one interval, on terminals, pages and in files; other intervals have other names."""

from pathlib import Path

import pandas
import pytest
import torch

from flsv.functional.joint_shares import CaseValues
from flsv.payment import Budget, write_report
from flsv.results import open_run, preferred_basis, read_run
from flsv.results.basis import seed_summary
from flsv.results.record import write_case_values
from flsv.results.terminal import print_contributions
from flsv.results.text import with_intervals
from helpers.pages import text_of_page
from helpers.retrained import add_retrained_runs, make_trained
from helpers.runs import add_intervals, make_game, make_repeated_runs

VALUES = [0.3, 0.2, 0.1]
NUM_SAMPLES = 100


def add_case_values(run: Path, metric: str):
    """Values that vary between validation samples about as much as between seeds."""
    generator = torch.Generator().manual_seed(0)
    deviations = torch.randn(
        len(VALUES),
        NUM_SAMPLES,
        dtype=torch.float64,
        generator=generator,
    )
    means = torch.tensor(VALUES, dtype=torch.float64)
    values = means[:, None] + 0.2 * deviations
    write_case_values(run, {metric: CaseValues(values)})


def make_one_run(folder: Path) -> Path:
    run = make_trained(make_game(folder, {"value": VALUES}))
    add_intervals(run, "value", 0.02)
    add_case_values(run, "value")
    return run


def make_retrained(folder: Path) -> Path:
    run = make_game(folder, {"sv": VALUES})
    add_retrained_runs(run, VALUES, majority=0.2)
    for seed_folder in (run / "retrained").glob("seed_*"):
        add_case_values(seed_folder, "value")
    return run


def make_repeat(folder: Path) -> Path:
    runs = make_repeated_runs(folder, VALUES, [0.31, 0.19, 0.12])
    for seed_folder in folder.glob("seed_*"):
        make_trained(seed_folder, stderr=[0.0] * len(VALUES))
        add_case_values(seed_folder, "sv")
    return runs


RUNS = {
    "one run": make_one_run,
    "repeat": make_repeat,
    "retrained": make_retrained,
}


@pytest.mark.parametrize("kind", RUNS)
def test_terminal_page_and_files_have_one_interval_for_each_value(kind, tmp_path, capsys):
    folder = RUNS[kind](tmp_path / "run")
    run = open_run(folder)
    basis = preferred_basis(run)
    assert basis is not None
    estimates = basis.estimates

    write_report(folder, budget=Budget(1000.0))
    print_contributions(run, where=[])
    summary = seed_summary(run if run.retrained is None else run.retrained)

    shares = pandas.read_csv(folder / "shares.csv")
    for name in ("low", "high"):
        assert shares[name].to_list() == pytest.approx(estimates[name], rel=1e-5)
        assert summary[name].to_list() == estimates[name].to_list()

    printed = capsys.readouterr().out
    page = text_of_page(folder / "report.html")
    for cell in with_intervals(estimates):
        assert cell in printed
    for cell in with_intervals(estimates, " to "):
        assert cell in page


@pytest.mark.parametrize("kind", ["one run", "repeat"])
def test_intervals_over_seeds_alone_are_narrower_and_say_so(kind, tmp_path):
    folder = RUNS[kind](tmp_path / "run")
    run = open_run(folder)
    basis = preferred_basis(run)
    assert basis is not None

    over_seeds = run.estimates(basis.key)

    assert (basis.estimates["low"] < over_seeds["low"]).all()
    assert (basis.estimates["high"] > over_seeds["high"]).all()
    columns = read_run(run.runs[0].folder).columns
    is_end = columns.str.contains("low|high")
    assert columns[is_end].to_list() == ["low_over_seeds", "high_over_seeds"]


def test_appendix_has_the_interval_that_the_fit_printed(tmp_path, capsys):
    """After flsv retrain the run's own values stand in the appendix."""
    folder = make_one_run(tmp_path / "run")
    run = open_run(folder)
    print_contributions(run, where=[])
    printed = capsys.readouterr().out
    basis = preferred_basis(run)
    assert basis is not None
    add_retrained_runs(folder, VALUES, majority=0.2)

    page = text_of_page(write_report(folder))

    _front, _, appendix = page.partition("\nAppendix\n")
    for cell in with_intervals(basis.estimates):
        assert cell in printed
    for cell in with_intervals(basis.estimates, " to "):
        assert cell in appendix
