"""The intervals of shares hold the true shares of known games in about 9 of 10 draws."""

import pytest
from shares_coverage import coverage, games, main

GAMES = dict(games())


@pytest.mark.parametrize(
    "name",
    ["two clients", "five, additive", "five, 144 cases"],
)
def test_intervals_of_shares_hold_the_true_ones_in_nine_of_ten_draws(
    name: str,
) -> None:
    joint, _ = coverage(GAMES[name], draws=200)
    assert 0.86 < joint < 0.94


def test_study_prints_a_line_for_each_game(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--draws", "2"])
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(GAMES)
