"""Attacks by their numbers, to whom they are applied, from which randomness; in federations: tests/replay."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmark.registry import TrainingLoss
from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.attacks import (
    Alignment,
    Attack,
    Collusion,
    FalseReports,
    FreeRider,
    GradientPoisoning,
    InnerProductManipulation,
    Scaling,
    SignFlip,
)
from flsv.federation import FederatedLoop
from flsv.metrics import CommunicationCost
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.uploads import TopK, UploadContext
from helpers import make_generator, refused
from helpers.data import toy_data
from helpers.fits import fit, state_vector
from helpers.models import Plain, network

SIZE = 100_000

SEEDED = make_generator()
UPDATE = torch.randn(SIZE, generator=SEEDED) * 0.01
SHORT = UPDATE[:50]


def attacked_update(attack, seed=7):
    return attack.attack(UPDATE, None, make_generator(seed))


def cosine_similarity(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()


def test_gradient_poisoning_multiplies_every_entry_by_its_own_uniform_factor():
    poisoned = attacked_update(GradientPoisoning())

    quotients = poisoned.double() / UPDATE.double()
    factors = quotients.numpy()
    counts, _ = np.histogram(factors, bins=10, range=(0.5, 1.5))
    correlations = np.corrcoef(factors, UPDATE)
    assert factors.min() == pytest.approx(0.5, abs=1e-3)
    assert factors.max() == pytest.approx(1.5, abs=1e-3)
    # U[0.5, 1.5]: every tenth of the range has a tenth of the entries (standard deviation 95 of 10,000).
    assert np.abs(counts - SIZE / 10).max() < 5 * 95
    assert abs(correlations[0, 1]) < 0.02


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_free_rider_noise_has_the_norm_of_an_update_times_the_scale(scale):
    attack = FreeRider("noise", scale=scale)

    noise = attacked_update(attack)
    noise_of_another_seed = attacked_update(attack, seed=1)

    relative_norm = noise.norm() / UPDATE.norm()
    assert relative_norm.item() == pytest.approx(scale, rel=1e-4)
    # Independent directions have a cosine of about 1 / sqrt(P) = 0.003.
    assert abs(cosine_similarity(noise, UPDATE)) < 0.015
    assert abs(cosine_similarity(noise, noise_of_another_seed)) < 0.015


def send_through(
    attacks,
    update=SHORT,
    client=0,
    num_clients=5,
    num_parameters=None,
    round_index=0,
):
    if num_parameters is None:
        num_parameters = len(update)

    context = UploadContext(client, num_clients, num_parameters, round_index)
    for position, attack in enumerate(attacks):
        update = attack.apply(update, replace(context, position=position))
    return update


def test_attack_changes_only_the_chosen_clients_updates():
    attack = SignFlip(fraction=0.4, seed=3)

    changed_clients = []
    for client in range(5):
        if not torch.equal(send_through([attack], client=client), SHORT):
            changed_clients.append(client)

    assert changed_clients == attack.chosen(5)

    honest_client = min(set(range(5)) - set(changed_clients))
    assert send_through([attack], client=honest_client) is SHORT
    assert send_through([]) is SHORT


@pytest.mark.parametrize("attack", [GradientPoisoning(), FreeRider("noise")])
def test_noise_depends_on_seed_round_and_client(attack):
    of_another_seed = type(attack)(seed=1)
    of_another_seed.mode = getattr(attack, "mode", None)

    sent = send_through([attack])
    different = [
        send_through([attack], round_index=1),
        send_through([attack], client=1),
        send_through([of_another_seed]),
    ]

    assert torch.equal(sent, send_through([attack]))
    for update in different:
        assert not torch.equal(update, sent)


def test_several_attacks_are_applied_in_order_with_independent_noise():
    factors = send_through([GradientPoisoning()]) / SHORT
    factors_of_two = send_through([GradientPoisoning()] * 2) / SHORT

    assert torch.equal(
        send_through([Scaling(3.0), SignFlip()]),
        SHORT * 3 * -1,
    )
    assert not torch.allclose(factors**2, factors_of_two)


def test_attacks_on_buffers():
    free_riders_buffers = send_through([FreeRider()], num_parameters=40)[40:]
    scaled_buffers = send_through([Scaling(3.0)], num_parameters=40)[40:]

    assert not free_riders_buffers.any()  # it has not trained
    assert torch.equal(scaled_buffers, SHORT[40:])


def test_custom_attack_that_changes_the_shape_is_refused():
    class Short(Attack):
        def attack(self, update, context, generator):
            return update[1:]

    with refused(r"shape \[49\].*the shape \[50\]"):
        send_through([Short()])


@pytest.mark.fast_rows
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_false_reports_change_the_reported_loss_only(tmp_path, engine):
    def fit_with_attacks(attacks: list[Attack]) -> tuple[Tensor, Tensor]:
        """The metric's values, which are minus the losses, and the model."""
        metrics = {"m": TrainingLoss()}
        loop = FederatedLoop(metrics=metrics, uploads=attacks, seed=1, engine=engine)
        module = Plain(network(batch_norm=False))
        fit(loop, tmp_path / f"{len(attacks)} attacks", module, rounds=2)
        return loop.contributions["m"], state_vector(module)

    false_loss = 0.001
    values_of_honest, model_of_honest = fit_with_attacks([])
    values, model = fit_with_attacks([FalseReports(loss=false_loss, clients=[1])])

    assert values[1] == pytest.approx(-false_loss)
    assert values_of_honest[1] < -0.01
    assert torch.equal(values[[0, 2]], values_of_honest[[0, 2]])
    assert torch.equal(model, model_of_honest)


# ---- Updates that go where the server went last


def make_context(
    state: dict[str, Tensor],
    model: Tensor,
    client: int = 1,
) -> UploadContext:
    return UploadContext(
        client,
        num_clients=3,
        num_parameters=3,
        round_index=1,
        state=state,
        start=model,
    )


def test_alignment_mixes_own_direction_with_the_servers_last_step():
    state = {}
    attack = Alignment(mix=0.5)
    update = torch.tensor([0.0, 3.0, 4.0, 9.0])  # the last is a buffer
    first_model = torch.zeros(4)
    second_model = torch.tensor([2.0, 0.0, 0.0, 5.0])

    sent_first = attack.apply(update, make_context(state, first_model))
    sent_second = attack.apply(update, make_context(state, second_model))

    # In its first round there is no step to align with.
    assert torch.equal(sent_first, update)

    # The mean of the step's direction and the update's, as long as the update, which is 5.
    expected = torch.tensor([1.0, 0.6, 0.8]) / 2**0.5 * 5
    assert sent_second[:3].norm().item() == pytest.approx(5)
    assert_close(sent_second[:3], expected)
    assert sent_second[3] == 9
    # The step is counted from when it last took part.
    assert_close(state["attack.0.start"], second_model[:3])


@pytest.mark.parametrize(
    ("update", "server_step"),
    [
        ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]),
        ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ([1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]),  # the mean of the two directions is 0
    ],
)
def test_alignment_without_a_direction_sends_the_update(update, server_step):
    former_model = torch.ones(3)
    context = make_context(
        {"attack.0.start": former_model}, former_model + torch.tensor(server_step)
    )

    sent = Alignment(mix=0.5).apply(torch.tensor(update), context)

    assert sent.tolist() == update


# ---- Attackers who look at each other's updates, against loops written from the papers


UPDATES = torch.randn(7, 40, generator=make_generator())


class SendsAQuarterOfTheMean(Collusion):
    def collude(self, updates, colluders, cohort, generator):
        self.updates = updates.clone()
        return updates.mean(0) / 4


def fit_with_uploads(folder: Path, *uploads, **options) -> FederatedLoop:
    metrics = {"cost": CommunicationCost()}
    loop = FederatedLoop(uploads=list(uploads), metrics=metrics, seed=1, **options)
    fit(
        loop,
        folder,
        data=toy_data((4, 3, 4, 3)),
        rounds=1,
    )

    return loop


class ComparesResponsesWithUpdates(FedAvg):
    """Asks each client for the model that it has sent."""

    needs = ("clients",)

    def weights(self, round, contributions):
        responses = [client.request(lambda local: local.sent) for client in round.clients]
        rows = range(len(round))
        updates = [round.matrix.update(row) for row in rows]
        self.models_by_response = torch.stack(responses)
        self.models_received = round.global_vector + torch.stack(updates)
        return super().weights(round, contributions)


def test_colluders_keep_their_trained_models_and_answer_with_the_sent_updates(tmp_path):
    aggregator = ComparesResponsesWithUpdates()
    evaluation = ClientEvaluation(every=1, models="trained")
    colluders = SendsAQuarterOfTheMean(clients=[1, 2])

    honest = fit_with_uploads(tmp_path / "honest", evaluation=evaluation)
    loop = fit_with_uploads(
        tmp_path / "attacked", colluders, aggregator=aggregator, evaluation=evaluation
    )

    # Who answered with the trained model would give itself away.
    assert_close(aggregator.models_by_response, aggregator.models_received)
    for client in range(4):
        assert torch.equal(loop.trained[client], honest.trained[client])


def test_colluders_come_last_and_send_dense_updates(tmp_path):
    attack = SendsAQuarterOfTheMean(clients=[0], knows="all")

    loop = fit_with_uploads(tmp_path, TopK(0.1), attack)

    numbers_uploaded, _ = loop.values["cost"].by_class.T
    assert numbers_uploaded[0] == loop.space.size
    assert numbers_uploaded[1] < loop.space.size / 2

    # The attacker knows what the others are about to send, most of which are zeros.
    share_of_zeros = (attack.updates == 0).float().mean()
    assert share_of_zeros > 0.5

    with refused("then collusion"):
        FederatedLoop(uploads=[attack, GaussianPrivacy(1.0, 1.0)])


def test_collusion_with_wrong_arguments_is_refused(tmp_path):
    with refused("a collusion needs updates.*global model"):
        FederatedLoop(uploads=[InnerProductManipulation()], personalizer=Standalone())

    class Short(Collusion):
        def collude(self, updates, colluders, cohort, generator):
            return updates[:, :2]

    attack = Short(clients=[1])
    with refused(r"\[1, 2\], but expected \[40\].*\[1,"):
        attack.sent(
            cohort=range(7),
            updates=UPDATES,
            num_clients=7,
            round_index=0,
        )
