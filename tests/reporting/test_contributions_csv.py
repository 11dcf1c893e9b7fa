"""The CSV survives crashes and resumes."""

from pathlib import Path

import pytest

from flsv.reporting.contributions_csv import ContributionsFile

ROWS = {r: [(r, "cssv", 0, "", 0.1 + r), (r, "cssv", 0, 3, 1 / 3)] for r in range(4)}


def written(path: Path, rounds: int) -> ContributionsFile:
    file = ContributionsFile(path)
    file.begin(0)
    for r in range(rounds):
        file.append(ROWS[r])
    return file


def test_rounds_and_floats_read_back(tmp_path: Path) -> None:
    lines = written(tmp_path / "c.csv", 2).path.read_text().splitlines()
    assert lines[0] == "round,metric,client,class,value"
    assert len(lines) == 5
    assert float(lines[2].split(",")[-1]) == 1 / 3
    assert lines[1].split(",")[3] == ""


@pytest.mark.parametrize("damage", ["", "2,cssv,0,", '2,"cs'])
def test_resuming_drops_rounds_that_are_run_again_and_a_line_cut_short(tmp_path: Path, damage: str) -> None:
    file = written(tmp_path / "c.csv", 3)
    with file.path.open("a") as out:
        out.write(damage)
    again = ContributionsFile(file.path)
    again.begin(2)
    again.append(ROWS[2])
    again.append(ROWS[3])
    assert file.path.read_text() == written(tmp_path / "whole.csv", 4).path.read_text()


def test_resuming_elsewhere_takes_the_earlier_rounds_along(tmp_path: Path) -> None:
    old = written(tmp_path / "old" / "c.csv", 3)
    new = ContributionsFile(tmp_path / "new" / "c.csv")
    new.begin(3, old.path)
    new.append(ROWS[3])
    assert new.path.read_text() == written(tmp_path / "whole.csv", 4).path.read_text()
    assert len(old.path.read_text().splitlines()) == 7  # left alone


def test_starting_anew_empties_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "c.csv", 3)
    file.begin(0)
    assert file.path.read_text().splitlines() == ["round,metric,client,class,value"]


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is gone: .* starts at round 2"):
        ContributionsFile(tmp_path / "c.csv").begin(2, tmp_path / "nowhere.csv")
