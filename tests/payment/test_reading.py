"""A run's folder: its record from the first round on, and what is read after the fact, whole, cut short, or none."""

import json
import os
from pathlib import Path

import lightning as L
import pytest

import flsv
from flsv.aggregation import ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost
from flsv.results import open_run
from flsv.results.basis import basis_of, seed_summary
from flsv.results.record import write_record
from flsv.results.run_table import read_contributions
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit
from helpers.retrained import add_retrained_runs
from helpers.runs import (
    change_record,
    make_game,
    make_repeated_runs,
    make_run,
    value_of_cell,
    write_rows,
)


def test_open_run_reads_values_and_names(tmp_path):
    folder = make_run(tmp_path, clients=3, classes=2, rounds=4)

    run = open_run(folder)

    last_values = [value_of_cell(client, 0, 3) for client in range(3)]
    assert run.num_clients == 3
    assert run.rounds == 4
    assert run.metrics == ("cssv",)
    assert run.ended
    assert run.final("cssv") == last_values
    assert run.columns("cssv") == {"0": "class 0", "1": "class 1"}
    assert run.taken_part() == [4, 4, 4]


@pytest.mark.parametrize(
    ("planned", "text"), [(1, "1 of 1 rounds"), (-1, "1 round"), (None, "1 round")]
)
def test_run_of_one_round_says_so(tmp_path, planned, text):
    folder = change_record(make_run(tmp_path, rounds=1), rounds=planned)
    assert open_run(folder).rounds_text == text


def test_read_run_gives_a_table_with_names_of_clients_and_classes(tmp_path):
    folder = make_run(tmp_path, clients=3, classes=2, rounds=4)

    table = flsv.read_run(folder)

    of_lyon = table.query("metric == 'cssv' and client_name == 'Lyon'")
    of_class = of_lyon[of_lyon["class"] == "1"]
    expected = [value_of_cell(1, 1, round_index) for round_index in range(4)]
    assert of_class["value"].tolist() == expected
    assert set(of_class["class_name"]) == {"class 1"}


def test_open_run_of_a_folder_without_a_run_raises(tmp_path):
    with refused("there is no folder"):
        open_run(tmp_path / "none")
    with refused("not the folder of a run"):
        open_run(tmp_path)

    make_run(tmp_path / "logs" / "version_0")
    with refused(r"runs below it do.*version_0"):
        open_run(tmp_path)


def test_single_run_of_a_repeat_has_its_own_values(tmp_path):
    make_repeated_runs(tmp_path, [0.4, 0.1], [0.2, 0.1])
    assert basis_of(open_run(tmp_path / "seed_1")).values == pytest.approx([0.2, 0.1])


RATE = "model: {init_args: {optimizer: {init_args: {lr: %s}}}}"


@pytest.mark.parametrize(
    ("config", "other_config", "difference"),
    [
        (RATE % 0.1, RATE % 0.3, r"model\S*\.lr is 0.3, and not 0.1"),
        ("data: {batch_size: 8}", "data: {batch_size: 9}", "data.batch_size is 9"),
        ("trainer: {max_epochs: null}", "trainer: {max_epochs: 4}", "trainer.max_epochs is 4"),
    ],
)
def test_listed_runs_of_another_experiment_are_refused(tmp_path, config, other_config, difference):
    make_repeated_runs(tmp_path, [0.4, 0.1], [0.2, 0.1])
    (tmp_path / "seed_0" / "config.yaml").write_text(f"seed_everything: 0\n{config}")
    (tmp_path / "seed_1" / "config.yaml").write_text(f"seed_everything: 1\n{other_config}")

    with refused(f"with another seed.*{difference}"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"rounds": 4}, "it has 4 rounds, and not 5"),
        ({"hashes": {"server": "other"}}, "does not have the data of"),
    ],
)
def test_listed_runs_of_other_rounds_or_data_are_refused(tmp_path, changes, difference):
    make_repeated_runs(tmp_path, [0.4, 0.1], [0.2, 0.1])
    change_record(tmp_path / "seed_1", **changes)
    with refused(difference):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("contributions.csv", "a,b\n1,2\n", "has the columns .a., .b.: expected round"),
        ("run.json", "{", "is not the record of a run"),
        ("run.json", '{"version": 5}', "in format 5, and this flsv .* reads format 6"),
    ],
)
def test_run_folder_with_files_of_another_kind_is_refused(tmp_path, file, text, message):
    make_run(tmp_path)
    (tmp_path / file).write_text(text)
    with refused(message):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("3,cssv,-1,,0.5,,,,", "client is '-1', expected a whole number"),
        ("2,cssv/stderr,1,,nan,,,,", "value is 'nan', expected a number"),
    ],
)
def test_invalid_line_of_contributions_csv_is_reported_with_its_number(tmp_path, line, words):
    path = make_run(tmp_path) / "contributions.csv"
    number = len(path.read_text().splitlines()) + 1
    path.write_text(path.read_text() + line + "\n")
    with refused(rf"contributions.csv, line {number}: {words}"):
        open_run(tmp_path)


@pytest.mark.slow
def test_contributions_csv_cut_at_any_byte_is_read_up_to_its_last_whole_line(tmp_path):
    folder = make_run(
        tmp_path, clients=2, classes=1, rounds=1, names=("Málaga", "=1+1"), stderr=False
    )
    path = folder / "contributions.csv"
    content = path.read_bytes()
    table = read_contributions(path)
    end_of_head = content.index(b"\n") + 1

    for end in range(end_of_head, len(content)):
        remaining = content[:end]
        path.write_bytes(remaining)
        num_rows = remaining.count(b"\n") - 1  # the first line is the head
        assert read_contributions(path).equals(table[:num_rows])


def test_the_record_of_a_run_is_there_from_the_first_round_on(tmp_path):
    class Look(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            has_ended.append(open_run(tmp_path).ended)

    has_ended = []
    data = toy_data()
    loop = FederatedLoop(
        ShapFedWA("cssv"),
        {"cssv": ClassSpecificShapley(), "cost": CommunicationCost()},
        seed=3,
    )

    fit(loop, tmp_path, data=data, rounds=2, callbacks=[Look()])

    assert has_ended == [False, False]

    record = open_run(tmp_path).record
    assert "ended" in record
    assert record["clients"] == list(data.client_names)
    assert record["samples"] == data.num_samples.tolist()
    assert record["class_counts"] == data.class_counts.tolist()
    assert record["classes"] == [str(name) for name in data.class_names]
    assert record["algorithm"]["aggregator"] == "ShapFedWA"
    assert record["settings"]["federation_seed"] == 3
    assert set(record["hashes"]) == {"0", "1", "2", "server"}
    assert (record["rounds"], record["rounds_done"]) == (2, 2)
    assert record["logged"]["val_acc"] > 0

    cssv = record["metrics"]["cssv"]
    assert cssv["guide"] == ClassSpecificShapley(3, 3).guide()
    assert cssv["per_class"] is True
    assert cssv["about"].startswith("Class-specific Shapley values (CSSV)")
    assert record["metrics"]["cost"]["columns"] == ["up", "down"]


def test_values_by_retraining_need_values_with_each_seed(tmp_path):
    folder = make_game(tmp_path / "run", {"sv": [0.1, 0.2, 0.3]})
    add_retrained_runs(folder, [0.1, 0.2, 0.3])
    reason = "The coalitions [[1]] come to no finite performance."
    second_run = folder / "retrained" / "seed_1"
    performance = {
        "by": "accuracy",
        "start": 0.1,
        "end": 0.7,
        "why_no_values": reason,
    }
    change_record(second_run, paid_in={"value": performance})
    write_rows(second_run, rows=[])

    run = open_run(folder)

    basis = basis_of(run)
    assert basis.estimates.isna().all(axis=None)
    assert reason in basis.verdict().text
    assert run.retrained is not None
    summary = seed_summary(run.retrained)
    assert summary["runs"].tolist() == [2, 2, 2]
    assert summary["mean"].isna().all()
    assert summary["share"].isna().all()


def test_record_writes_nan_and_objects_as_json(tmp_path):
    write_record(tmp_path, {"a": float("nan"), "b": (1, float("inf")), "c": {2: Path}, "d": None})
    read = json.loads((tmp_path / "run.json").read_text())
    assert read == {"a": None, "b": [1, None], "c": {"2": repr(Path)}, "d": None}


@pytest.mark.parametrize("touched", ["version_0/run.json", "version_1/report.html", "version_1"])
def test_runs_below_a_folder_are_listed_by_their_start_whatever_was_written_later(
    tmp_path, touched
):
    """As by flsv report and flsv predict, which write into a run's folder."""
    starts = {"version_0": "2026-01-01", "version_1": "2026-01-03", "version_2": "2026-01-02"}
    for name, day in starts.items():
        change_record(make_run(tmp_path / name), started=f"{day}T08:00:00+00:00")
        os.utime(tmp_path / name, (1000, 1000))
    (tmp_path / "version_0" / "clients").mkdir()
    path = tmp_path / touched
    path.touch()

    newest_first = ["version_1", "version_2", "version_0"]
    with refused(", ".join(str(tmp_path / name) for name in newest_first)):
        open_run(tmp_path)


def test_a_run_without_a_readable_record_is_listed_last(tmp_path):
    for name in ("version_0", "version_1"):
        make_run(tmp_path / name)
    (tmp_path / "version_1" / "run.json").write_text("{")

    with refused(f"{tmp_path / 'version_0'}, {tmp_path / 'version_1'}"):
        open_run(tmp_path)
