"""FedBary's metrics: distances and flagged samples, in and outside a federation."""

import torch
from torch.testing import assert_close

from flsv.federation import FederatedLoop
from flsv.metrics import CalibratedOTGradient, WassersteinContribution
from flsv.valuation import FedBary, clients_of, sample_values, server_of
from helpers import make_generator, refused
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit
from helpers.models import Plain

CHEAP = {"support": 6, "iterations": 4}


def draw_samples(
    samples: int,
    seed: int,
    shift: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(samples, 4, generator=make_generator(seed)) + shift
    return x, torch.arange(samples) % 2


def distances_after_rounds(
    every: int,
    cohorts: dict[int, list[int]],
) -> list[torch.Tensor]:
    """Return the distances after each round, of which the clients are given by its index."""
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

    distances = distances_after_rounds(every=2, cohorts=dict.fromkeys(range(3), cohort))

    measured = [of_round[cohort] for of_round in distances]
    assert torch.equal(measured[0], measured[1])
    assert not torch.equal(measured[1], measured[2])


def test_wasserstein_contribution_measured_once_measures_newcomers_later():
    cohorts = {
        3: [0, 1],
        4: [1, 2],
    }

    earlier, later = distances_after_rounds(every=0, cohorts=cohorts)

    assert torch.equal(later[:2], earlier[:2])
    assert later[2].isfinite()


def test_default_support_follows_the_smallest_client_even_if_absent():
    sizes = [60, 60, 25]
    samples = [
        draw_samples(60, 1),
        draw_samples(60, 2),
        draw_samples(25, 3),
    ]
    clients = clients_of(samples)
    server = server_of(*draw_samples(20, 0))
    by_default = WassersteinContribution(3, features="pixels")
    by_default.check(torch.tensor(sizes))  # sets the support

    safe_support = (25 - 1) // 2  # below half of the smallest client's samples
    with_support = WassersteinContribution(3, features="pixels", support=safe_support)

    distances = []
    for metric in (by_default, with_support):
        metric.update(
            torch.tensor([0, 1]),
            clients[:2],
            server,
            generator=make_generator(),
        )
        distances.append(metric.diagnostics()["distance"][:2])

    assert torch.equal(*distances)


def test_support_that_would_reveal_samples_is_refused_before_training(tmp_path):
    data = toy_data()
    for metric in (WassersteinContribution(support=30), CalibratedOTGradient(support=30)):
        with refused(r"support=30: client 1.*\d+ samples.*allow_reconstruction=True"):
            fit(
                FederatedLoop(metrics={"ot": metric}),
                tmp_path,
                data=data,
            )
        assert not hasattr(metric, "rounds")  # not even bound to the federation

    allowed = WassersteinContribution(support=30, iterations=2, allow_reconstruction=True)
    fit(
        FederatedLoop(metrics={"ot": allowed}),
        tmp_path,
        data=data,
        rounds=1,
    )

    assert allowed.compute().isfinite().all()


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

    def features(batches) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (torch.cat(parts) for parts in zip(*batches))
        return body(x).detach(), y

    sets = [features(data.client_loader(i, shuffle=False)) for i in range(3)]
    server = server_of(*features(data.val_dataloader()))
    generator = last_round.generator("WassersteinContribution")
    valuation = FedBary("pixels", **CHEAP).value(
        clients_of(sets),
        server,
        generator,
        values_samples=False,
    )
    expected = valuation.shares

    assert_close(
        loop.contributions["ot"],
        expected,
        rtol=1e-4,
        atol=1e-5,
    )


def draw_images(
    samples: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(
        samples,
        1,
        3,
        3,
        generator=make_generator(seed),
    )
    return x, torch.arange(samples) % 2


def make_calibrated_metric(**kwargs: object) -> tuple[CalibratedOTGradient, list]:
    noisy_images = draw_images(100, 1)
    noisy_images[0][::10] += 15
    images = [
        noisy_images,
        draw_images(80, 2),
        draw_images(40, 3),
    ]
    clients = clients_of(images)
    server = server_of(*draw_images(80, 0))
    options = {
        "features": "pixels",
        "support": 30,
        "iterations": 5,
        **kwargs,
    }
    metric = CalibratedOTGradient(3, **options)

    metric.update(
        torch.tensor([0, 1]),
        clients[:2],
        server,
        generator=make_generator(),
    )
    return metric, clients


def test_calibrated_ot_gradient_is_one_minus_the_flagged_share():
    metric, clients = make_calibrated_metric()

    flagged = [client.request(sample_values).flagged for client in clients[:2]]
    shares = torch.stack([is_flagged.float().mean() for is_flagged in flagged])
    distances = metric.diagnostics()["distance"]

    assert_close(metric.compute()[:2], 1 - shares)
    assert flagged[0][::10].all()  # each tenth image of client 0 is noisy
    assert shares[0] >= 0.1
    assert shares[1] < 0.1
    assert distances[0] > distances[1]


def test_calibrated_ot_gradient_state_holds_counts_and_no_samples():
    metric, _ = make_calibrated_metric()
    assert {name: list(state.shape) for name, state in metric.state_dict().items()} == {
        "distances": [3], "flagged": [3], "rounds": [],
    }  # fmt: skip


def test_rule_positive_flags_samples_with_a_positive_gradient():
    metric, clients = make_calibrated_metric(
        rule="positive",
        options={"calibration": "client"},
    )
    values = clients[1].request(sample_values)
    assert torch.equal(values.flagged, values.gradients > 0)
