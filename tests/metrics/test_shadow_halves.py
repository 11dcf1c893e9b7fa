"""ShadowShapley(coalitions="halves"): halves are chosen from each client alone, and trained then."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, Splits
from flsv.functional import choose_halvings, few_coalitions
from flsv.metrics import ShadowShapley
from flsv.metrics.coalitions.design import coalition_masks, equivalent_runs, with_any_halves
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
        labels = torch.randint(
            CLASSES,
            (24 + 8 * client,),
            generator=generator,
        )
        if client < 2:
            labels = labels % 2
        samples = centers[labels] + torch.randn(
            len(labels),
            FEATURES,
            generator=generator,
        )
        clients[f"site {client}"] = TensorDataset(samples, labels)
    return FederatedDataModule(
        clients=clients,
        batch_size=7,
        splits=Splits(server_val=0.3),
    )


def make_loop(metric, **options):
    return FederatedLoop(metrics={"shadow": metric}, seed=3, **options)


@pytest.mark.slow
def test_values_are_those_of_the_same_coalitions_named_before(tmp_path):
    halvings = 2
    loop = make_loop(ShadowShapley(coalitions="halves", halvings=halvings))

    fit(loop, tmp_path / "halves", Plainest(), make_data(), ROUNDS)

    coalitions = stored_coalitions(tmp_path / "halves")
    everybody = set(range(NUM_CLIENTS))
    halves = [coalition for coalition in coalitions if len(coalition) > 1]
    assert len(coalitions) - len(halves) == NUM_CLIENTS
    assert len(halves) == 2 * halvings
    assert all(tuple(sorted(everybody - set(half))) in coalitions for half in halves)

    loop_of_named = make_loop(ShadowShapley(coalitions=sorted(coalitions)))
    fit(loop_of_named, tmp_path / "named", Plainest(), make_data(), ROUNDS)
    metric = loop.metrics["shadow"]
    metric_of_named = loop_of_named.metrics["shadow"]
    assert_close(
        metric.compute(),
        metric_of_named.compute(),
        rtol=0,
        atol=1e-6,
    )
    assert_close(metric.errors, metric_of_named.errors, rtol=0, atol=1e-6)


def test_the_halves_are_those_of_the_outputs_of_each_client_alone():
    metric = ShadowShapley(coalitions="halves", halvings=2)
    generator = make_generator(1)
    masks = few_coalitions(NUM_CLIENTS, "singles")
    order = torch.tensor([0, 1, 4, 6, 2, 5, 3])  # clients in another order
    outputs = torch.randn(len(masks), 10, CLASSES, generator=generator)
    names = [f"site {client}" for client in range(NUM_CLIENTS)]
    expected = choose_halvings(outputs[2:], names, 2, logits=True)

    chosen = metric.next_coalitions(
        masks[order],
        outputs[order],
        logits=True,
        names=names,
        seed=0,
    )

    assert torch.equal(chosen, expected)
    all_masks = torch.cat([masks, chosen])
    all_outputs = torch.cat([outputs, outputs[:4]])
    none_left = metric.next_coalitions(
        all_masks,
        all_outputs,
        logits=True,
        names=names,
        seed=0,
    )
    assert len(none_left) == 0


@pytest.mark.parametrize("halvings", [1, 2, 3])
@pytest.mark.parametrize("num_clients", [4, 5, 8])
def test_a_halving_costs_one_more_run(num_clients, halvings):
    masks = with_any_halves(coalition_masks("halves", num_clients), halvings)

    assert equivalent_runs(masks) == pytest.approx(1 + halvings)


@pytest.mark.slow
def test_a_resumed_run_chooses_the_same_halves(tmp_path):
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
def test_options_that_do_not_fit_are_refused(options, reason):
    with refused(reason):
        ShadowShapley(**options)


def test_logged_values_are_refused_before_training(tmp_path):
    metric = ShadowShapley(coalitions="halves", performance="val_acc", mode="max")

    with refused("chosen by the outputs"):
        fit(make_loop(metric), tmp_path, Plainest(), make_data(), ROUNDS)
