"""Halves, and the two games in which nothing is fitted, against numbers of the study that proposed them.

The study's own code has computed them in float64, from the outputs of the same three federations.
"""

import pytest
import torch

from flsv.functional import choose_halvings
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.halving_games import blocks, transported_interpolation
from flsv.functional.shapley.mixtures import TrainedOutputs
from helpers.halving_federations import make_federation

HALVES = {
    "one_class": {(0, 3), (1, 2)},
    "sizes": {(0, 2, 4), (1, 3)},
    "two_classes": {(0, 4, 5), (1, 2, 3)},
}
VALUES = {
    ("one_class", transported_interpolation): [
        1.214682231,
        1.159431842,
        -0.243613555,
        -0.254242867,
    ],
    ("one_class", blocks): [
        1.118546189,
        1.059247967,
        -0.123850772,
        -0.177685733,
    ],
    ("sizes", transported_interpolation): [
        0.326236280,
        0.333182677,
        0.329666520,
        0.419533917,
        0.467638258,
    ],
    ("sizes", blocks): [
        0.323114271,
        0.331921103,
        0.329810908,
        0.422356525,
        0.469054844,
    ],
    ("two_classes", transported_interpolation): [
        0.749927352,
        0.228530861,
        0.056519506,
        0.530776087,
        0.379586076,
        -0.069082232,
    ],
    ("two_classes", blocks): [
        0.702529176,
        0.197513936,
        -0.013753822,
        0.712299220,
        0.265338229,
        0.012330912,
    ],
}


def chosen_halves(federation):
    alone = torch.eye(federation.num_clients, dtype=torch.bool)
    outputs = torch.stack([federation.outputs(mask) for mask in alone])
    names = [f"client {client}" for client in range(federation.num_clients)]
    return choose_halvings(outputs, names, logits=True)


@pytest.mark.parametrize("name", HALVES)
def test_halves_are_those_of_the_study(name):
    halves = chosen_halves(make_federation(name))

    members = {tuple(mask.nonzero().flatten().tolist()) for mask in halves}
    assert members == HALVES[name]


@pytest.mark.parametrize(("name", "game"), VALUES)
def test_values_of_a_game_are_those_of_the_study(name, game):
    federation = make_federation(name)
    num_clients = federation.num_clients
    masks = torch.cat(
        [
            torch.eye(num_clients, dtype=torch.bool),
            chosen_halves(federation),
            torch.ones(1, num_clients, dtype=torch.bool),
        ]
    )
    outputs = torch.stack([federation.outputs(mask) for mask in masks])
    trained = TrainedOutputs(
        masks=masks,
        outputs=outputs,
        weights=federation.sizes,
        logits=True,
    )
    every_mask = all_coalitions(num_clients)
    empty_outputs = federation.outputs(every_mask[0])[None]
    table = torch.cat(
        [
            federation.score(empty_outputs),
            federation.score(game(trained)(every_mask[1:])),
        ]
    )
    numbers = (masks.long() * 2 ** torch.arange(num_clients)).sum(1)
    table[numbers] = federation.score(outputs)

    values = shapley_of_table(table[:, None])[:, 0]

    expected = torch.tensor(VALUES[name, game], dtype=torch.float64)
    torch.testing.assert_close(
        values,
        expected,
        rtol=0,
        atol=1e-6,
    )
