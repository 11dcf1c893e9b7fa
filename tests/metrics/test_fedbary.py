"""FedBary's metrics: distances and flagged samples, in and outside a federation."""

import pytest
import torch
from torch.testing import assert_close

from flsv.federation import FederatedLoop
from flsv.metrics import CalibratedOTGradient, WassersteinContribution
from flsv.valuation import FedBary, clients_of, sample_values, server_of
from helpers import make_generator, refused
from helpers.data import toy_data
from helpers.fits import KeepsRounds, all_samples, fit
from helpers.models import Plain

CHEAP = {"support": 6, "iterations": 4}


def draw_samples(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_samples, 4, generator=make_generator(seed))
    return x, torch.arange(num_samples) % 2


def distances_after_rounds(every: int, cohorts: dict[int, list[int]]) -> list[torch.Tensor]:
    """Return the distances after each round. ``cohorts`` has the clients of a round by its index."""
    samples = [draw_samples(20, seed) for seed in range(4)]
    server = server_of(*samples[0])
    clients = clients_of(samples[1:])
    metric = WassersteinContribution(3, features="pixels", every=every, **CHEAP)
    distances = []
    for index, cohort in cohorts.items():
        metric.update(
            torch.tensor(cohort),
            [clients[client] for client in cohort],
            server,
            round_index=index,
            generator=make_generator(index),
        )
        distances.append(metric.diagnostics()["distance"])

    assert metric.rounds == len(cohorts)
    return distances


def test_wasserstein_contribution_every_other_round_keeps_its_values_between():
    cohort = [0, 1]

    distances = distances_after_rounds(every=2, cohorts={0: cohort, 1: cohort, 2: cohort})

    after_round_0, after_round_1, after_round_2 = [of_round[cohort] for of_round in distances]
    assert torch.equal(after_round_1, after_round_0)
    assert not torch.equal(after_round_2, after_round_1)


def test_wasserstein_contribution_measured_once_measures_newcomers_later():
    newcomer = 2
    after_round_3, after_round_4 = distances_after_rounds(
        every=0, cohorts={3: [0, 1], 4: [1, newcomer]}
    )

    assert torch.equal(after_round_4[:newcomer], after_round_3[:newcomer])
    assert after_round_4[newcomer].isfinite()


def test_default_support_follows_the_smallest_client_even_if_absent():
    sizes = torch.tensor([60, 60, 25])
    clients = clients_of([draw_samples(60, seed=1), draw_samples(60, seed=2)])
    server = server_of(*draw_samples(20, seed=0))
    by_default = WassersteinContribution(3, features="pixels")
    by_default.check(sizes)  # sets the support

    safe_support = (25 - 1) // 2  # below half of the smallest client's samples
    with_support = WassersteinContribution(3, features="pixels", support=safe_support)

    present_clients = torch.tensor([0, 1])
    for metric in (by_default, with_support):
        metric.update(present_clients, clients, server, generator=make_generator())

    distances = by_default.diagnostics()["distance"]
    expected = with_support.diagnostics()["distance"]
    assert_close(distances, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("metric_class", [WassersteinContribution, CalibratedOTGradient])
def test_support_that_would_reveal_samples_is_refused_before_training(metric_class, tmp_path):
    metric = metric_class(support=30)

    with refused(r"support=30: client 1.*\d+ samples.*allow_reconstruction=True"):
        fit(FederatedLoop(metrics={"ot": metric}), tmp_path)
    assert not hasattr(metric, "rounds")  # it is not bound to the federation


def test_support_that_would_reveal_samples_can_be_allowed(tmp_path):
    metric = WassersteinContribution(support=30, iterations=2, allow_reconstruction=True)

    fit(FederatedLoop(metrics={"ot": metric}), tmp_path, rounds=1)

    assert metric.compute().isfinite().all()


@pytest.mark.slow
def test_wasserstein_contribution_uses_features_of_the_global_model(tmp_path):
    """A round's distances are those of the penultimate features at the start of the round, computed by hand."""
    module = Plain()
    recorder = KeepsRounds()
    data = toy_data()
    loop = FederatedLoop(
        recorder,
        {"ot": WassersteinContribution(**CHEAP)},
        seed=0,
    )

    fit(loop, tmp_path, module, data, rounds=2)

    last_round = recorder.rounds[-1]
    loop.space.write(module, last_round.global_vector)
    body = module.net[:-1].eval()

    def features_and_labels(batches) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = all_samples(batches)
        return body(x).detach(), y

    samples_of_clients = []
    for client in range(3):
        batches = data.client_loader(client, shuffle=False)
        samples_of_clients.append(features_and_labels(batches))
    server = server_of(*features_and_labels(data.val_dataloader()))
    generator = last_round.generator("WassersteinContribution")
    valuation = FedBary("pixels", **CHEAP).value(
        clients_of(samples_of_clients), server, generator, values_samples=False
    )
    assert_close(loop.contributions["ot"], valuation.shares, rtol=1e-4, atol=1e-5)


def draw_images(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(num_samples, 1, 3, 3, generator=make_generator(seed))
    return images, torch.arange(num_samples) % 2


def make_calibrated_metric(**options: object) -> tuple[CalibratedOTGradient, list]:
    """The metric after a round of two of three clients, and the two. Each tenth image of client 0 is noisy."""
    images, labels = draw_images(100, seed=1)
    images[::10] += 15
    clients = clients_of([(images, labels), draw_images(80, seed=2)])
    server = server_of(*draw_images(80, seed=0))
    metric = CalibratedOTGradient(3, features="pixels", support=30, iterations=5, **options)

    metric.update(torch.tensor([0, 1]), clients, server, generator=make_generator())
    return metric, clients


def test_calibrated_ot_gradient_is_one_minus_the_flagged_share():
    metric, clients = make_calibrated_metric()

    flagged = [client.request(sample_values).flagged for client in clients]
    shares = torch.stack([is_flagged.float().mean() for is_flagged in flagged])
    distances = metric.diagnostics()["distance"]

    assert_close(metric.compute()[:2], 1 - shares)
    assert flagged[0][::10].all()
    assert shares[0] >= 0.1
    assert shares[1] < 0.1
    assert distances[0] > distances[1]


def test_calibrated_ot_gradient_state_holds_counts_and_no_samples():
    metric, _ = make_calibrated_metric()
    shapes = {name: list(state.shape) for name, state in metric.state_dict().items()}
    num_clients = 3
    assert shapes == {"distances": [num_clients], "flagged": [num_clients], "rounds": []}


def test_rule_positive_flags_samples_with_a_positive_gradient():
    metric, clients = make_calibrated_metric(rule="positive", options={"calibration": "client"})
    values = clients[1].request(sample_values)
    assert torch.equal(values.flagged, values.gradients > 0)
