"""The table of a run: what is a row of it, what is new in a round, and its file, which survives crashes and resumes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import flsv
from flsv import ClientEvaluation
from flsv.aggregation import ShapFedWA
from flsv.core import Values
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley
from flsv.results.round_result import RoundResult
from flsv.results.rows import changed_numbers, client_rows
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


def make_numbers(values, half_width):
    return {"sv": Values(torch.tensor(values), half_width=torch.tensor(half_width))}


VALUES = [1.0, 2.0, NAN]
HALF_WIDTH = [1.0, 1.0, NAN]
EARLIER_NUMBERS = make_numbers(VALUES, HALF_WIDTH)
#: Intervals without that of the first client.
UNKNOWN_HALF_WIDTH = [NAN, 1.0, NAN]


def clients_with_a_change(numbers, earlier_numbers) -> list[int]:
    changes = changed_numbers(numbers, earlier_numbers)
    is_known = ~changes["sv"].overall.isnan()
    return is_known.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("values", "half_width", "changed_clients"),
    [
        (VALUES, HALF_WIDTH, []),
        ([1.0, 2.5, NAN], HALF_WIDTH, [1]),
        ([1.0, 2.0, 3.0], HALF_WIDTH, [2]),
        (VALUES, [0.5, 1.0, NAN], [0]),
        (VALUES, UNKNOWN_HALF_WIDTH, []),
        ([NAN, 2.0, NAN], UNKNOWN_HALF_WIDTH, []),
    ],
    ids=["same", "value", "first value", "interval", "unknown interval", "unknown value"],
)
def test_changes_of_a_round_are_numbers_with_a_new_value_or_interval(
    values, half_width, changed_clients
):
    numbers = make_numbers(values, half_width)
    assert clients_with_a_change(numbers, EARLIER_NUMBERS) == changed_clients


NUMBERS_WITHOUT_INTERVALS = {"sv": Values(torch.tensor(VALUES))}


@pytest.mark.parametrize(
    "earlier_numbers",
    [{}, NUMBERS_WITHOUT_INTERVALS],
    ids=["no numbers", "no intervals"],
)
def test_all_known_numbers_are_changes_if_there_were_no_intervals_before(earlier_numbers):
    assert clients_with_a_change(EARLIER_NUMBERS, earlier_numbers) == [0, 1]


def test_changes_by_class_are_those_of_single_numbers():
    earlier_values = Values(torch.tensor([[1.0, 2.0], [3.0, NAN]]))
    values = Values(torch.tensor([[1.0, 2.5], [3.0, 4.0]]))

    changes = changed_numbers({"cssv": values}, {"cssv": earlier_values})

    expected_changes = [[NAN, 2.5], [NAN, 4.0]]
    np.testing.assert_equal(changes["cssv"].by_class.numpy(), np.float32(expected_changes))


def test_number_of_the_whole_federation_is_a_change_in_each_round():
    numbers = {"cssv/total": Values(torch.tensor(7.0))}
    assert changed_numbers(numbers, numbers) == numbers


def test_contributions_csv_is_read_back_bitwise(tmp_path):
    # Small numbers, many of whose digits count.
    values = torch.rand(3, generator=make_generator(), dtype=torch.float64)
    values = values**40
    values_by_client = dict(enumerate(values.tolist()))
    rows = client_rows(
        2,
        "sv",
        values_by_client,
        NAMES,
        column="1",
        class_name="Dress",
    )
    path = tmp_path / "contributions.csv"
    header = ",".join(SCHEMA) + "\n"
    path.write_bytes(header.encode() + csv_text(rows))

    table = read_contributions(path)

    assert csv_text(table.itertuples(index=False)) == csv_text(rows)
    estimates = last_estimates(table, "sv", num_clients=3, column="1")
    assert torch.equal(torch.tensor(estimates["value"].to_numpy()), values)


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


@pytest.fixture(params=["", "2,cssv,0,", '2,"cs'])
def interrupted_csv(tmp_path, request):
    """The file of a run of which rounds 0 to 2 are written, and the beginning of another line."""
    path = write_rounds(tmp_path / "c.csv", range(3))
    with path.open("a") as file:
        file.write(request.param)
    return path


@pytest.fixture
def uninterrupted_text(tmp_path):
    return write_rounds(tmp_path / "whole.csv", range(4)).read_text()


def test_resuming_drops_rounds_that_are_run_again_and_a_line_cut_short(
    interrupted_csv, uninterrupted_text
):
    write_rounds(interrupted_csv, [2, 3], first_round=2, earlier=interrupted_csv)
    assert interrupted_csv.read_text() == uninterrupted_text


def test_resuming_in_another_folder_leaves_the_earlier_csv(
    tmp_path, interrupted_csv, uninterrupted_text
):
    earlier_text = interrupted_csv.read_text()
    path = write_rounds(tmp_path / "new" / "c.csv", [2, 3], first_round=2, earlier=interrupted_csv)

    assert path.read_text() == uninterrupted_text
    assert interrupted_csv.read_text() == earlier_text


# A resumed run rewrites its last round at most. More rounds are those of another run.
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


def test_csv_of_an_earlier_run_stays_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
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


@pytest.fixture(scope="module")
def run_of_four_rounds(tmp_path_factory):
    """A loop of which two of three clients are drawn in each round, and the table of its folder."""
    folder = tmp_path_factory.mktemp("run")
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
    fit(loop, folder, rounds=4)
    return loop, flsv.read_run(folder)


KEYS = ["metric", "client", "class"]


@pytest.mark.slow
def test_contributions_csv_has_one_row_for_each_number_of_a_round(run_of_four_rounds):
    _, table = run_of_four_rounds
    assert tuple(table.columns) == COLUMNS
    assert not table.duplicated(["round", *KEYS]).any()
    assert set(table.query("metric == 'cost'")["class"].dropna()) == {"up", "down"}


@pytest.mark.slow
def test_last_rows_of_contributions_csv_are_the_loops_values_by_class(run_of_four_rounds):
    loop, table = run_of_four_rounds
    rows_of_classes = table.query("metric == 'cssv'").dropna(subset="class")
    last_values = rows_of_classes.groupby(["client", "class"])["value"].last()

    by_class = loop.values["cssv"].by_class
    known_values = by_class[by_class.isfinite()]
    assert last_values.tolist() == pytest.approx(known_values.tolist(), rel=1e-6)


def test_to_frame_has_the_last_row_of_each_number_in_contributions_csv(run_of_four_rounds):
    loop, table = run_of_four_rounds
    frame = loop.to_frame()
    assert tuple(frame.columns) == COLUMNS
    assert set(frame["round"]) == {3}
    assert {"cssv", "sv", "sv/stderr", "accuracy", "cost"} <= set(frame["metric"])

    # Norms and weights are numbers of a round, which a later round without them does not have.
    lasting_rows = table.query("metric not in ['update_norm', 'weight']").fillna({"class": ""})
    last_rows = lasting_rows.groupby(KEYS, as_index=False)["value"].last()
    frame_rows = frame.query("metric != 'weight'").fillna({"class": ""})
    merged_rows = frame_rows.merge(last_rows, on=KEYS, how="outer", suffixes=("_frame", "_csv"))
    assert (merged_rows["value_frame"] == merged_rows["value_csv"]).all()


def make_late_rounds(value: float) -> list[RoundResult]:
    """Make two rounds of two clients. The first client's value goes up by one, and the second's does not change."""
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
    num_late_rows = sum(len(late_round.changes) for late_round in make_late_rounds(3.0))

    file.write_late_rounds(make_late_rounds(3.0))
    file.write_late_rounds(make_late_rounds(5.0))

    table = read_contributions(path)
    assert table["round"].is_monotonic_increasing
    estimates = last_estimates(table, "value", num_clients=2)
    assert estimates["value"].tolist() == [6.0, 5.0]
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
