"""What a terminal shows: round and client on the trainer's bar, whichever it is; and the last table after the bar, as
wide as the terminal, never with a number cut."""

import re
from pathlib import Path

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


class Shows(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val_acc", torch.tensor(0.5), prog_bar=True)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "metric", [ClassSpecificShapley(), ShadowShapley(excluded_callbacks=["Look"])]
)
@pytest.mark.parametrize("make_bar", [RichProgressBar, TQDMProgressBar])
def test_the_bar_shows_round_client_and_validation_and_the_table_comes_after_it(
    make_bar, metric, tmp_path, monkeypatch
):
    """Rich erases what is printed under its live bar; the bar's teardown is what stops it."""
    shown = []
    events = []

    class Bar(make_bar):
        def teardown(self, trainer, pl_module, stage):
            super().teardown(trainer, pl_module, stage)
            if isinstance(self, RichProgressBar):
                assert not self.progress.live.is_started
            events.append("bar stopped")

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, module))

    monkeypatch.setattr(
        "flsv.results.terminal.print_contributions", lambda *_: events.append("table")
    )
    bar = Bar()
    loop = FederatedLoop(metrics={"values": metric}, seed=1)
    data = toy_data(server_val=0.3)
    callbacks = [bar, Look()]
    fit(
        loop,
        tmp_path,
        Shows(),
        data,
        rounds=2,
        enable_progress_bar=True,
        callbacks=callbacks,
    )

    assert events == ["bar stopped", "table"]
    assert not {"teardown", "get_metrics"} & vars(bar).keys()

    clients = [row["client"] for row in shown]
    different_clients = list(dict.fromkeys(clients))
    assert different_clients == ["1/3", "2/3", "3/3"]

    rounds = [row["round"] for row in shown]
    half = (len(shown) + 1) // 2
    in_round_one = ["1/2"] * half
    in_round_two = ["2/2"] * (len(shown) - half)
    assert rounds == in_round_one + in_round_two
    assert shown[-1]["val_acc"] == 0.5

    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    fit(loop, tmp_path / "none", rounds=1)  # without a bar
    assert events == ["bar stopped", "table", "table"]


class LogsByGroup(Plain):
    def validation_step(self, batch, batch_idx):
        f1 = torch.tensor(0.5)
        learning_rate = torch.tensor(0.1)
        self.log_dict({"val/f1": f1, "lr": learning_rate})
        self.log("lr-SGD", 0.1)  # as a LearningRateMonitor


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("metrics", "head"),
    [
        # The nearest to retraining.
        ({"sv": CumulativeShapley(), "value": ShadowShapley()}, "client samples value share"),
        ({"cssv": ClassSpecificShapley(), "sv": CumulativeShapley()}, "client samples sv share"),
        ({"cssv": ClassSpecificShapley()}, "client samples cssv"),
    ],
)
def test_final_table_has_the_documented_columns(metrics, head, tmp_path, capsys):
    module = LogsByGroup(network(batch_norm=False))
    loop = FederatedLoop(metrics=metrics, seed=1)
    data = toy_data(server_val=0.3)
    fit(loop, tmp_path, module, data, rounds=1)
    text = capsys.readouterr().out
    table = text[text.index("Contributions") :]

    lines = table.splitlines()
    assert lines[1].split() == head.split()
    has_only_cssv = list(metrics) == ["cssv"]
    assert ("cssv by class" in table) == has_only_cssv
    # And no contribution, of whenever it is, nor a learning rate.
    assert "Model:   val/f1 0.5" in lines


def test_table_of_many_clients_shows_the_highest_and_lowest_ten(capsys):
    values = torch.arange(100.0).roll(13)
    values[40] = float("nan")

    clients = shown_clients(Series(values.tolist()), 100)

    order = values.nan_to_num(-1).argsort(descending=True)
    clients_with_value = order.tolist()[:99]
    assert clients == clients_with_value[:10] + clients_with_value[-10:]

    names = [str(client) for client in range(100)]
    cells = [f"v{client}" for client in range(100)]
    print_table("Contributions", names, {"sv": cells}, clients)
    printed_cells = re.findall(r"v\d+", capsys.readouterr().out)
    assert len(printed_cells) == 20


def test_tables_of_few_clients_and_of_many_without_values():
    values = Series(range(20), dtype=float)
    assert shown_clients(values, 20) == list(range(20))

    ten_at_each_end = [*range(10), *range(40, 50)]
    assert shown_clients(None, 50) == ten_at_each_end


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
