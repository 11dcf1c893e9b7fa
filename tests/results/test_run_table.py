"""The table of a run: what is a row of it, what is new in a round, and its file, which survives crashes and resumes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import flsv
from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley, DomainRelevance
from flsv.personalization import PFedSV
from flsv.results.round_result import RoundResult, Row
from flsv.results.run_table import (
    COLUMNS,
    CSV,
    SCHEMA,
    Numbers,
    changed_rows,
    columns_in,
    csv_lines,
    last_values,
    read_contributions,
    round_rows,
    values_by_round,
)
from flsv.sampling import UniformSampler
from helpers.data import toy_data
from helpers.fits import fit

NAN = float("nan")
NAMES = ("Boston", "Lyon", "Graz")


def make_rows(values: list[float], low: list[float], high: list[float]) -> list[Row]:
    return round_rows(0, [Numbers("sv", values, ends=[low, high])], NAMES)


def test_changes_of_a_round_hold_only_rows_with_a_new_value_or_interval() -> None:
    values = [1.0, 2.0, NAN]
    low = [0.0, 1.0, NAN]
    high = [2.0, 3.0, NAN]
    other_low = [0.5, 1.0, NAN]
    unknown_low = [NAN, 1.0, NAN]
    unknown_high = [NAN, 3.0, NAN]
    earlier_rows = make_rows(values, low, high)
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
        new_rows = make_rows(new_values, new_low, new_high)
        changes = changed_rows(new_rows, earlier_rows)
        assert [row.client for row in changes] == changed_clients

    assert changed_rows(earlier_rows, []) == earlier_rows


def test_contributions_csv_is_read_back_bitwise(tmp_path: Path) -> None:
    seeded = torch.Generator().manual_seed(0)
    values = (
        torch.rand(
            3,
            2,
            generator=seeded,
            dtype=torch.float64,
        )
        ** 40
    )
    table = round_rows(
        2,
        [Numbers("sv", values, {"0": "Shirt", "1": "Dress"})],
        NAMES,
    )
    path = tmp_path / "contributions.csv"
    path.write_bytes((",".join(SCHEMA) + "\n").encode() + csv_lines(table))
    table_read = read_contributions(path)

    assert csv_lines(table_read.itertuples(index=False)) == csv_lines(table)

    columns = columns_in(table_read, "sv")
    values_read = np.array(
        [
            last_values(
                table_read,
                "sv",
                3,
                column,
            )
            for column in columns
        ]
    ).T

    assert torch.equal(torch.tensor(values_read), values)

    curve = values_by_round(table_read, "sv", 3, "1", [2])
    assert curve.to_numpy().tolist() == [values[:, 1].tolist()]


def make_round_rows(r: int) -> list[Row]:
    return round_rows(
        r, [Numbers("cssv", [0.1 + r]), Numbers("cssv", [[1 / 3]], {"3": "Dress"})], NAMES
    )


def write_rounds(
    path: Path, rounds: Sequence[int], first_round: int = 0, earlier: Path | None = None
) -> Path:
    file = CSV(path, NAMES)
    file.begin(first_round, earlier)
    for r in rounds:
        file.append(make_round_rows(r))
    return path


@pytest.mark.parametrize("damage", ["", "2,cssv,0,", '2,"cs'])
def test_resuming_drops_rounds_that_are_run_again_and_a_line_cut_short(
    tmp_path: Path, damage: str
) -> None:
    whole = write_rounds(tmp_path / "whole.csv", range(4)).read_text()
    path = write_rounds(tmp_path / "c.csv", range(3))
    with path.open("a") as out:
        out.write(damage)

    elsewhere = write_rounds(tmp_path / "new" / "c.csv", [2, 3], 2, earlier=path)
    assert len(path.read_text().splitlines()) == 7 + bool(damage)  # left alone
    assert elsewhere.read_text() == write_rounds(path, [2, 3], 2).read_text() == whole


def test_rounds_of_an_earlier_run_are_copied_before_the_csv_is_rewritten(tmp_path: Path) -> None:
    """Those of another run, and those of this one where it goes back by more than one."""
    path = write_rounds(tmp_path / "c.csv", range(4))
    content = path.read_bytes()
    for copy, begin in (("c_1.csv", 0), ("c_2.csv", 1)):
        with pytest.warns(
            UserWarning, match=rf"c\.csv holds rounds of an earlier run: they are kept in .*{copy}"
        ):
            write_rounds(path, range(begin, 4), begin)
        assert (tmp_path / copy).read_bytes() == path.read_bytes() == content


def test_contributions_csv_and_to_frame_hold_the_loops_values(tmp_path: Path) -> None:
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
        reporting=Reporting(table=False),
        seed=1,
    )
    fit(loop, tmp_path, rounds=4)  # without any logger, it lies in default_root_dir
    run = flsv.read_run(tmp_path)
    now = loop.to_frame()

    assert tuple(now.columns) == tuple(run.columns) == COLUMNS

    keys = ["metric", "client", "class"]
    assert not run.duplicated(["round", *keys]).any()

    weights = run[run["metric"] == "weight"]
    assert len(weights) == 4 * 2  # nobody outside the cohort has one
    assert weights.groupby("round")["value"].sum().tolist() == pytest.approx([1] * 4)
    assert set(run.loc[run["metric"] == "accuracy", "round"]) == {1, 3}

    final = loop.contributions["cssv"].by_class
    of_class = (
        run[(run["metric"] == "cssv") & run["class"].notna()]
        .groupby(["client", "class"])["value"]
        .last()
    )

    assert len(of_class) == int(final.isfinite().sum())
    assert all(
        value
        == pytest.approx(
            final[i, int(j)].item(),
            rel=1e-6,
        )
        for (i, j), value in of_class.items()
    )

    assert set(now["round"]) == {3}

    lasting = run[~run["metric"].isin(["update_norm", "weight"])]
    last_values = lasting.fillna({"class": ""}).groupby(keys, as_index=False)["value"].last()
    now = now[now["metric"] != "weight"].fillna({"class": ""})
    merged = now.merge(
        last_values,
        on=keys,
        how="outer",
        suffixes=("_now", "_run"),
        indicator=True,
    )

    assert set(merged["_merge"]) == {"both"}
    assert (merged["value_now"] == merged["value_run"]).all()
    assert {"cssv", "sv", "sv/stderr", "accuracy", "cost"} <= set(now["metric"])


def make_late_rounds(value: float) -> list[RoundResult]:
    of_rounds = [round_rows(r, [Numbers("value", [value + r, value])], NAMES) for r in (0, 1)]
    return [
        RoundResult(r, of_rounds[r], changed_rows(of_rounds[r], of_rounds[0] if r else []))
        for r in (0, 1)
    ]


def test_values_computed_after_training_replace_earlier_ones_in_their_rounds(
    tmp_path: Path,
) -> None:
    path = write_rounds(tmp_path / "c.csv", range(2))
    file = CSV(path, NAMES)
    for value in (3.0, 5.0):
        file.write_late(make_late_rounds(value))
        table = read_contributions(path)
        assert table["round"].is_monotonic_increasing
        assert last_values(table, "value", 2) == [value + 1, value]
        assert len(table) == 4 + 3

    file.write_late([])
    assert read_contributions(path).equals(table)

    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"c\.csv"):
        file.write_late(make_late_rounds(1.0))

    assert not path.exists()

    with pytest.raises(FileNotFoundError, match=r"c\.csv"):
        file.append(make_round_rows(3))  # else the file would begin without its header

    assert not path.exists()


def test_value_written_twice_is_read_as_the_later_one(tmp_path: Path) -> None:
    path = write_rounds(tmp_path / "c.csv", range(2))
    for value in (3.0, 5.0):
        changed_rows = []
        for result in make_late_rounds(value):
            changed_rows += result.changes
        with path.open("ab") as file:
            file.write(csv_lines(changed_rows))

    table = read_contributions(path)
    values = values_by_round(table, "value", 2, "", [0, 1])

    assert values.to_numpy().tolist() == [[5.0, 5.0], [6.0, 5.0]]


def test_columns_of_pairs_and_traffic_are_read_back_under_their_names(tmp_path: Path) -> None:
    metrics = {
        "relevance": DomainRelevance(truth=torch.eye(3).roll(1, 0)),
        "cost": CommunicationCost(),
    }
    loop = FederatedLoop(
        metrics=metrics,
        personalizer=PFedSV(),
        seed=1,
        reporting=Reporting(table=False),
    )
    fit(
        loop,
        tmp_path,
        data=toy_data(client_val=0.2, drop_last=True),
        rounds=2,
    )
    last_values = (
        flsv.read_run(tmp_path)
        .dropna(subset="class")
        .groupby(["metric", "client", "class"])["value"]
        .last()
    )
    final = loop.contributions["relevance"].by_class
    expected = {}
    for i in range(3):
        for j in range(3):
            if not final[i, j].isnan():
                expected[i, str(j)] = final[i, j].item()

    assert len(expected) > 3
    assert last_values["relevance"].to_dict() == pytest.approx(expected)

    size = loop.space.size
    # Whole numbers: two models up, and what every model is worth to it; the first model down, and the others'.
    for client in range(3):
        up = last_values["cost", client, "up"]
        down = last_values["cost", client, "down"]
        num_downloads = int(down) // size - 1
        assert up == 2 * size + 2 + num_downloads
        assert down == (1 + num_downloads) * size
