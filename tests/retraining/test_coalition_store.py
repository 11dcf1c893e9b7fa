"""The store of coalitions' models: kills, other settings, orders, ranks; and what is trained into it."""

import errno
import pickle
from unittest.mock import Mock

import pandas
import pytest
import torch

from flsv.core import Ranks
from flsv.functional import few_coalitions
from flsv.games.members import members_of
from flsv.retraining import coalition_store, one_by_one
from flsv.retraining.coalition_store import CoalitionStore
from flsv.retraining.one_by_one import FitsFailed, OneByOne, SameStart
from flsv.retraining.training_job import FitFailed, FitResult, TrainingJob
from flsv.values.coalition_files import (
    NO_ROUND,
    ScoredModel,
    Training,
    copy_coalitions,
    read_settings,
    read_untrained,
)
from helpers import refused, warns

MASKS = few_coalitions(3, "all")
#: Of three clients: eight coalitions, with the empty one.
ALL_COALITIONS = members_of(MASKS)
PAIR = (0, 2)
SINGLE = (1,)
NAMES = ["Lyon", "Osaka", "Bergen"]


class TrainerThatSumsUtilities:
    """Gives a coalition the sum of its members' utilities. It is killed after ``max_fits`` coalitions, if it is set."""

    def __init__(self, max_fits=None):
        self.max_fits = max_fits
        self.trained = []

    def train(self, jobs):
        for job in jobs:
            if len(self.trained) == self.max_fits:
                raise KeyboardInterrupt
            self.trained.append(job.members)
            trained_model = ScoredModel({"utility": [utility_of_members(job.members)]})
            untrained_model = ScoredModel({"utility": [0.0]})
            yield job, FitResult([trained_model], untrained_model, start_hash="start")


UTILITY_OF_CLIENT = (0.1, 0.2, 1 / 3)


def utility_of_members(members):
    return float(sum(UTILITY_OF_CLIENT[client] for client in members))


def do_nothing():
    pass


def train_missing(trainer, store, on_each_trained=do_nothing):
    """Train the coalitions of seed 0 that are not in the store."""
    way = OneByOne(
        trainer,
        TrainingJob(members=(), seed=0, rounds=(NO_ROUND,)),
        num_samples=[1, 1, 1],
        ranks=store.ranks,
    )
    one_by_one.train_missing(way, ALL_COALITIONS, store, SameStart().check, on_each_trained)


class FirstOfTwoRanks(Ranks):
    """The rank beside another one, which has trained nothing."""

    rank = 0
    size = 2

    def all_gather(self, value, purpose):
        return [value, {}]


def make_store(folder, *measures, settings=None, **options):
    return CoalitionStore(folder, measures or ["utility"], settings or {"a": 1}, **options)


def write_and_read_table(store):
    store.write_table(NAMES)
    return store._folder.with_name("coalitions.csv").read_bytes()


def leave_half_written_file(folder):
    (path, *_) = folder.glob("coalitions/0/*.pt")
    path.with_name(".another.pt.tmp").write_bytes(path.read_bytes()[:100])


def test_killed_training_resumes_and_its_table_equals_an_uninterrupted_one(tmp_path):
    whole_store = make_store(tmp_path / "whole")
    train_missing(TrainerThatSumsUtilities(), whole_store)

    folder = tmp_path / "killed"
    killed_trainer = TrainerThatSumsUtilities(max_fits=4)
    with pytest.raises(KeyboardInterrupt):
        train_missing(killed_trainer, make_store(folder))
    leave_half_written_file(folder)

    second_trainer = TrainerThatSumsUtilities()
    on_each_trained = Mock()
    store = make_store(folder)
    train_missing(second_trainer, store, on_each_trained)

    # The empty coalition needs no training.
    trained = [(), *killed_trainer.trained, *second_trainer.trained]
    assert sorted(trained) == sorted(ALL_COALITIONS)
    assert on_each_trained.call_count == len(second_trainer.trained)
    assert store.progress(0, ALL_COALITIONS) == "seed 0: 8 of 8 coalitions"
    assert write_and_read_table(store) == write_and_read_table(whole_store)


def test_table_for_people_has_members_names(tmp_path):
    store = make_store(tmp_path)
    train_missing(TrainerThatSumsUtilities(), store)

    store.write_table(NAMES)

    table = pandas.read_csv(tmp_path / "coalitions.csv")
    utilities = table.set_index("coalition")["utility"]
    assert list(table) == ["seed", "coalition", "round", "utility"]
    assert utilities["no clients"] == 0
    assert utilities["Lyon+Bergen"] == utility_of_members(PAIR)


def test_each_rank_trains_a_part_of_the_coalitions():
    trainer = TrainerThatSumsUtilities()
    store = make_store(None, ranks=FirstOfTwoRanks())

    train_missing(trainer, store)

    num_trained = len(trainer.trained)
    num_missing = len(store.missing(0, ALL_COALITIONS))
    # The empty coalition needs no training.
    assert num_trained + num_missing == len(ALL_COALITIONS) - 1
    assert abs(num_trained - num_missing) == 1


def test_error_of_failed_coalitions_can_be_pickled():
    error = FitsFailed({PAIR: FitFailed("a wrong shape")})

    copied_error = pickle.loads(pickle.dumps(error))

    message = "1 coalition failed to train, clients 0 and 2: a wrong shape."
    assert str(copied_error) == str(error) == message
    assert list(copied_error.failed) == [PAIR]


TRAINING_SEED = 7
MEASURES = ("per_class", "val_loss (min)")
SCORES_OF_ROUND_0 = {"per_class": [0.5, -0.25], "val_loss (min)": [1.5]}
SCORES_OF_ROUND_3 = {"per_class": [-0.75, 1.0], "val_loss (min)": [1e-9]}
SCORES = {0: SCORES_OF_ROUND_0, 3: SCORES_OF_ROUND_3}


def make_store_of_two_rounds(folder, **options):
    """Make a store of rounds 0 and 3, with a performance of two classes and one of a number."""
    store = make_store(folder, *MEASURES, **options)
    store.rounds = (0, 3)
    return store


def add_models(store, members, scores, **outputs):
    """Add the models of a coalition, which have the same outputs after each round."""
    models = {}
    for round_index, utilities in scores.items():
        models[round_index] = ScoredModel(utilities, outputs)
    store.add(TRAINING_SEED, members, models=models)


def missing_of(store, *coalitions):
    return store.missing(TRAINING_SEED, coalitions)


def test_scores_of_rounds_that_came_one_by_one_are_read_back_together(tmp_path):
    store = make_store_of_two_rounds(tmp_path)
    add_models(store, PAIR, {0: SCORES_OF_ROUND_0})
    add_models(store, PAIR, {3: SCORES_OF_ROUND_3})
    add_models(store, SINGLE, {0: SCORES_OF_ROUND_0})

    store_read = make_store_of_two_rounds(tmp_path)

    models_read = store_read.scores(TRAINING_SEED).models[PAIR]
    scores_read = {round_index: model.utilities for round_index, model in models_read.items()}
    assert scores_read == SCORES
    assert missing_of(store_read, SINGLE, PAIR, SINGLE) == [SINGLE]


def test_outputs_are_read_back_and_a_coalition_without_them_is_missing(tmp_path):
    outputs = torch.randn(5, 3)
    store = make_store_of_two_rounds(tmp_path, outputs=["per_class"])
    add_models(store, PAIR, SCORES, per_class=outputs, not_asked_for=outputs)
    add_models(store, SINGLE, SCORES)

    store_read = make_store_of_two_rounds(tmp_path, outputs=["per_class"])

    models_read = store_read.scores(TRAINING_SEED).models[PAIR]
    outputs_of_round_3 = models_read[3].outputs
    assert outputs_of_round_3.keys() == {"per_class"}
    assert torch.equal(outputs_of_round_3["per_class"], outputs)
    assert missing_of(store_read, PAIR, SINGLE) == [SINGLE]


def test_scores_of_models_in_64_bits_are_read_back_and_removed(tmp_path):
    outputs = {"per_class": torch.randn(5, 3)}
    store = make_store_of_two_rounds(tmp_path, outputs=["per_class"])
    add_models(store, PAIR, {0: SCORES_OF_ROUND_0}, **outputs)
    add_models(store, PAIR, {3: SCORES_OF_ROUND_3}, **outputs)
    in_double = {3: ScoredModel(SCORES_OF_ROUND_0, outputs)}

    store.add_in_double(TRAINING_SEED, PAIR, in_double)
    models = make_store_of_two_rounds(tmp_path).scores(TRAINING_SEED).models[PAIR]

    assert models[0].in_double is None
    assert models[3].utilities == SCORES_OF_ROUND_3
    assert models[3].in_double.utilities == SCORES_OF_ROUND_0
    assert torch.equal(models[3].in_double.outputs["per_class"], outputs["per_class"])

    store.discard_in_double(TRAINING_SEED)
    models = make_store_of_two_rounds(tmp_path).scores(TRAINING_SEED).models[PAIR]
    assert [models[0].in_double, models[3].in_double] == [None, None]
    assert models[3].utilities == SCORES_OF_ROUND_3


def test_no_kill_parts_the_scores_of_a_fit_from_those_in_64_bits(tmp_path, monkeypatch):
    store = make_store_of_two_rounds(tmp_path)
    models = [ScoredModel(SCORES_OF_ROUND_0), ScoredModel(SCORES_OF_ROUND_3)]
    in_double = [ScoredModel(SCORES_OF_ROUND_3), ScoredModel(SCORES_OF_ROUND_0)]
    result = FitResult(models, None, start_hash="start", in_double=in_double)
    monkeypatch.setattr(coalition_store, "replace_coalition", Mock(side_effect=KeyboardInterrupt))

    assert store.add_result(TRAINING_SEED, PAIR, result)

    read_models = make_store_of_two_rounds(tmp_path).scores(TRAINING_SEED).models[PAIR]
    assert read_models[0].in_double.utilities == SCORES_OF_ROUND_3
    assert read_models[3].in_double.utilities == SCORES_OF_ROUND_0


def test_scores_that_are_not_finite_stay_in_memory_only(tmp_path):
    scores_with_nan = {**SCORES_OF_ROUND_3, "val_loss (min)": [float("nan")]}
    store = make_store_of_two_rounds(tmp_path)

    add_models(store, SINGLE, {0: SCORES_OF_ROUND_0, 3: scores_with_nan})

    assert missing_of(store, SINGLE) == []
    store_read = make_store_of_two_rounds(tmp_path)
    assert missing_of(store_read, SINGLE) == [SINGLE]


def test_coalition_without_scores_by_another_measure_is_missing(tmp_path):
    first_store = make_store_of_two_rounds(tmp_path)
    add_models(first_store, PAIR, SCORES)

    store = make_store(tmp_path, *MEASURES, "another")
    store.rounds = (0, 3)

    assert missing_of(store, PAIR) == [PAIR]


def test_coalitions_of_other_settings_are_removed(tmp_path):
    first_store = make_store_of_two_rounds(tmp_path)
    add_models(first_store, PAIR, SCORES)

    other_store = make_store_of_two_rounds(tmp_path, settings={"a": 2})
    assert missing_of(other_store, PAIR) == [PAIR]

    add_models(other_store, SINGLE, SCORES)
    assert len(list(tmp_path.rglob("*.pt"))) == 1
    store_of_first_settings = make_store_of_two_rounds(tmp_path)
    assert missing_of(store_of_first_settings, PAIR) == [PAIR]


def test_folder_of_an_earlier_version_is_refused_and_unchanged(tmp_path):
    # Earlier versions had no folder of each seed.
    path = tmp_path / "coalitions" / "0_4f2a_3.pt"
    path.parent.mkdir()
    path.write_bytes(b"outputs")

    with refused("an earlier version of flsv has written it.*retrain with this version"):
        make_store(tmp_path)

    assert path.read_bytes() == b"outputs"


def test_folder_with_half_written_settings_is_used_as_an_empty_one(tmp_path):
    folder = tmp_path / "coalitions"
    folder.mkdir()
    (folder / ".settings.json.tmp").write_text('{"a"')

    assert read_settings(folder) == {}
    store = make_store_of_two_rounds(tmp_path)
    add_models(store, SINGLE, SCORES)

    assert missing_of(make_store_of_two_rounds(tmp_path), SINGLE) == []


def fail_to_write(*args, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


SCORES_OF_SINGLE = "the scores of client 1 with seed 7"


@pytest.mark.parametrize(
    ("failing_function", "warned_of", "missing_after_restart"),
    [
        ("write_settings", SCORES_OF_SINGLE, [SINGLE]),
        ("write_coalition", SCORES_OF_SINGLE, [SINGLE]),
        ("write_untrained", "the scores of untrained models", []),
    ],
)
def test_scores_stay_in_memory_and_are_named_if_the_disk_is_full(
    tmp_path, monkeypatch, failing_function, warned_of, missing_after_restart
):
    store = make_store_of_two_rounds(tmp_path)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(coalition_store, failing_function, fail_to_write)
        add_models(store, SINGLE, SCORES)
        store.add_untrained({})
    add_models(store, PAIR, SCORES)

    with warns(f"could not be stored: .*{warned_of}.*No space left"):
        store.write_table(NAMES)
    assert missing_of(store, SINGLE, PAIR) == []
    restarted_store = make_store_of_two_rounds(tmp_path)
    assert missing_of(restarted_store, SINGLE, PAIR) == missing_after_restart


def test_store_warns_if_its_table_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(coalition_store, "write_table", fail_to_write)
    with warns("table of the coalitions' scores could not be written.*No space left"):
        make_store(tmp_path).write_table(NAMES)


def test_killed_copy_of_coalitions_can_be_repeated(tmp_path, monkeypatch):
    run_folder = tmp_path / "run"
    copied_folder = tmp_path / "copy"
    add_models(make_store_of_two_rounds(run_folder), SINGLE, SCORES)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            copy_coalitions(run_folder, copied_folder)
    assert missing_of(make_store_of_two_rounds(copied_folder), SINGLE) == [SINGLE]

    copy_coalitions(run_folder, copied_folder)
    assert missing_of(make_store_of_two_rounds(copied_folder), SINGLE) == []


def test_discarded_coalitions_are_not_read_again(tmp_path):
    store = make_store_of_two_rounds(tmp_path)
    add_models(store, PAIR, SCORES)
    add_models(store, SINGLE, SCORES)

    store.discard(TRAINING_SEED, [SINGLE])

    store_read = make_store_of_two_rounds(tmp_path)
    assert missing_of(store, PAIR, SINGLE) == [SINGLE]
    assert missing_of(store_read, PAIR, SINGLE) == [SINGLE]


def add_utility(store, members, utility):
    add_models(store, members, {NO_ROUND: {"utility": [utility]}})


@pytest.mark.parametrize(
    ("earlier_grand_utility", "missing_singles"),
    [(0.75, []), (0.76, [SINGLE])],
    ids=["same last score", "another last score"],
)
def test_coalitions_are_taken_over_from_an_earlier_run_with_the_same_last_score(
    tmp_path, earlier_grand_utility, missing_singles
):
    all_clients = (0, 1)
    earlier_store = make_store(tmp_path / "earlier")
    add_utility(earlier_store, all_clients, earlier_grand_utility)
    add_utility(earlier_store, SINGLE, 0.5)
    store = make_store(tmp_path / "run", settings={"a": 1, "b": 2})
    add_utility(store, all_clients, 0.75)

    store.take_over(tmp_path / "earlier", Training(TRAINING_SEED, all_clients))

    assert missing_of(store, SINGLE) == missing_singles


def test_coalitions_of_many_clients_with_long_names_are_stored(tmp_path):
    all_clients = tuple(range(1000))
    all_but_one = tuple(range(999))
    store = make_store_of_two_rounds(tmp_path)
    add_models(store, all_clients, SCORES)
    add_models(store, all_but_one, SCORES)
    store.write_table([f"University Hospital number {client}" for client in all_clients])

    store_read = make_store_of_two_rounds(tmp_path)
    assert missing_of(store_read, all_clients, all_but_one) == []


def test_untrained_scores_are_read_back(tmp_path):
    scores_by_class = torch.rand(8, 2, dtype=torch.float64)
    losses = torch.rand(8, 1, dtype=torch.float64)
    store = make_store_of_two_rounds(tmp_path)
    store.add_untrained({"per_class": scores_by_class, "val_loss (min)": losses})

    scores_read = make_store_of_two_rounds(tmp_path).untrained

    assert torch.equal(scores_read["per_class"], scores_by_class)
    assert torch.equal(scores_read["val_loss (min)"], losses)
    assert read_untrained(tmp_path / "coalitions").keys() == scores_read.keys()
