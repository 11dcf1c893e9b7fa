"""Halvings of unlike players: against an enumeration, and what names and order may change."""

import itertools

import numpy as np
import pytest
import torch

from flsv.functional import few_coalitions
from flsv.functional.shapley import halvings
from flsv.functional.shapley.halvings import choose_halvings, has_halvings
from helpers import make_generator


def make_outputs(num_players, seed=0):
    generator = make_generator(seed)
    return torch.randn(num_players, 20, 3, generator=generator)


def names_of(num_players):
    return [f"site {player:02}" for player in range(num_players)]


def costs_by_hand(outputs):
    """Each partition's sum of cosines within its halves, ``{(half, other half): cost}``."""
    powers = np.exp(outputs.double().numpy())
    probabilities = powers / powers.sum(-1, keepdims=True)
    rows = probabilities.reshape(len(outputs), -1)
    rows = rows - rows.mean(0)
    players = range(len(outputs))
    costs = {}
    for half in itertools.combinations(players, len(outputs) // 2):
        other_half = tuple(player for player in players if player not in half)
        pairs = [
            *itertools.combinations(half, 2),
            *itertools.combinations(
                other_half,
                2,
            ),
        ]
        cosines = []
        for i, j in pairs:
            product_of_norms = np.linalg.norm(rows[i]) * np.linalg.norm(rows[j])
            cosines.append(rows[i] @ rows[j] / product_of_norms)
        costs[frozenset((half, other_half))] = sum(cosines)
    return costs


def partitions_of(masks):
    halves = [tuple(mask.nonzero().flatten().tolist()) for mask in masks]
    return [
        frozenset(pair)
        for pair in zip(
            halves[::2],
            halves[1::2],
        )
    ]


@pytest.mark.parametrize("num_players", [4, 5, 7])
def test_chosen_halvings_are_those_with_the_least_cosines(num_players):
    outputs = make_outputs(num_players)
    costs = costs_by_hand(outputs)
    expected = sorted(costs, key=costs.__getitem__)[:3]

    masks = choose_halvings(outputs, names_of(num_players), 3, logits=True)

    assert partitions_of(masks) == expected


def make_equal_outputs(num_players):
    """Only names decide between players with these."""
    return make_outputs(1).expand(num_players, -1, -1)


@pytest.mark.parametrize("num_players", [4, 5, 20])
@pytest.mark.parametrize("make", [make_outputs, make_equal_outputs])
def test_permuting_the_players_permutes_the_halvings(num_players, make):
    outputs = make(num_players)
    names = names_of(num_players)
    order = torch.randperm(num_players, generator=make_generator(3))
    permuted_names = [names[player] for player in order.tolist()]

    masks = choose_halvings(outputs, names, 2, logits=True)
    permuted_masks = choose_halvings(outputs[order], permuted_names, 2, logits=True)

    assert torch.equal(permuted_masks, masks[:, order])


def test_search_for_halvings_finds_the_best_of_all_partitions(monkeypatch):
    outputs = make_outputs(10)
    compared = choose_halvings(outputs, names_of(10), 2, logits=True)

    monkeypatch.setattr(halvings, "MAX_COMPARED", 0)
    searched = choose_halvings(outputs, names_of(10), 2, logits=True)

    assert torch.equal(searched[:2], compared[:2])


def test_halvings_of_players_with_one_name_raise():
    with pytest.raises(ValueError, match="3 distinct names"):
        choose_halvings(make_outputs(3), ["a", "b", "a"], logits=True)


def test_halvings_of_regressions_compare_outputs_without_a_softmax():
    outputs = torch.tensor(
        [
            [10.0, 0.0, 0.0],
            [0.0, 10.0, 0.0],
            [9.0, 0.0, 1.0],
            [1.0, 9.0, 0.0],
        ]
    )

    masks = choose_halvings(
        outputs,
        ["a", "b", "c", "d"],
        logits=False,
    )

    # Clients 0 and 2 are alike, so that each half has one of them.
    unlike_halves = [
        frozenset({(0, 1), (2, 3)}),
        frozenset({(0, 3), (1, 2)}),
    ]
    assert partitions_of(masks)[0] in unlike_halves


def test_has_halvings_is_true_of_clients_alone_with_pairs_of_halves_only():
    singles = few_coalitions(5, "singles")
    halves = choose_halvings(
        make_outputs(5),
        names_of(5),
        2,
        logits=True,
    )

    assert has_halvings(torch.cat([singles, halves]))
    assert not has_halvings(torch.cat([singles, halves[:-1]]))
    assert not has_halvings(halves)
