"""The table of a run: what is a row of it, what is new in a round, and its file, which survives crashes and resumes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import flsv
from flsv import ClientEvaluation
from flsv.aggregation import ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley
from flsv.results.round_result import RoundResult
from flsv.results.rows import COLUMNS as BY_COLUMN, ENDS, OVERALL, changed_numbers, client_rows
from flsv.results.run_table import (
    COLUMNS,
    CSV,
    SCHEMA,
    last_estimates,
    read_contributions,
)
from flsv.sampling import UniformSampler
from flsv.utilities.csv_files import csv_text
from helpers import make_generator, warns
from helpers.fits import fit

NAN = float("nan")
NAMES = ("Boston", "Lyon", "Graz")


def make_numbers(values, low, high):
    intervals = torch.tensor([low, high]).T
    return {("sv", OVERALL): torch.tensor(values), ("sv", ENDS): intervals}


def test_changes_of_a_round_hold_only_numbers_with_a_new_value_or_interval():
    values = [1.0, 2.0, NAN]
    low = [0.0, 1.0, NAN]
    high = [2.0, 3.0, NAN]
    other_low = [0.5, 1.0, NAN]
    unknown_low = [NAN, 1.0, NAN]
    unknown_high = [NAN, 3.0, NAN]
    earlier_numbers = make_numbers(values, low, high)
    cases = [
        (values, low, high, []),
        ([1.0, 2.5, NAN], low, high, [1]),
        ([1.0, 2.0, 3.0], low, high, [2]),
        (values, other_low, high, [0]),
        # No longer known: the value is as it was.
        (values, unknown_low, unknown_high, []),
        ([NAN, 2.0, NAN], unknown_low, unknown_high, []),
    ]
    for new_values, new_low, new_high, changed_clients in cases:
        new_numbers = make_numbers(new_values, new_low, new_high)
        changes = changed_numbers(new_numbers, earlier_numbers)
        assert known_clients(changes["sv", OVERALL]) == changed_clients

    changes = changed_numbers(earlier_numbers, {})
    assert known_clients(changes["sv", OVERALL]) == [0, 1]
    earlier_values = {("sv", OVERALL): torch.tensor(values)}  # without intervals
    changes = changed_numbers(earlier_numbers, earlier_values)
    assert known_clients(changes["sv", OVERALL]) == [0, 1]


def known_clients(values: torch.Tensor) -> list[int]:
    is_known = ~values.isnan()
    return is_known.nonzero().flatten().tolist()


def test_changes_by_class_are_those_of_single_numbers():
    by_class = torch.tensor([[1.0, 2.0], [3.0, NAN]])
    later_by_class = torch.tensor([[1.0, 2.5], [3.0, 4.0]])
    total = torch.tensor(7.0)
    numbers = {
        ("cssv", BY_COLUMN): later_by_class,
        ("cssv/total", OVERALL): total,
    }
    earlier_numbers = {
        ("cssv", BY_COLUMN): by_class,
        ("cssv/total", OVERALL): total,
    }

    changes = changed_numbers(numbers, earlier_numbers)

    is_known = ~changes["cssv", BY_COLUMN].isnan()
    assert is_known.tolist() == [[False, True], [False, True]]
    assert changes["cssv/total", OVERALL] == 7.0  # of the whole federation


def test_contributions_csv_is_read_back_bitwise(tmp_path):
    seeded = make_generator()
    values = torch.rand(
        3,
        2,
        generator=seeded,
        dtype=torch.float64,
    )
    values = values**40
    table = []
    for column in range(2):
        values_of_column = dict(enumerate(values[:, column].tolist()))
        table += client_rows(
            2, "sv", values_of_column, NAMES, column=str(column), class_name="Dress"
        )
    path = tmp_path / "contributions.csv"
    header = ",".join(SCHEMA) + "\n"
    path.write_bytes(header.encode() + csv_text(table))
    table_read = read_contributions(path)

    assert csv_text(table_read.itertuples(index=False)) == csv_text(table)

    for index in range(2):
        estimates = last_estimates(table_read, "sv", 3, str(index))
        values_read = torch.tensor(estimates["value"].to_numpy())
        assert torch.equal(values_read, values[:, index])


def make_round_rows(round_index):
    """Two rows: the first client's value, and that of a class."""
    return [
        *client_rows(round_index, "cssv", {0: 0.1 + round_index}, NAMES),
        *client_rows(round_index, "cssv", {0: 1 / 3}, NAMES, column="3", class_name="Dress"),
    ]


def write_rounds(
    path: Path, rounds: Sequence[int], first_round: int = 0, earlier: Path | None = None
) -> Path:
    file = CSV(path)
    file.keep_rows_before(first_round, earlier)
    for round_index in rounds:
        file.append(make_round_rows(round_index))
    return path


@pytest.fixture
def interrupted_csv(tmp_path, cut_line):
    """The file of a run of which rounds 0 to 2 are written, and the beginning of another line."""
    path = write_rounds(tmp_path / "c.csv", range(3))
    with path.open("a") as out:
        out.write(cut_line)
    return path


@pytest.mark.parametrize("cut_line", ["", "2,cssv,0,", '2,"cs'])
@pytest.mark.parametrize("folder", [".", "new"])
def test_resuming_drops_rounds_that_are_run_again_and_a_line_cut_short(
    tmp_path, interrupted_csv, folder
):
    whole = write_rounds(tmp_path / "whole.csv", range(4))
    content = interrupted_csv.read_text()
    path = tmp_path / folder / "c.csv"

    write_rounds(path, [2, 3], first_round=2, earlier=interrupted_csv)

    assert path.read_text() == whole.read_text()
    if folder != ".":
        assert interrupted_csv.read_text() == content


# Of another run, or of this one where it goes back by more than one round.
@pytest.mark.parametrize("first_round", [0, 1])
def test_rounds_of_an_earlier_run_are_copied_before_the_csv_is_rewritten(tmp_path, first_round):
    path = write_rounds(tmp_path / "c.csv", range(4))
    content = path.read_bytes()
    message = r"c\.csv holds rounds of an earlier run: they are kept in .*c_1.csv"

    with warns(message):
        write_rounds(path, range(first_round, 4), first_round=first_round)

    assert (tmp_path / "c_1.csv").read_bytes() == content
    assert path.read_bytes() == content

    with warns(r"they are kept in .*c_2\.csv"):
        write_rounds(path, range(first_round, 4), first_round=first_round)


def test_file_of_an_earlier_run_stands_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = write_rounds(tmp_path / "c.csv", range(4))
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left on the disk")

    monkeypatch.setattr(CSV, "_replace", fail)
    with (
        warns("they are kept in"),
        pytest.raises(OSError, match="no space"),
    ):
        write_rounds(path, range(4), first_round=0)

    assert path.read_bytes() == content


def test_contributions_csv_and_to_frame_hold_the_loops_values(tmp_path):
    metrics = {
        "cssv": ClassSpecificShapley(),
        "sv": CumulativeShapley(),
        "cost": CommunicationCost(),
    }
    loop = FederatedLoop(
        ShapFedWA("cssv"),
        metrics,
        sampler=UniformSampler(2),
        evaluation=ClientEvaluation(every=2),
        seed=1,
    )
    fit(loop, tmp_path, rounds=4)  # without any logger, it lies in default_root_dir
    run = flsv.read_run(tmp_path)
    frame = loop.to_frame()  # of the last round

    assert tuple(frame.columns) == COLUMNS
    assert tuple(run.columns) == COLUMNS

    keys = ["metric", "client", "class"]
    assert not run.duplicated(["round", *keys]).any()

    by_class = loop.contributions["cssv"].by_class
    is_known = by_class.isfinite()
    rows_of_classes = run[run["metric"] == "cssv"].dropna(subset="class")
    last_values = rows_of_classes.groupby(["client", "class"])["value"].last()
    assert last_values.tolist() == pytest.approx(by_class[is_known].tolist(), rel=1e-6)

    assert set(frame["round"]) == {3}
    traffic = run[run["metric"] == "cost"]
    assert set(traffic["class"].dropna()) == {"up", "down"}

    lasting = run[~run["metric"].isin(["update_norm", "weight"])]
    lasting = lasting.fillna({"class": ""})
    last_values = lasting.groupby(keys, as_index=False)["value"].last()
    rows_of_metrics = frame[frame["metric"] != "weight"]
    values_of_frame = rows_of_metrics.fillna({"class": ""})
    merged = values_of_frame.merge(last_values, on=keys, how="outer", suffixes=("_frame", "_run"))
    assert (merged["value_frame"] == merged["value_run"]).all()  # NaN, if one has no such row
    assert {"cssv", "sv", "sv/stderr", "accuracy", "cost"} <= set(values_of_frame["metric"])


def make_late_rounds(value: float) -> list[RoundResult]:
    """Two rounds of two clients. The first client's value goes up by one, and the second's does not change."""
    rows_of_round_0 = client_rows(0, "value", {0: value, 1: value}, NAMES)
    rows_of_round_1 = client_rows(1, "value", {0: value + 1, 1: value}, NAMES)
    return [
        RoundResult(0, table=rows_of_round_0, changes=rows_of_round_0),
        RoundResult(1, table=rows_of_round_1, changes=rows_of_round_1[:1]),
    ]


def test_values_computed_after_training_replace_earlier_ones_in_their_rounds(tmp_path):
    path = write_rounds(tmp_path / "c.csv", range(2))
    file = CSV(path)
    num_earlier_rows = len(read_contributions(path))
    num_late_rows = 2 + 1  # in round 0 both clients have a new value, in round 1 the first one

    for value in (3.0, 5.0):
        file.write_late_rounds(make_late_rounds(value))
        table = read_contributions(path)
        assert table["round"].is_monotonic_increasing
        estimates = last_estimates(table, "value", num_clients=2)
        assert estimates["value"].tolist() == [value + 1, value]
        assert len(table) == num_earlier_rows + num_late_rows


def test_csv_that_has_been_deleted_is_not_begun_without_its_header(tmp_path):
    path = write_rounds(tmp_path / "c.csv", range(2))
    file = CSV(path)
    path.unlink()

    with pytest.raises(FileNotFoundError, match=r"c\.csv"):
        file.write_late_rounds(make_late_rounds(1.0))
    assert not path.exists()

    with pytest.raises(FileNotFoundError, match=r"c\.csv"):
        file.append(make_round_rows(3))
    assert not path.exists()
