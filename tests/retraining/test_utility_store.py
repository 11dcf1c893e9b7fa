"""The store of coalitions' utilities: kills, other settings, orders, ranks; and what is trained into it."""

import pickle

import pytest
import torch

from flsv.core import Ranks
from flsv.functional import few_coalitions
from flsv.games.members import Members, members_of
from flsv.retraining import utility_store
from flsv.retraining.fit_order import FitFailed, FitOrder, FitResult
from flsv.retraining.train_fits import CoalitionTraining, FitsFailed
from flsv.retraining.utility_store import NO_ROUND, ScoredModel, UtilityStore, outputs_file
from helpers import refused

MASKS = few_coalitions(3, "all")
ALL_COALITIONS = members_of(MASKS)  # of three clients: 8, with the empty one


class InstantTrainer:
    """Trains coalitions at once, and is killed before one more than ``max_fits``."""

    def __init__(self, max_fits=None):
        self.trained: list[Members] = []
        self.max_fits = max_fits

    def train(self, orders):
        for order in orders:
            if len(self.trained) == self.max_fits:
                raise KeyboardInterrupt
            self.trained.append(order.members)
            utility = utility_of_members(order.members)
            fit_result = FitResult(
                scored=[ScoredModel([[utility]])],
                untrained=ScoredModel([[0.0]]),
                start_hash="start",
            )
            yield order, fit_result


UTILITY_OF_CLIENT = (0.1, 0.2, 1 / 3)


def utility_of_members(members):
    return float(sum(UTILITY_OF_CLIENT[client] for client in members))


def train_missing(
    trainer,
    store,
    say=lambda text: None,
):
    """Train the coalitions of seed 0 that are not in the store, and return how many they were."""
    missing = store.missing(0, ALL_COALITIONS)
    training = CoalitionTraining(
        trainer,
        FitOrder(members=(), seed=0),
        num_samples=[1, 1, 1],
    )
    training.train(ALL_COALITIONS, [0], store, say)

    return len(missing)


class FirstOfTwoRanks(Ranks):
    """The other one has no part."""

    rank = 0
    size = 2

    def all_gather(self, value, purpose):
        return [value, {}]


def make_store(path, *names, **options):
    return UtilityStore(path, names or ["utility"], {"a": 1}, **options)


def test_killed_game_resumes_and_its_file_equals_an_uninterrupted_one(tmp_path):
    path = tmp_path / "game.csv"
    whole_path = tmp_path / "whole.csv"
    assert train_missing(InstantTrainer(), make_store(whole_path)) == len(ALL_COALITIONS)

    killed = InstantTrainer(max_fits=4)
    with pytest.raises(KeyboardInterrupt):
        train_missing(killed, make_store(path))
    with path.open("ab") as file:
        file.write(b"0,0+")  # a line that was being written

    messages = []
    second = InstantTrainer()
    num_missing = train_missing(second, make_store(path), messages.append)

    # Of 8 coalitions the empty one needs no training, and four were trained before.
    assert num_missing == 8 - 1 - 4
    assert sorted([(), *killed.trained, *second.trained]) == sorted(ALL_COALITIONS)
    assert messages[-1] == "seed 0: 8 of 8 coalitions"
    assert path.read_bytes() == whole_path.read_bytes()


def test_utilities_are_read_back_bitwise(tmp_path):
    path = tmp_path / "game.csv"
    train_missing(InstantTrainer(), make_store(path))

    utilities = make_store(path).table(0, MASKS)

    expected = [[utility_of_members(members)] for members in ALL_COALITIONS]
    assert utilities.tolist() == expected


def test_file_does_not_depend_on_the_order_in_which_trainings_end(tmp_path):
    path = tmp_path / "game.csv"
    train_missing(InstantTrainer(), make_store(path))

    reversed_path = tmp_path / "reversed.csv"
    store = make_store(reversed_path)
    for members in reversed(ALL_COALITIONS):
        model = ScoredModel([[utility_of_members(members)]])
        store.add(seed=0, members=members, models={NO_ROUND: model})
    store.sort()

    assert reversed_path.read_bytes() == path.read_bytes()


def test_each_rank_trains_a_part_of_the_coalitions():
    trainer = InstantTrainer()
    store = make_store(None, ranks=FirstOfTwoRanks())

    train_missing(trainer, store)

    assert len(trainer.trained) in (3, 4)  # of seven
    assert len(store.coalitions(0)) == len(trainer.trained) + 1  # and the empty one


def test_error_of_failed_coalitions_can_be_pickled():
    failed = FitsFailed({(0, 2): FitFailed("a wrong shape")})
    message = "1 coalition failed to train, clients 0 and 2: a wrong shape."

    copied = pickle.loads(pickle.dumps(failed))

    assert str(copied) == str(failed) == message
    assert [*copied.failed] == [(0, 2)]


def make_store_of_two_rounds(path, **options):
    """Make a store of rounds 0 and 3, with a performance of two classes and one of a number."""
    store = make_store(
        path,
        "per_class",
        "val_loss (min)",
        by_round=True,
        **options,
    )
    store.rounds = (0, 3)
    return store


#: By round: the values of each class, and the loss.
SCORES = {
    0: [[0.5, -0.25], [1.5]],
    3: [[-0.75, 1.0], [1e-9]],
}


def test_utility_store_reads_back_all_scores_of_whole_coalitions_only(tmp_path):
    path = tmp_path / "game.csv"
    make_store_of_two_rounds(path).add(seed=7, members=(0, 2), models=models_of(SCORES))
    with path.open("ab") as file:
        # A coalition that was being written. Columns: seed, coalition, round, per_class, val_loss.
        file.write(b"7,1,0,0.5 0.5,1.0\n7,1,3,0.5")

    store = make_store_of_two_rounds(path)

    assert store.seeds == [7]
    assert store.rows(seed=7, members=(0, 2)) == [SCORES[0], SCORES[3]]
    assert store.missing(7, [(1,), (0, 2), (1,)]) == [(1,)]


def test_outputs_are_read_back_and_a_coalition_without_them_is_missing(tmp_path):
    path = tmp_path / "game.csv"
    outputs = torch.randn(2, 5, 3)  # of two rounds
    store = make_store_of_two_rounds(path, outputs=["per_class"])

    models = {}
    for position, (round_index, row) in enumerate(SCORES.items()):
        named_outputs = {"per_class": outputs[position], "other": outputs}
        models[round_index] = ScoredModel(row, named_outputs)
    store.add(seed=7, members=(0, 2), models=models)
    store.add(seed=7, members=(1,), models=models_of(SCORES))

    store_read = make_store_of_two_rounds(path, outputs=["per_class"])
    outputs_read = store_read.outputs(7, (0, 2), "per_class")
    assert torch.equal(outputs_read, outputs)
    assert store_read.missing(7, [(0, 2), (1,)]) == [(1,)]


def test_utility_store_holds_scores_that_are_not_finite_and_does_not_write_them(
    tmp_path,
):
    path = tmp_path / "game.csv"
    scores_with_nan = {
        0: [[0.0, 0.0], [0.0]],
        3: [[float("nan"), 0.0], [0.0]],
    }
    store = make_store_of_two_rounds(path)

    store.add(seed=8, members=(1,), models=models_of(scores_with_nan))

    assert store.missing(8, [(1,)]) == []
    assert make_store_of_two_rounds(path).missing(8, [(1,)]) == [(1,)]


def test_utility_store_of_other_scores_is_refused(tmp_path):
    path = tmp_path / "game.csv"
    make_store_of_two_rounds(path).add(seed=7, members=(0, 2), models=models_of(SCORES))

    with refused("has the columns"):
        make_store(path, "per_class", "other", by_round=True)


def test_rows_of_other_rounds_and_their_outputs_go_when_the_file_is_sorted(tmp_path):
    path = tmp_path / "game.csv"
    store = make_store_of_two_rounds(path, outputs=["per_class"])
    model = ScoredModel(SCORES[0], {"per_class": torch.zeros(5)})
    for round_index in (0, 1, 3):  # as a run adds its own
        models = {round_index: model}
        store.add(seed=7, members=(0, 2), models=models)

    store.sort()

    _settings, _columns, *lines = path.read_text().splitlines()
    first_line, last_line = lines
    assert first_line.startswith("7,0+2,0,")
    assert last_line.startswith("7,0+2,3,")
    names = [file.name for file in (tmp_path / "game").iterdir()]
    assert sorted(names) == [outputs_file((7, (0, 2)), 0), outputs_file((7, (0, 2)), 3)]


def test_coalitions_of_many_clients_are_stored_with_their_members(tmp_path):
    path = tmp_path / "game.csv"
    all_clients = tuple(range(1000))
    all_but_one = tuple(range(999))
    store = make_store_of_two_rounds(path, outputs=["per_class"])
    outputs_by_members = {}
    for members in (all_clients, all_but_one):
        outputs = torch.randn(5)
        outputs_by_members[members] = outputs
        models = {}
        for round_index, row in SCORES.items():
            models[round_index] = ScoredModel(row, {"per_class": outputs})
        store.add(seed=7, members=members, models=models)
    store.sort()

    store_read = make_store_of_two_rounds(path, outputs=["per_class"])
    for members, outputs in outputs_by_members.items():
        outputs_read = store_read.outputs(7, members, "per_class")
        assert torch.equal(outputs_read, torch.stack([outputs, outputs]))


def test_outputs_of_other_members_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "game.csv"
    monkeypatch.setattr(utility_store, "outputs_file", lambda training, index: f"{index}.pt")
    store = make_store_of_two_rounds(path, outputs=["per_class"])
    for members in [(0, 2), (1,)]:
        models = {}
        for round_index, row in SCORES.items():
            models[round_index] = ScoredModel(row, {"per_class": torch.zeros(5)})
        store.add(seed=7, members=members, models=models)

    store_read = make_store_of_two_rounds(path, outputs=["per_class"])
    assert store_read.missing(7, [(0, 2), (1,)]) == [(0, 2)]


def models_of(scores):
    models = {}
    for round_index, row in scores.items():
        models[round_index] = ScoredModel(row)
    return models


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
def test_utility_file_of_other_settings_is_refused_and_unchanged(tmp_path, content, words):
    path = tmp_path / "game.csv"
    path.write_bytes(content)
    with refused(words):
        make_store(path)
    assert path.read_bytes() == content
