"""What a terminal shows: round and client on the trainer's bar; and the last table after the bar, as wide as the
terminal, never with a number cut.
"""

import re
from pathlib import Path

import pandas
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from pandas import Series

from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CumulativeShapley, ShadowShapley
from flsv.results.reading import open_run
from flsv.results.terminal import print_contributions, print_table, shown_clients
from flsv.results.text import MESSAGES
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain, network
from helpers.pages import words_in
from helpers.retrained import make_trained
from helpers.runs import add_intervals, make_game


class ModuleWithAccuracyOnTheBar(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val_acc", torch.tensor(0.5), prog_bar=True)


class RecordBar(Callback):
    """Records what the progress bar shows after each batch."""

    def __init__(self):
        self.shown = []

    def on_train_batch_end(self, trainer, module, *args):
        self.shown.append(trainer.progress_bar_callback.get_metrics(trainer, module))


def fit_with_bar(folder, metric, *callbacks):
    loop = FederatedLoop(metrics={"values": metric}, seed=1)
    fit(
        loop,
        folder,
        ModuleWithAccuracyOnTheBar(),
        toy_data(server_val=0.3),
        rounds=2,
        enable_progress_bar=True,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("make_bar", [RichProgressBar, TQDMProgressBar])
def test_progress_bar_shows_round_client_and_validation(make_bar, tmp_path):
    bar = make_bar()
    record = RecordBar()
    fit_with_bar(tmp_path, ClassSpecificShapley(), bar, record)

    shown = pandas.DataFrame(record.shown)
    assert shown["client"].unique().tolist() == ["1/3", "2/3", "3/3"]
    assert shown["round"].is_monotonic_increasing
    assert shown["round"].unique().tolist() == ["1/2", "2/2"]
    assert shown["val_acc"].tolist()[-1] == 0.5
    assert not {"teardown", "get_metrics"} & vars(bar).keys()


@pytest.fixture
def events(monkeypatch):
    """What happens at the end of a run: "bar stopped" and "table"."""
    events = []
    monkeypatch.setattr(
        "flsv.results.terminal.print_contributions", lambda *_: events.append("table")
    )
    return events


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("metric", [ClassSpecificShapley(), ShadowShapley()])
@pytest.mark.parametrize("make_bar", [RichProgressBar, TQDMProgressBar])
def test_table_is_printed_after_the_progress_bar_has_stopped(make_bar, metric, tmp_path, events):
    """Rich erases what is printed below its running bar."""

    class BarThatRecordsItsStop(make_bar):
        def teardown(self, trainer, pl_module, stage):
            super().teardown(trainer, pl_module, stage)
            events.append("bar stopped")

    fit_with_bar(tmp_path, metric, BarThatRecordsItsStop())

    assert events == ["bar stopped", "table"]


def test_table_is_printed_without_a_progress_bar(tmp_path, events):
    fit(FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1), tmp_path, rounds=1)
    assert events == ["table"]


class ModuleThatLogsScoresAndRates(Plain):
    def validation_step(self, batch, batch_idx):
        self.log_dict({"val/f1": torch.tensor(0.5), "lr": torch.tensor(0.1), "lr-SGD": 0.1})


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("metrics", "expected_columns", "num_tables_by_class"),
    [
        (
            {"sv": CumulativeShapley(), "nearest_to_retraining": ShadowShapley()},
            ["client", "samples", "nearest_to_retraining", "share"],
            0,
        ),
        (
            {"cssv": ClassSpecificShapley(), "sv": CumulativeShapley()},
            ["client", "samples", "sv", "share"],
            0,
        ),
        ({"cssv": ClassSpecificShapley()}, ["client", "samples", "cssv"], 1),
    ],
)
def test_final_table_has_the_documented_columns_and_logged_scores(
    metrics, expected_columns, num_tables_by_class, tmp_path, capsys
):
    module = ModuleThatLogsScoresAndRates(network(batch_norm=False))
    loop = FederatedLoop(metrics=metrics, seed=1)
    fit(loop, tmp_path, module, toy_data(server_val=0.3), rounds=1)

    _, table = capsys.readouterr().out.split("Contributions", maxsplit=1)
    lines = table.splitlines()
    assert lines[1].split() == expected_columns
    assert table.count("cssv by class") == num_tables_by_class
    assert "Model:   val/f1 0.5" in lines


def test_table_of_many_clients_shows_the_highest_and_lowest_ten():
    values = Series(range(100), dtype=float)
    values[40] = float("nan")

    ten_highest = list(range(99, 89, -1))
    ten_lowest = list(range(9, -1, -1))
    assert shown_clients(values, 100) == ten_highest + ten_lowest


def test_table_prints_the_cells_of_shown_clients_only(capsys):
    names = [str(client) for client in range(100)]
    cells = [f"v{client}" for client in range(100)]
    print_table("Contributions", names, {"sv": cells}, [5, 50])

    assert re.findall(r"v\d+", capsys.readouterr().out) == ["v5", "v50"]


def test_table_of_few_clients_shows_all():
    values = Series(range(20), dtype=float)
    assert shown_clients(values, 20) == list(range(20))


def test_table_of_many_clients_without_values_shows_the_first_and_last_ten():
    assert shown_clients(None, 50) == [*range(10), *range(40, 50)]


VALUES = [0.193, 0.204, 0.126, 0.112, 0.191]


def print_of_run(folder: Path, capsys) -> str:
    """What a terminal of 100 columns shows of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        print_contributions(open_run(folder), [])
    return capsys.readouterr().out


def test_table_has_values_and_shares_and_says_for_what_intervals_are(tmp_path, capsys):
    folder = make_trained(make_game(tmp_path, {"value": VALUES}))

    without_intervals = print_of_run(folder, capsys)
    with_intervals = print_of_run(add_intervals(folder, "value", 0.04), capsys)

    columns = without_intervals.splitlines()[1].split()
    assert columns == ["client", "samples", "value", "share"]
    assert MESSAGES["intervals"]["none"] in words_in(without_intervals)
    assert MESSAGES["intervals"]["seeds"] in words_in(with_intervals)
    assert max(map(len, with_intervals.splitlines())) <= 100


def test_values_that_are_mostly_chance_are_printed_without_shares(tmp_path, capsys):
    folder = make_trained(make_game(tmp_path, {"value": VALUES}))

    printed = print_of_run(add_intervals(folder, "value", 1), capsys)

    columns = printed.splitlines()[1].split()
    assert columns == ["client", "samples", "value"]
    assert "Do not pay by these values: All data together did not" in words_in(printed)
