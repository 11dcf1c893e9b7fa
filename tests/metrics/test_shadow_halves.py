"""Designs of coalitions: halves, which are chosen from each client alone and trained then, and one of one's own."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import TensorDataset
from values.test_designs import Ring

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, Splits
from flsv.functional import choose_halvings, few_coalitions
from flsv.metrics import ShadowShapley
from flsv.metrics.coalitions.design import equivalent_runs
from flsv.values.designs import Halves
from helpers import make_generator, refused
from helpers.data import CLASSES, FEATURES
from helpers.fits import assert_resumes, fit
from helpers.models import Plainest
from helpers.retrained import stored_coalitions

NUM_CLIENTS = 5
ROUNDS = 2


def make_data():
    """Five clients, two of which have labels of their own."""
    generator = make_generator()
    centers = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    clients = {}
    for client in range(NUM_CLIENTS):
        num_samples = 24 + 8 * client
        labels = torch.randint(CLASSES, (num_samples,), generator=generator)
        if client < 2:
            labels = labels % 2
        noise = torch.randn(num_samples, FEATURES, generator=generator)
        clients[f"site {client}"] = TensorDataset(centers[labels] + noise, labels)
    return FederatedDataModule(clients=clients, batch_size=7, splits=Splits(server_val=0.3))


def make_loop(metric, **options):
    return FederatedLoop(metrics={"shadow": metric}, seed=3, **options)


@pytest.mark.slow
def test_values_of_chosen_halves_are_those_of_the_same_coalitions_as_a_list(tmp_path):
    halvings = 2
    loop = make_loop(ShadowShapley(coalitions="halves", halvings=halvings))

    fit(loop, tmp_path / "halves", Plainest(), make_data(), ROUNDS)

    coalitions = stored_coalitions(tmp_path / "halves")
    singles = {coalition for coalition in coalitions if len(coalition) == 1}
    halves = coalitions - singles
    other_halves = {all_clients_but(half) for half in halves}
    assert len(singles) == NUM_CLIENTS
    assert len(halves) == 2 * halvings
    assert halves == other_halves

    loop_of_list = make_loop(ShadowShapley(coalitions=sorted(coalitions)))
    fit(loop_of_list, tmp_path / "list", Plainest(), make_data(), ROUNDS)
    metric = loop.metrics["shadow"]
    metric_of_list = loop_of_list.metrics["shadow"]
    assert_close(metric.compute(), metric_of_list.compute(), rtol=0, atol=1e-6)
    assert_close(metric.half_widths, metric_of_list.half_widths, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_design_of_ones_own_is_trained_as_the_list_of_its_coalitions(tmp_path):
    ring = [[client] for client in range(NUM_CLIENTS)]
    ring += [[client, (client + 1) % NUM_CLIENTS] for client in range(NUM_CLIENTS)]
    values = []
    for name, coalitions in (("design", Ring()), ("list", ring)):
        loop = make_loop(ShadowShapley(coalitions=coalitions))
        fit(loop, tmp_path / name, Plainest(), make_data(), ROUNDS)
        values.append(loop.metrics["shadow"].result())

    of_design, of_list = values
    assert len(of_design.evidence["listed"]) == 2 + len(ring)
    assert_close(of_design.value, of_list.value, rtol=0, atol=1e-6)


def all_clients_but(members):
    return tuple(client for client in range(NUM_CLIENTS) if client not in members)


def test_halves_are_chosen_by_the_outputs_of_each_client_alone():
    design = ShadowShapley(coalitions="halves", halvings=2).design
    # The empty coalition, that of all clients, and each client alone.
    masks = few_coalitions(NUM_CLIENTS, "singles")
    outputs = torch.randn(len(masks), 10, CLASSES)
    outputs_of_singles = outputs[2:]
    other_order = torch.tensor([0, 1, 4, 6, 2, 5, 3])
    names = [f"site {client}" for client in range(NUM_CLIENTS)]
    next_masks = partial(design.next_masks, logits=True, names=names, seed=0)

    halves = next_masks(masks[other_order], outputs[other_order])

    expected_halves = choose_halvings(outputs_of_singles, names, 2, logits=True)
    assert torch.equal(halves, expected_halves)
    all_masks = torch.cat([masks, halves])
    outputs_of_halves = torch.randn(len(halves), 10, CLASSES)
    all_outputs = torch.cat([outputs, outputs_of_halves])
    assert len(next_masks(all_masks, all_outputs)) == 0


@pytest.mark.parametrize(("num_clients", "halvings"), [(4, 1), (5, 2), (8, 3)])
def test_cost_of_a_halving_is_that_of_one_more_run(num_clients, halvings):
    masks = Halves(halvings).planned_masks(num_clients)

    assert equivalent_runs(masks) == pytest.approx(1 + halvings)


@pytest.mark.slow
def test_resumed_run_chooses_the_same_halves(tmp_path):
    assert_resumes(
        lambda: make_loop(ShadowShapley(coalitions="halves")),
        tmp_path,
        Plainest,
        make_data,
        rounds=(1, 2),
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"coalitions": "singles", "halvings": 2}, 'only with coalitions="halves"'),
        (
            {"coalitions": "halves", "evaluators": "clients"},
            "cannot be combined with evaluators=.clients., because halves",
        ),
    ],
)
def test_shadow_shapley_with_options_that_do_not_fit_halves_is_refused(options, reason):
    with refused(reason):
        ShadowShapley(**options)


def test_halves_by_a_logged_performance_are_refused_before_training(tmp_path):
    metric = ShadowShapley(coalitions="halves", performance="val_acc", mode="max")

    with refused("chosen by the outputs"):
        fit(make_loop(metric), tmp_path, Plainest(), make_data(), ROUNDS)


@pytest.mark.parametrize(
    "options", [{}, {"coalitions": "halves"}, {"coalitions": "halves", "halvings": 1}]
)
def test_shadow_shapley_is_shown_as_it_was_given(options):
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())

    assert repr(ShadowShapley(**options)) == f"ShadowShapley({arguments})"
