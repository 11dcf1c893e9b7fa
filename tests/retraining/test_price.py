"""The choice of the coalitions that a run trains, by counted prices."""

import pytest
import torch

from flsv.functional import few_coalitions
from flsv.retraining.price import (
    ALL,
    DOUBLE,
    DOUBLE_ROWS,
    MAX_WORK_OF_ALL,
    MEGAFLOPS_OF_LARGE_ROWS,
    MEGAFLOPS_OF_STEP,
    MILLIONS_OF_ELEMENTS,
    SINGLES,
    PriceList,
    Request,
    RowTrial,
    choose,
    max_fits_of_retraining,
    num_groups,
    one_by_one,
)
from flsv.sampling import FullParticipation, UniformSampler
from flsv.values.designs import Halves

SMALL_NETWORK = RowTrial("", megaflops=0.05, num_elements=700, joins_clients=True)
CONVOLUTIONS = RowTrial("", megaflops=80.0, num_elements=60_000)
NOT_BATCHED = RowTrial("the optimizer is not known.")


def make_prices(num_clients, trial=NOT_BATCHED, clients_per_round=None):
    return PriceList([10] * num_clients, clients_per_round or num_clients, trial, num_rounds=20)


@pytest.mark.parametrize(
    ("max_fits", "num_clients", "expected_choice"),
    [
        (10, 4, ("all", 7)),
        (10, 5, ("pairs+leave-one-out", 9)),
        (15, 5, ("all", 15)),
        (10, 6, ("both", 6)),
        (4, 12, ("halves", 4)),
        (3.5, 12, ("halves", 3)),
        (2, 12, ("halves", 2)),
        (1.9, 12, ("singles", 1)),
        (None, 12, ("singles", 1)),
    ],
)
def test_choice_is_the_most_accurate_one_by_one_within_max_fits(
    max_fits, num_clients, expected_choice
):
    request = Request(None, max_fits, may_halve=True)

    choice = choose(request, make_prices(num_clients))

    assert (choice.design.name, choice.price) == expected_choice
    assert not choice.is_at_once


def test_halvings_are_as_many_as_the_price_allows():
    designs = [
        choose(Request(None, max_fits, may_halve=True), make_prices(12)).design
        for max_fits in (1, 2, 3, 4, 5)
    ]

    assert designs == [SINGLES, Halves(1), Halves(2), Halves(3), Halves(3)]


def test_no_halves_are_chosen_without_outputs():
    choice = choose(Request(None, 3.0), make_prices(12))

    assert choice.design.name == "singles"


@pytest.mark.parametrize("num_clients", [2, 5, 8])
def test_all_coalitions_of_small_networks_train_at_once_by_default(num_clients):
    choice = choose(Request(None, None), make_prices(num_clients, SMALL_NETWORK))

    assert choice.design.name == "all"
    assert choice.price <= 2
    # Two clients have no coalitions besides each alone, which cost one run one by one.
    assert choice.is_at_once == (num_clients > 2)


@pytest.mark.parametrize(("trial", "num_clients"), [(CONVOLUTIONS, 5), (NOT_BATCHED, 5)])
def test_each_client_trains_alone_by_default_if_rows_are_dear_or_refused(trial, num_clients):
    choice = choose(Request(None, None, may_halve=True), make_prices(num_clients, trial))

    assert (choice.design.name, choice.is_at_once, choice.price) == ("singles", False, 1)


def test_price_at_once_has_the_scores_of_all_models():
    masks = few_coalitions(5, "all")
    prices = make_prices(5, SMALL_NETWORK)
    with_scores = PriceList([10] * 5, 5, SMALL_NETWORK, num_rounds=20, num_scored_batches=1_000)

    assert with_scores.at_once(masks) > prices.at_once(masks)
    assert with_scores.num_valued_rounds(masks) == 3
    assert prices.num_valued_rounds(masks) == 10


def test_coalitions_that_are_asked_for_train_at_once_if_this_is_cheaper():
    is_at_once = {
        trial: choose(Request(ALL, None), make_prices(6, trial)).is_at_once
        for trial in (SMALL_NETWORK, NOT_BATCHED)
    }

    assert is_at_once == {SMALL_NETWORK: True, NOT_BATCHED: False}


def test_halves_that_are_asked_for_train_one_by_one():
    choice = choose(Request(Halves(2), None), make_prices(6, SMALL_NETWORK))

    assert (choice.is_at_once, choice.design.halvings, choice.price) == (False, 2, 3)


@pytest.mark.parametrize(
    ("sampler", "num_clients", "trial", "expected_design"),
    [
        (FullParticipation(), 5, SMALL_NETWORK, "all"),
        (FullParticipation(), 5, NOT_BATCHED, "both"),
        (FullParticipation(), 3, NOT_BATCHED, "all"),  # each alone, and all but one
        (UniformSampler(2), 6, NOT_BATCHED, "both"),
    ],
)
def test_retraining_is_exact_at_once_and_else_trains_each_alone_and_all_but_one(
    sampler, num_clients, trial, expected_design
):
    clients_per_round = getattr(sampler, "cohort_size", num_clients)
    prices = make_prices(num_clients, trial, clients_per_round)
    max_fits = max_fits_of_retraining(sampler, num_clients)

    choice = choose(Request(None, max_fits, may_halve=True), prices)

    assert choice.design.name == expected_design
    assert choice.price <= max_fits


def test_coalitions_that_cannot_train_at_once_after_all_are_chosen_one_by_one():
    choice = one_by_one(Request(None, 6.0), make_prices(6, SMALL_NETWORK))

    assert (choice.design.name, choice.is_at_once) == ("both", False)


def make_small_prices(num_clients, trial, num_rounds=5):
    return PriceList([10] * num_clients, num_clients, trial, num_rounds=num_rounds)


COUNTED = NOT_BATCHED._replace(megaflops=0.05, num_elements=700)


@pytest.mark.parametrize(
    ("max_fits", "num_clients", "trial", "num_rounds", "expected_design"),
    [
        (None, 5, COUNTED, 5, "all"),
        (None, 5, COUNTED, 20, "singles"),  # as many runs, but more work
        (None, 7, COUNTED, 5, "singles"),
        (None, 5, NOT_BATCHED, 5, "singles"),  # it is not known how much work
        (None, 5, CONVOLUTIONS._replace(joins_clients=True), 2, "all"),
        (3, 5, COUNTED, 5, "all"),
        (1, 5, COUNTED, 5, "singles"),
    ],
)
def test_all_coalitions_train_by_default_if_they_are_little_work(
    max_fits, num_clients, trial, num_rounds, expected_design
):
    prices = make_small_prices(num_clients, trial, num_rounds)

    choice = choose(Request(None, max_fits), prices)

    assert choice.design.name == expected_design
    masks = few_coalitions(num_clients, "all")
    is_little_work = prices.work(masks, choice.is_at_once) <= MAX_WORK_OF_ALL
    assert is_little_work == (expected_design == "all" or max_fits == 1)
    assert is_little_work or choice.price == 1


def test_scores_on_many_samples_are_work():
    prices = PriceList([10] * 5, 5, COUNTED, num_rounds=5, num_scored_batches=100_000)
    assert choose(Request(None, None), prices).design.name == "singles"


def test_each_group_of_large_models_trains_all_clients_and_both_witnesses():
    large = RowTrial("", megaflops=400.0, num_elements=4_000_000, joins_clients=True)
    masks = few_coalitions(6, "all")
    in_groups = make_small_prices(6, large).at_once(masks)

    assert num_groups(len(masks), 4_000_000, 6) == 32
    # 186 rows of members and 32 times 8 others. In one group there would be 194.
    rows_of_run = 6 * (1 + 400 / MEGAFLOPS_OF_STEP + 4 / MILLIONS_OF_ELEMENTS)
    assert in_groups > (186 + 32 * 8) * 400 / MEGAFLOPS_OF_LARGE_ROWS / rows_of_run


def test_rows_of_large_models_are_no_cheaper_than_single_models():
    """As measured: a group of large6, two coalitions beside all clients and two witnesses, takes 3.3 runs."""
    large = RowTrial("", megaflops=368.0, num_elements=3_880_510, joins_clients=True)
    prices = PriceList([4] * 6, 6, large, num_rounds=2, num_scored_batches=7)
    pairs = torch.eye(6).bool()[[0, 2]] | torch.eye(6).bool()[[1, 3]]

    price_of_witnesses = 2 / 6
    assert prices.at_once(pairs) - price_of_witnesses == pytest.approx(3.3, rel=0.15)


def test_trainings_in_64_bits_have_their_price():
    enlarges_rounding = SMALL_NETWORK._replace(enlarges_rounding=True)
    masks = few_coalitions(5, "all")
    price = make_prices(5, SMALL_NETWORK).at_once(masks)
    of_witnesses = 2 / 5
    of_rows = price - of_witnesses
    expected_price = price + DOUBLE_ROWS * of_rows + DOUBLE * (1 + of_witnesses)
    assert make_prices(5, enlarges_rounding).at_once(masks) == pytest.approx(expected_price)
