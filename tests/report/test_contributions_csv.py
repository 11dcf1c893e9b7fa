"""The CSV survives crashes and resumes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from lightning.pytorch.loggers.logger import DummyLogger
from toys import fit

from flsv.loop import FederatedLoop
from flsv.report.run_table import CSV, Numbers, rows_of
from flsv.round.result import Row

NAMES = ("Boston", "Lyon")


def rows(r: int, *numbers: Numbers, names: Sequence[str] = NAMES) -> list[Row]:
    return rows_of(r, numbers, names)


ROWS = {r: rows(r, Numbers("cssv", [0.1 + r]), Numbers("cssv", [[1 / 3]], {"3": "Dress"})) for r in range(4)}


def written(path: Path, rounds: int) -> CSV:
    file = CSV(path, NAMES)
    file.begin(0)
    for r in range(rounds):
        file.append(ROWS[r])
    return file


@pytest.mark.parametrize("damage", ["", "2,cssv,0,", '2,"cs'])
def test_resuming_drops_rounds_that_are_run_again_and_a_line_cut_short(tmp_path: Path, damage: str) -> None:
    file = written(tmp_path / "c.csv", 3)
    with file.path.open("a") as out:
        out.write(damage)
    again = CSV(file.path, NAMES)
    again.begin(2)
    again.append(ROWS[2])
    again.append(ROWS[3])
    assert file.path.read_text() == written(tmp_path / "whole.csv", 4).path.read_text()


def test_resuming_elsewhere_takes_the_earlier_rounds_along(tmp_path: Path) -> None:
    old = written(tmp_path / "old" / "c.csv", 3)
    new = CSV(tmp_path / "new" / "c.csv", NAMES)
    new.begin(3, old.path)
    new.append(ROWS[3])
    assert new.path.read_text() == written(tmp_path / "whole.csv", 4).path.read_text()
    assert len(old.path.read_text().splitlines()) == 7  # left alone


def test_a_file_of_an_earlier_run_is_kept_and_named(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    first = written(path, 3).path.read_bytes()
    for copy in ("c_1.csv", "c_2.csv"):
        with pytest.warns(UserWarning, match=rf"c\.csv holds rounds of an earlier run: they are kept in .*{copy}"):
            written(path, 3)
        assert (tmp_path / copy).read_bytes() == first
    assert path.read_bytes() == first


def test_going_back_several_rounds_keeps_what_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    before = written(path, 4).path.read_bytes()
    with pytest.warns(UserWarning, match="c_1.csv"):
        CSV(path, NAMES).begin(1)
    assert (tmp_path / "c_1.csv").read_bytes() == before


class SharedFolderLogger(DummyLogger):
    """As MLflow's: ``trainer.log_dir`` is the folder of all its runs."""

    def __init__(self, folder: Path, version: str) -> None:
        super().__init__()
        self._folder, self._version = folder, version

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    @property
    def name(self) -> str:
        return "experiment"

    @property
    def version(self) -> str:
        return self._version


def test_runs_of_a_logger_with_one_folder_for_all_have_a_file_each(tmp_path: Path) -> None:
    for version in ("a", "b"):
        fit(FederatedLoop(), tmp_path, rounds=1, logger=SharedFolderLogger(tmp_path, version))
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv")} == {
        "experiment/a/contributions.csv",
        "experiment/b/contributions.csv",
    }
