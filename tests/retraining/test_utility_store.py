"""The store of coalitions' utilities: kills, other settings, orders, ranks; and what is trained into it."""

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flsv.core import Ranks
from flsv.functional import few_coalitions
from flsv.games.members import Members, members_of
from flsv.retraining.fit_order import FitOrder, FitResult
from flsv.retraining.train_fits import CoalitionTraining, FitsFailed
from flsv.retraining.utility_store import LAST, UtilityStore
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.supervisor import ChildFailed

MASKS = few_coalitions(3, "all")


class Game:
    """Trains coalitions at once, until it is killed."""

    is_reentrant = True

    def __init__(self, dies_at: int | None = None) -> None:
        self.trained: list[int] = []
        self.dies_at = dies_at

    def train(self, orders: Sequence[FitOrder]) -> Iterator[tuple[FitOrder, FitResult]]:
        for order in orders:
            if len(self.trained) == self.dies_at:
                raise KeyboardInterrupt
            places = [2**client for client in order.members]
            self.trained.append(sum(places))
            utility = torch.tensor([utility_of_members(order.members)], dtype=torch.float64)
            yield (
                order,
                FitResult(
                    utilities={"utility": utility},
                    untrained={"utility": torch.zeros(1)},
                    start_hash="start",
                ),
            )


def utility_of_members(members: Members) -> float:
    return float(sum((0.1, 0.2, 1 / 3)[client] for client in members))


def train_missing(
    game: Game,
    utilities: UtilityStore,
    say: Any = lambda text: None,
) -> int:
    coalitions = members_of(MASKS)
    missing = utilities.missing(0, coalitions)
    training = CoalitionTraining(
        game,
        FitOrder(members=(), seed=0),
        num_samples=[1, 1, 1],
    )
    training.train(coalitions, 0, utilities, say)

    return len(missing)


class Two(Ranks):
    """The first of two ranks, whose other one has no part."""

    rank = 0
    size = 2

    def all_gather(self, value: Any, purpose: str) -> list[Any]:
        return [value, {}]


def make_store(path: Path | None, *names: str, **options: Any) -> UtilityStore:
    return UtilityStore(path, names or ["utility"], {"a": 1}, **options)


def test_killed_game_resumes_and_its_file_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "game.csv"
    whole = tmp_path / "whole.csv"
    assert train_missing(Game(), make_store(whole)) == 8

    killed = Game(dies_at=4)
    messages: list[str] = []

    with pytest.raises(KeyboardInterrupt):
        train_missing(killed, make_store(path))

    with path.open("ab") as file:
        file.write(b"0,0+")  # a line that was being written

    second = Game()
    assert train_missing(second, make_store(path), messages.append) == 3
    assert sorted(killed.trained + second.trained) == list(range(1, 8))
    assert messages[-1] == "seed 0: 8 of 8 coalitions"
    assert path.read_bytes() == whole.read_bytes()

    third = Game()
    assert train_missing(third, make_store(path)) == 0
    assert third.trained == []

    expected = torch.tensor(
        [[utility_of_members(members)] for members in members_of(MASKS)], dtype=torch.float64
    )

    torch.testing.assert_close(
        make_store(path).table(0, MASKS),
        expected,
        rtol=0,
        atol=0,
    )

    # The order in which trainings end does not show in the file.
    reordered = make_store(tmp_path / "other.csv")
    for members, value in reversed(
        list(
            zip(
                members_of(MASKS),
                expected.tolist(),
            )
        )
    ):
        reordered.add(0, members, {LAST: [value]})

    reordered.sort()
    assert (tmp_path / "other.csv").read_bytes() == whole.read_bytes()


def test_each_rank_trains_a_part_of_the_coalitions() -> None:
    game = Game()
    utilities = make_store(None, ranks=Two())
    train_missing(game, utilities)
    assert len(game.trained) in (3, 4)
    assert len(utilities.coalitions(0)) == len(game.trained) + 1  # and the empty one


def test_error_of_failed_coalitions_can_be_pickled() -> None:
    failed = FitsFailed({(0, 2): ChildFailed("a wrong shape")})
    message = "1 coalition failed to train, clients 0 and 2: a wrong shape."

    copied = pickle.loads(pickle.dumps(failed))

    assert str(copied) == str(failed) == message
    assert [*copied.failed] == [(0, 2)]


def test_utility_store_reads_back_all_scores_of_whole_coalitions_only(tmp_path: Path) -> None:
    path = tmp_path / "game.csv"
    names = ["per_class", "val_loss (min)"]
    scores: dict[int, Any] = {
        0: [[0.5, -0.25], [1.5]],
        3: [[-0.75, 1.0], [1e-9]],
    }
    make_store(path, *names, rounds=(0, 3)).add(7, (0, 2), scores)
    with path.open("ab") as file:
        file.write(b"7,1,0,0.5 0.5,1.0\n7,1,3,0.5")  # a coalition that was being written

    store = make_store(path, *names, rounds=(0, 3))

    assert store.seeds == [7]
    assert store.rows(7, (0, 2)) == [scores[0], scores[3]]
    assert store.missing(7, [(1,), (0, 2), (1,)]) == [(1,)]


def test_utility_store_holds_scores_that_are_not_finite_and_does_not_write_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "game.csv"
    names = ["per_class", "val_loss (min)"]
    scores: dict[int, Any] = {
        0: [[0.0, 0.0], [0.0]],
        3: [[float("nan"), 0.0], [0.0]],
    }
    store = make_store(path, *names, rounds=(0, 3))
    store.add(8, (1,), scores)

    assert store.missing(8, [(1,)]) == []
    assert make_store(path, *names, rounds=(0, 3)).seeds == []


def test_utility_store_of_other_scores_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "game.csv"
    store = make_store(path, "per_class", "val_loss (min)", rounds=(0, 3))
    scores_of_round_0 = [[0.5, -0.25], [1.5]]
    scores_of_round_3 = [[-0.75, 1.0], [1e-9]]
    store.add(7, (0, 2), {0: scores_of_round_0, 3: scores_of_round_3})

    with pytest.raises(ConfigurationError, match="has the columns"):
        make_store(path, "per_class", "other", rounds=(0, 3))


HEAD = b'# {"a": "1"}\nseed,coalition,utility\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'# {"a": "2"}\nseed,coalition,utility\n0,-,1\n', "of other settings: a is 1 and was 2"),
        (b"client,value\n", "its first line does not say of which"),
        (HEAD + b"0,2+0,0.5\n", "line 3: coalition is '2.0', expected"),
        (HEAD + b"0,2,nan\n", "line 3: utility is 'nan', expected a number"),
    ],
)
def test_utility_file_of_other_settings_is_refused_and_unchanged(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "game.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words):
        make_store(path)
    assert path.read_bytes() == content
