from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.functional import few_coalitions
from flsv.games.retraining import KeptUtility
from flsv.participants import Ranks


class Game:
    """Counts what it is asked for, and dies when told."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.dies_at = dies_at

    def __call__(self, masks: Tensor) -> Tensor:
        if self.dies_at is not None and len(self.asked) >= self.dies_at:
            raise KeyboardInterrupt
        self.asked += [int(mask) for mask in (masks * 2 ** torch.arange(masks.shape[1])).sum(1)]
        return (masks * torch.tensor([0.1, 0.2, 1 / 3])).sum(1)


class Two(Ranks):
    rank, size = 0, 2


MASKS = few_coalitions(3, "all")


@pytest.mark.parametrize("ranks", [Ranks(), Two()])
def test_a_killed_game_goes_on_where_it_was(tmp_path: Path, ranks: Ranks) -> None:
    path, whole = tmp_path / "game.csv", Game()(MASKS).double()
    first = Game(dies_at=4)
    with pytest.raises(KeyboardInterrupt):
        KeptUtility(first, path, {"a": 1}, ranks)(MASKS)
    with path.open("ab") as file:
        file.write(b"0,0+")  # a line that was being written
    second, told = Game(), []
    values = KeptUtility(second, path, {"a": 1}, ranks, lambda done, of: told.append((done, of)))(MASKS)
    torch.testing.assert_close(values, whole, rtol=0, atol=0)
    assert first.asked + second.asked == [int(m) for m in (MASKS * 2 ** torch.arange(3)).sum(1)]
    assert told[-1] == (8, 8)
    third = Game()
    torch.testing.assert_close(KeptUtility(third, path, {"a": 1}, ranks)(MASKS.flip(0)), whole.flip(0), rtol=0, atol=0)
    assert third.asked == []


HEAD = b'# {"a": "1"}\nseed,coalition,utility\n'


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (
            b'# {"a": "2", "b": "0"}\nseed,coalition,utility\n0,-,1\n',
            "of others: a is 1 and was 2; b is None and was 0",
        ),
        (b"client,value\n", "its first line does not say of which"),
        (HEAD + b"0,2+0,0.5\n", "line 3: coalition is '2.0', expected"),
    ],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, before: bytes, words: str) -> None:
    path = tmp_path / "game.csv"
    path.write_bytes(before)
    settings: dict[str, Any] = {"a": 1}
    with pytest.raises(ConfigurationError, match=words):
        KeptUtility(Game(), path, settings)
    assert path.read_bytes() == before
