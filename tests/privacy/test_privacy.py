"""Epsilon against the analytic Gaussian mechanism and simulation; clipping, noise and budget, alone and in a loop."""

import math
import sys
import warnings

import pytest
import torch
from scipy.special import log_ndtr
from torch import nn
from torch.testing import assert_close

from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost
from flsv.personalization import Personalizer
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.training.algorithms import ClientAlgorithm
from flsv.uploads import TopK, UploadContext
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from helpers import make_generator, refused, warns
from helpers.fits import fit, make_checkpoint_callback
from helpers.models import Plain, network


def analytic_delta(epsilon: float, noise_multiplier: float) -> float:
    """Balle and Wang (ICML 2018), theorem 8: the least delta of one release at this epsilon."""
    half_inverse = 1 / (2 * noise_multiplier)
    scaled = epsilon * noise_multiplier
    lower = math.exp(log_ndtr(half_inverse - scaled))
    upper = math.exp(epsilon + log_ndtr(-half_inverse - scaled))
    return lower - upper


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize(
    ("noise_multiplier", "rounds"), [(0.5, 1), (1.0, 1), (1.0, 20), (2.0, 7), (2.0, 100), (8.0, 3)]
)
def test_epsilon_of_n_rounds_is_that_of_noise_over_root_n(noise_multiplier, rounds, delta):
    epsilon = gaussian_epsilon(noise_multiplier, rounds, delta)
    assert analytic_delta(epsilon, noise_multiplier / math.sqrt(rounds)) == pytest.approx(
        delta, rel=1e-6
    )


def test_accountant_without_dp_accounting_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with refused(r"pip install 'dp-accounting>=0.6'"):
        gaussian_epsilon(1.234, 1)
    assert gaussian_epsilon(0.0, 1) == math.inf


# ---- Clipping, noise and budget: alone, and what crosses to the server in a loop


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_clipped_update_is_never_longer_than_the_bound_by_rounding(dtype):
    for seed in range(20):
        update = torch.randn(1000, generator=make_generator(seed)).to(dtype)
        sent = GaussianPrivacy(clip=1.3, noise_multiplier=0).protect(update, make_generator())
        assert 1.27 < torch.linalg.vector_norm(sent, dtype=torch.float64).item() <= 1.3


def test_privacy_noise_for_a_module_with_batch_norm_buffers_is_refused():
    plain = nn.Linear(3, 2)
    normed = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    privacy.check(ParameterSpace(plain))

    with refused(r"such as '1\.running_var'.*GroupNorm"):
        privacy.check(ParameterSpace(normed))

    GaussianPrivacy(clip=1.0, noise_multiplier=0.0).check(ParameterSpace(normed))


def make_plain() -> Plain:
    return Plain(network(batch_norm=False))


def test_noise_of_a_simulation_follows_from_seed_round_and_client():
    clip = 0.2
    noise_multiplier = 3.0
    context = UploadContext(client=1, num_clients=3, num_parameters=50, round_index=4, seed=5)
    update = torch.randn(50, generator=make_generator())

    sent = GaussianPrivacy(clip, noise_multiplier).apply(update, context)

    noise = torch.randn(50, generator=generator_for(5, "privacy", 4, 1))
    clipped = update * clip / update.norm()
    assert_close(sent, clipped + clip * noise_multiplier * noise)


def test_private_clients_report_configured_steps_and_no_loss(tmp_path):
    """The steps are those that they take: three batches in each of two epochs, two batches a step."""

    def fit_and_read_round(name: str, **options):
        watching = Watching()
        loop = FederatedLoop(personalizer=watching, local_epochs=2, seed=5, **options)
        fit(
            loop,
            tmp_path / name,
            make_plain(),
            rounds=1,
            accumulate_grad_batches=2,
        )
        (round,) = watching.rounds
        return round

    free_round = fit_and_read_round("free")
    private_round = fit_and_read_round("private", uploads=[GaussianPrivacy(1.0, 1.0)])

    assert torch.equal(private_round.num_steps, free_round.num_steps)
    assert free_round.losses.isfinite().all()
    assert private_round.losses.isnan().all()


class RefusesPrivacy(ClientAlgorithm):
    """Algorithm that cannot work with noise."""

    def check_fit(self, trainer, config):
        (optimizer,) = trainer.optimizers
        if config.is_private:
            raise ConfigurationError(f"{type(optimizer).__name__} would fit noise")


def test_algorithm_can_refuse_privacy_before_the_first_round(tmp_path):
    watching = Watching()
    loop = FederatedLoop(
        client_algorithm=RefusesPrivacy(),
        personalizer=watching,
        uploads=[GaussianPrivacy(1.0, 1.0)],
        seed=5,
    )

    with refused("SGD would fit noise"):
        fit(loop, tmp_path, make_plain(), rounds=1)

    assert not watching.rounds


@pytest.mark.parametrize(
    "update", [torch.full((4,), torch.nan), torch.tensor([torch.inf, 1.0, 1.0, 1.0])]
)
def test_update_that_is_not_finite_becomes_noise(update):
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    assert torch.equal(
        privacy.protect(update, make_generator()), privacy.protect(torch.zeros(4), make_generator())
    )


class Watching(Personalizer):
    """Personalizer that keeps the rounds and, if ``sends_requests``, the models that the clients have trained."""

    def __init__(self, sends_requests=False):
        self.sends_requests = sends_requests
        self.needs = ("clients",) if sends_requests else ()
        self.rounds = []
        self.trained_models = []

    def personalize(self, round, contributions, models):
        self.rounds.append(round._round)
        if self.sends_requests:
            trained_models = [client.request(trained_model) for client in round.clients]
            self.trained_models.append(torch.stack(trained_models))

        next_models = {}
        for client, vector in zip(round.client_ids.tolist(), round.client_vectors):
            next_models[client] = vector + 1

        return next_models


def trained_model(local):
    return local.model.clone()


def test_sent_update_is_clipped_and_the_clients_own_model_is_not(tmp_path):
    watching = Watching(sends_requests=True)
    privacy = GaussianPrivacy(clip=0.05, noise_multiplier=0.0)
    loop = FederatedLoop(personalizer=watching, uploads=[privacy], seed=1)

    fit(loop, tmp_path, make_plain(), rounds=2)

    for round, trained_models in zip(watching.rounds, watching.trained_models):
        sent_updates = round.client_vectors - round.global_vector
        sent_norms = sent_updates.norm(dim=1)
        # The second round's clients start far from the global model: their own start points count as secrets, too.
        assert_close(sent_norms, torch.full((3,), 0.05))

        true_updates = trained_models - round.global_vector
        assert (true_updates.norm(dim=1) > 0.1).all()
        cosines = torch.cosine_similarity(true_updates, sent_updates)
        assert_close(cosines, torch.ones(3))


@pytest.mark.slow
def test_fit_stops_before_the_privacy_budget_is_exceeded(tmp_path):
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=4.0)
    assert privacy.affordable_rounds() == 3

    loop = FederatedLoop(uploads=[privacy], seed=0)
    with warns(r"client 0 has spent.*= 3\.709"):
        fit(loop, tmp_path, make_plain(), rounds=10)

    assert loop.round_index == 3
    assert_close(loop.contributions["epsilon"], torch.full((3,), gaussian_epsilon(2.0, 3)))

    rows = (tmp_path / "contributions.csv").read_text()
    assert "2,epsilon,0,,3.70" in rows
    assert "2,epsilon/affordable,0,,0" in rows


@pytest.mark.fast_rows
@pytest.mark.parametrize("how", ["resumed", "min_epochs"])
def test_spent_privacy_budget_stays_spent_on_resume(tmp_path, how):
    def loop() -> FederatedLoop:
        return FederatedLoop(uploads=[GaussianPrivacy(1.0, 2.0, max_epsilon=3.0)], seed=0)

    if how == "min_epochs":
        with warns("stops"), refused("does not allow another round"):
            fit(loop(), tmp_path, make_plain(), rounds=5, min_epochs=4)
        return

    fit(
        loop(),
        tmp_path,
        make_plain(),
        rounds=2,
        enable_checkpointing=True,
        callbacks=[make_checkpoint_callback(tmp_path)],
    )

    with refused("no.*another round: client 0"):
        fit(loop(), tmp_path, make_plain(), rounds=5, ckpt_path=tmp_path / "checkpoints/last.ckpt")


NOISE, BOTH = (
    GaussianPrivacy(1.0, 0.5),
    {"cssv": ClassSpecificShapley(), "cost": CommunicationCost()},
)


@pytest.mark.parametrize(
    ("privacy", "metrics", "warned"),
    [
        (NOISE, BOTH, True),
        (GaussianPrivacy(1.0, 0.0), BOTH, False),  # clipping only
        (NOISE, {"cost": CommunicationCost()}, False),  # nothing of the updates
    ],
)
def test_metrics_of_noised_updates_are_warned_about(privacy, metrics, warned, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        uploads = [privacy, TopK(0.9)]
        loop = FederatedLoop(metrics=metrics, uploads=uploads, seed=0)
        fit(loop, tmp_path, make_plain(), rounds=1)

    assert list(loop.metrics) == [*metrics, "epsilon"]  # noise is always accounted for

    messages = [str(warning.message) for warning in caught]
    lines = [message for message in messages if "privacy_contributions" in message]

    assert len(lines) == warned

    if warned:
        (line,) = lines
        assert "metrics ['cssv'] are computed from noised updates (noise_multiplier=0.5)" in line
        assert line.endswith("See docs/results/privacy_contributions.md.")
