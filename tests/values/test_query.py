"""Values from a run's folder alone, by the query, are those that the metric has shown in the run, digit by digit."""

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from flsv import read_run
from flsv.functional import few_coalitions
from flsv.games.members import members_of
from flsv.games.output_score import OutputScore
from flsv.metrics import ShadowShapley
from flsv.sampling import UniformSampler
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


#: By name: the metric's options, the loop's, the measure and the measure of outputs, and the largest difference.
GAMES = {
    "each alone": ({"coalitions": "singles"}, {}, "accuracy", accuracy, 0),
    "all": ({"coalitions": "all"}, {}, "accuracy", accuracy, 0),
    "by class": (
        {"coalitions": "singles", "per_class": True},
        {},
        "per_class_accuracy",
        recalls,
        0,
    ),
    "sampler": (
        {"coalitions": "all"},
        {"sampler": UniformSampler(2)},
        "accuracy",
        accuracy,
        0,
    ),
    "logged": (
        {"coalitions": "singles", "performance": "val_loss", "mode": "min"},
        {},
        "val_loss (min)",
        None,
        0,
    ),
    "losses": (
        {"coalitions": "leave-one-out", "performance": "negative_loss"},
        {},
        "negative_loss",
        None,
        0,
    ),
    # The run sums losses by batch.
    "predicted losses": (
        {"coalitions": "singles", "performance": "negative_loss"},
        {},
        "negative_loss",
        negative_loss,
        2e-7,
    ),
}


class LogsItsLoss(Plain):
    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(inputs), labels))


def make_game(metric_options, loop_options, measure, score) -> Game:
    data = make_three_clients()
    data.setup("fit")
    output_score = None
    if score is not None:
        labels = torch.cat([labels for _inputs, labels in data.val_dataloader()])
        output_score = OutputScore(lambda outputs: score(outputs, labels), logits=True)
    return Game(
        few_coalitions(NUM_CLIENTS, metric_options["coalitions"]),
        range(ROUNDS),
        measure,
        weights=data.num_samples,
        score=output_score,
        averages="sampler" in loop_options,
        per_class=metric_options.get("per_class", False),
    )


def fit_game(folder, metric_options, loop_options):
    """Train the federation of a game, and its coalitions."""
    metric = ShadowShapley(every=1, **metric_options)
    module = LogsItsLoss(network(batch_norm=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(
            make_shadow_loop(metric, **loop_options),
            folder,
            module,
            data=make_three_clients(),
            rounds=ROUNDS,
        )


@pytest.mark.fast_rows("each alone")
@pytest.mark.parametrize("name", GAMES)
def test_values_of_a_folder_are_those_of_the_run(tmp_path, name):
    metric_options, loop_options, measure, score, tolerance = GAMES[name]
    fit_game(tmp_path, metric_options, loop_options)
    game = make_game(
        metric_options,
        loop_options,
        measure=measure,
        score=score,
    )

    table = values(tmp_path, game)

    rows = read_run(tmp_path).query("metric == 'shadow'")
    rows = rows.rename(columns={"low_over_seeds": "low", "high_over_seeds": "high"})
    keys = ["round", "client"]
    columns = ["value", "low", "high"]
    if game.per_class:
        table = table.melt(keys, var_name="class")
        keys.append("class")
        columns = ["value"]
    merged_rows = table.merge(
        rows,
        on=keys,
        suffixes=("", "_of_run"),
    )
    for column in columns:
        differences = merged_rows[column] - merged_rows[f"{column}_of_run"]
        known_differences = differences.dropna()
        assert len(known_differences) >= NUM_CLIENTS
        assert known_differences.abs().max() <= tolerance


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

    assert table["value"].tolist() == pytest.approx([0.2, 0.2, 0.2], rel=1e-14)  # float64
    seeds = [values_by_round(seed_scores, game)[0] for seed_scores in scores.values()]
    _mean, low, high = mean_over_seeds(seeds)
    assert table["low"].tolist() == low.tolist()
    assert table["high"].tolist() == high.tolist()


@pytest.mark.parametrize("averages", [False, True])
def test_rounds_have_the_values_that_they_have_if_all_rounds_are_valued(averages):
    masks = few_coalitions(NUM_CLIENTS, "all")
    generator = make_generator()
    models = {}
    for members in members_of(masks):
        rounds = range(12) if members else [NO_ROUND]
        models[members] = {
            index: ScoredModel({"accuracy": torch.rand(1, generator=generator).tolist()})
            for index in rounds
        }
    make_game_of_rounds = partial(Game, masks, measure="accuracy", averages=averages)

    all_values = values_by_round(SeedScores(models), make_game_of_rounds(range(12)))
    some_values = values_by_round(SeedScores(models), make_game_of_rounds([0, 4, 9, 10, 11]))

    # Means are over the rounds just before that have values, of which round 4 has none.
    compared_rounds = [0, 11] if averages else [*some_values]
    for index in compared_rounds:
        assert torch.equal(some_values[index].values, all_values[index].values)
    assert torch.equal(some_values[11].stderr, all_values[11].stderr)
    assert torch.equal(some_values[4].values, some_values[4].estimate)


def test_untrained_models_narrow_the_interval_only_if_their_scores_are_known():
    masks = few_coalitions(NUM_CLIENTS, "all")
    game = Game(masks, [0], "accuracy")
    utilities = utilities_of(masks, (0.1, 0.2, 0.3))
    untrained = {"accuracy": torch.full((8, 1), 0.1).double()}

    wide_table = values({0: make_scores(utilities)}, game)
    narrow_table = values({0: make_scores(utilities, untrained)}, game)

    assert (narrow_table["high"] < wide_table["high"]).all()


def test_game_with_an_infinite_utility_has_no_values_and_a_reason():
    masks = few_coalitions(NUM_CLIENTS, "all")
    utilities = {**utilities_of(masks, (0.1, 0.2, 0.3)), (1,): float("inf")}

    round_values = values_by_round(make_scores(utilities), Game(masks, [0], "accuracy"))[0]

    assert round_values.values.isnan().all()
    reason = round_values.evidence["why_no_values"]
    assert reason == "The coalitions [[1]] come to no finite performance."


def test_folder_without_coalitions_is_refused(tmp_path):
    with refused("no scores of coalitions: train them"):
        read_scores(tmp_path)
