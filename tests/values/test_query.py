"""Values from a run's folder alone, by the query, are those that the metric has shown in the run, digit by digit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv import read_run
from flsv.functional import few_coalitions
from flsv.functional.shapley.predicted_outputs import OutputMeasure
from flsv.games.members import members_of
from flsv.metrics import ShadowShapley
from flsv.sampling import ClientSampler, UniformSampler
from flsv.values.coalition_files import (
    NO_ROUND,
    ScoredModel,
)
from flsv.values.query import (
    Game,
    SeedScores,
    mean_over_seeds,
    read_scores,
    values,
    values_by_round,
)
from helpers import make_generator, refused
from helpers.coalitions_by_hand import make_shadow_loop, make_three_clients
from helpers.data import CLASSES
from helpers.fits import fit
from helpers.models import Plain, network

ROUNDS = 3
NUM_CLIENTS = 3


def hits(outputs: Tensor, labels: Tensor) -> Tensor:
    is_right = outputs.argmax(-1) == labels
    return is_right.double()


def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    return hits(outputs, labels).mean(-1)


def recalls(outputs: Tensor, labels: Tensor) -> Tensor:
    recalls_by_class = []
    for label in range(CLASSES):
        hits_of_class = hits(outputs, labels)[:, labels == label]
        recalls_by_class.append(hits_of_class.mean(-1))
    return torch.stack(recalls_by_class, -1)


def negative_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    losses = []
    for logits in outputs.double():
        losses.append(nn.functional.cross_entropy(logits, labels))
    return -torch.stack(losses)


@dataclass
class GameOfRun:
    """A game of coalitions, as a run's metric and loop describe it."""

    metric: dict[str, Any]
    measure: str
    #: The measure as a function of outputs and labels, if utilities of further coalitions are predicted.
    score: Callable[[Tensor, Tensor], Tensor] | None
    sampler: ClientSampler | None = None
    #: The largest difference from the run's values.
    tolerance: float = 0.0


GAMES = {
    "singles": GameOfRun({"coalitions": "singles"}, "accuracy", accuracy),
    "all": GameOfRun({"coalitions": "all"}, "accuracy", accuracy),
    "sampler": GameOfRun(
        {"coalitions": "all"},
        "accuracy",
        accuracy,
        sampler=UniformSampler(2),
    ),
    "logged": GameOfRun(
        {"coalitions": "singles", "performance": "val_loss", "mode": "min"},
        "val_loss (min)",
        score=None,
    ),
    "losses": GameOfRun(
        {"coalitions": "leave-one-out", "performance": "negative_loss"},
        "negative_loss",
        score=None,
    ),
    # The run sums losses by batch.
    "predicted losses": GameOfRun(
        {"coalitions": "singles", "performance": "negative_loss"},
        "negative_loss",
        negative_loss,
        tolerance=2e-7,
    ),
}


GAME_BY_CLASS = GameOfRun(
    {"coalitions": "singles", "per_class": True},
    "per_class_accuracy",
    recalls,
)


class ModuleThatLogsItsLoss(Plain):
    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("val_loss", loss)


def make_output_measure(score, data) -> OutputMeasure:
    labels = torch.cat([labels for _inputs, labels in data.val_dataloader()])
    return OutputMeasure(lambda outputs: score(outputs, labels), logits=True)


def make_game(game_of_run) -> Game:
    data = make_three_clients()
    data.setup("fit")
    score = game_of_run.score
    return Game(
        few_coalitions(NUM_CLIENTS, game_of_run.metric["coalitions"]),
        range(ROUNDS),
        game_of_run.measure,
        weights=data.num_samples,
        of_outputs=None if score is None else make_output_measure(score, data),
        averages=game_of_run.sampler is not None,
        per_class=game_of_run.metric.get("per_class", False),
    )


def fit_and_read_rows(folder, game_of_run):
    """Train the federation of a game, and its coalitions. Return the rows of the metric."""
    metric = ShadowShapley(every=1, **game_of_run.metric)
    loop = make_shadow_loop(metric, sampler=game_of_run.sampler)
    module = ModuleThatLogsItsLoss(network(batch_norm=False))
    fit(loop, folder, module, make_three_clients(), rounds=ROUNDS)

    rows = read_run(folder).query("metric == 'shadow'")
    return rows.rename(columns={"low_over_seeds": "low", "high_over_seeds": "high"})


def assert_equal_columns(table, rows, keys, columns, tolerance):
    """Compare the numbers that both tables have, of all clients at least."""
    merged_rows = table.merge(rows, on=keys, suffixes=("", "_of_run"))
    for column in columns:
        differences = merged_rows[column] - merged_rows[f"{column}_of_run"]
        known_differences = differences.dropna()
        assert len(known_differences) >= NUM_CLIENTS
        assert known_differences.abs().max() <= tolerance


@pytest.mark.by_turn
@pytest.mark.filterwarnings("ignore")
@pytest.mark.fast_rows("singles")
@pytest.mark.parametrize("game_of_run", GAMES.values(), ids=GAMES)
def test_values_of_a_folder_are_those_of_the_run(tmp_path, game_of_run):
    rows = fit_and_read_rows(tmp_path, game_of_run)

    table = values(tmp_path, make_game(game_of_run))

    assert_equal_columns(
        table,
        rows,
        keys=["round", "client"],
        columns=["value", "low", "high"],
        tolerance=game_of_run.tolerance,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_values_of_a_folder_by_class_are_those_of_the_run(tmp_path):
    rows = fit_and_read_rows(tmp_path, GAME_BY_CLASS)

    table = values(tmp_path, make_game(GAME_BY_CLASS))

    assert_equal_columns(
        table.melt(["round", "client"], var_name="class"),
        rows,
        keys=["round", "client", "class"],
        columns=["value"],
        tolerance=0,
    )


def make_scores(utility_by_members, untrained=None) -> SeedScores:
    models = {}
    for members, utility in utility_by_members.items():
        round_index = 0 if members else NO_ROUND
        models[members] = {round_index: ScoredModel({"accuracy": [utility]})}
    return SeedScores(models, untrained or {})


def utilities_of(masks, gains) -> dict[tuple[int, ...], float]:
    utilities = {}
    for members in members_of(masks):
        gains_of_members = [gains[client] for client in members]
        utilities[members] = float(sum(gains_of_members))
    return utilities


def test_means_over_seeds_are_those_of_the_seeds_values():
    masks = few_coalitions(NUM_CLIENTS, "all")
    game = Game(masks, [0], "accuracy")
    scores = {
        0: make_scores(utilities_of(masks, (0.1, 0.2, 0.3))),
        1: make_scores(utilities_of(masks, (0.3, 0.2, 0.1))),
    }

    table = values(scores, game)

    rounding_of_float64 = 1e-14
    assert table["value"].tolist() == pytest.approx([0.2] * 3, rel=rounding_of_float64)
    values_of_seeds = []
    for seed_scores in scores.values():
        values_of_seeds.append(values_by_round(seed_scores, game)[0])
    mean_values = mean_over_seeds(values_of_seeds)
    assert table["low"].tolist() == mean_values.low.tolist()
    assert table["high"].tolist() == mean_values.high.tolist()


@pytest.mark.parametrize("averages", [False, True])
def test_values_of_a_round_do_not_depend_on_which_rounds_are_valued(averages):
    masks = few_coalitions(NUM_CLIENTS, "all")
    generator = make_generator()
    models = {}
    for members in members_of(masks):
        models[members] = {}
        for index in range(12) if members else [NO_ROUND]:
            accuracy_of_model = torch.rand(1, generator=generator)
            models[members][index] = ScoredModel({"accuracy": accuracy_of_model.tolist()})
    make_game_of_rounds = partial(Game, masks, measure="accuracy", averages=averages)
    some_rounds = [0, 4, 9, 10, 11]

    all_values = values_by_round(SeedScores(models), make_game_of_rounds(range(12)))
    some_values = values_by_round(SeedScores(models), make_game_of_rounds(some_rounds))

    # A mean is over three rounds with values. Before round 4, rounds 2 and 3 have none.
    compared_rounds = {False: some_rounds, True: [0, 11]}
    for index in compared_rounds[averages]:
        assert torch.equal(some_values[index].value, all_values[index].value)
    assert torch.equal(some_values[11].half_width, all_values[11].half_width)
    values_of_one_round = values_by_round(SeedScores(models), make_game_of_rounds([4]))
    assert torch.equal(some_values[4].value, values_of_one_round[4].value)


def test_untrained_models_narrow_the_interval_only_if_their_scores_are_known():
    masks = few_coalitions(NUM_CLIENTS, "all")
    game = Game(masks, [0], "accuracy")
    utilities = utilities_of(masks, (0.1, 0.2, 0.3))
    untrained = {"accuracy": torch.full((8, 1), 0.1).double()}

    wide_table = values({0: make_scores(utilities)}, game)
    narrow_table = values({0: make_scores(utilities, untrained)}, game)

    assert (narrow_table["high"] < wide_table["high"]).all()


def test_intervals_include_what_rounding_does_to_values():
    masks = few_coalitions(NUM_CLIENTS, "all")
    game = Game(masks, [0], "accuracy")
    models = make_scores(utilities_of(masks, (0.1, 0.2, 0.3))).models
    models_in_double = make_scores(utilities_of(masks, (0.1, 0.26, 0.24))).models
    both = {
        members: {
            index: replace(model, in_double=models_in_double[members][index])
            for index, model in models_of_coalition.items()
        }
        for members, models_of_coalition in models.items()
    }

    plain = values_by_round(SeedScores(models), game)[0]
    after_rounding = values_by_round(SeedScores(both), game)[0]

    assert torch.equal(after_rounding.value, plain.value)
    differences = [0.0, 0.06, 0.06]
    assert after_rounding.evidence["rounding"] == pytest.approx(differences, abs=1e-12)
    widths = (plain.half_width.square() + torch.tensor(differences).square()).sqrt()
    torch.testing.assert_close(after_rounding.half_width, widths, rtol=1e-6, atol=0)
    # The last two clients change their places, so their intervals overlap.
    assert after_rounding.high[1] > after_rounding.low[2]


def test_game_with_an_infinite_utility_has_no_values_and_a_reason():
    masks = few_coalitions(NUM_CLIENTS, "all")
    utilities = {**utilities_of(masks, (0.1, 0.2, 0.3)), (1,): float("inf")}

    round_values = values_by_round(make_scores(utilities), Game(masks, [0], "accuracy"))[0]

    assert round_values.value.isnan().all()
    assert round_values.missing == "The coalitions [[1]] come to no finite performance."


def test_folder_without_coalitions_is_refused(tmp_path):
    with refused("no scores of coalitions: train them"):
        read_scores(tmp_path)
