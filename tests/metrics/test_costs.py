"""CommunicationCost and PrivacyLoss: parameters, bytes and epsilon, also of clients that filters leave out."""

import pytest
import torch

from flsv.federation import FederatedLoop
from flsv.filters import OutlierFilter
from flsv.metrics import CommunicationCost, PrivacyLoss
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.uploads import Upload
from helpers import warns
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain, network

#: Which clients take part in two rounds, and how many parameters they upload and download.
ROUNDS = [
    (torch.tensor([0, 2]), torch.tensor([10, 10]), torch.tensor([50, 20])),
    (torch.tensor([1, 2]), torch.tensor([10, 10]), torch.tensor([0, 30])),
]


def test_communication_cost_gives_totals():
    metric = CommunicationCost(4)
    for client_ids, uploaded, downloaded in ROUNDS:
        metric.update(client_ids, uploaded, downloaded)

    costs = metric.compute()
    up_and_down = [[10, 50], [10, 0], [20, 50]]  # sums over the two rounds, by client
    up_plus_down = [10 + 50, 10 + 0, 20 + 50]
    assert costs[:3].tolist() == up_and_down
    assert metric.per_client(costs)[:3].tolist() == up_plus_down
    assert not metric.higher_is_better

    totals = {name: value.item() for name, value in metric.diagnostics().items()}
    assert totals == {
        "parameters_up": 40,
        "parameters_down": 100,
        "bytes_up": 4 * 40,  # float32
        "bytes_down": 4 * 100,
    }


def test_communication_cost_counts_measured_bytes():
    metric = CommunicationCost(4)
    bytes_up = torch.tensor([11.0, 12.5])
    bytes_down = torch.tensor([200.0, 80.0])

    metric.update(*ROUNDS[0], uploaded_bytes=bytes_up, downloaded_bytes=bytes_down)

    totals = metric.diagnostics()
    assert totals["bytes_up"] == 11 + 13  # whole bytes
    assert totals["bytes_down"] == 200 + 80
    assert totals["parameters_up"] == 10 + 10


def test_communication_cost_refuses_bytes_of_another_number_of_clients():
    one_client = torch.tensor([11.0])

    with pytest.raises(ValueError, match="uploaded_bytes"):
        CommunicationCost(4).update(
            *ROUNDS[0], uploaded_bytes=one_client, downloaded_bytes=one_client
        )


class SpoilsUpdatesOfClients1And2(Upload):
    """Client 1's is excluded by a filter of outliers. Client 2's is not finite, and so not sent."""

    def apply(self, update, context):
        factors = {1: 1e6, 2: float("nan")}
        return update * factors.get(context.client, 1)


def test_communication_cost_counts_updates_that_a_filter_leaves_out(tmp_path):
    """Client 1's update crosses and is excluded; client 2 sends none, and has received the model."""
    loop = FederatedLoop(
        metrics={"cost": CommunicationCost()},
        uploads=[
            GaussianPrivacy(clip=1.0, noise_multiplier=2.0),
            SpoilsUpdatesOfClients1And2(),
        ],
        filters=[OutlierFilter(exclude=True)],
        seed=1,
    )
    module = Plain(network(batch_norm=False))
    data = toy_data((4, 3, 4, 3, 4))

    with warns("excluded from the round"):
        fit(loop, tmp_path, module, data, rounds=1)

    size = loop.space.size
    up, down = loop.values["cost"].by_class.T.tolist()
    bytes_down = loop.metrics["cost"].diagnostics()["bytes_down"]
    rounds_with_noise = loop.metrics["epsilon"].diagnostics()["rounds"]
    # Client 1 has sent an update that does not count as a participation. Client 2 has sent none.
    assert up == [size, size, 0, size, size]
    assert down == [size] * 5
    assert bytes_down == 5 * 4 * size  # five clients, float32
    assert loop.participations.tolist() == [1, 0, 0, 1, 1]
    assert rounds_with_noise.tolist() == [1, 1, 0, 1, 1]


COHORTS = ([0, 2], [2], [2, 3], [0, 2])


def test_epsilon_of_each_client_follows_from_the_rounds_it_took_part_in():
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.5, delta=1e-4)
    metric = PrivacyLoss(privacy, num_clients=4)
    for cohort in COHORTS:
        metric.update(torch.tensor(cohort))

    rounds = [sum(client in cohort for cohort in COHORTS) for client in range(4)]
    expected = torch.full((4,), float("nan"))  # of a client that was never drawn
    for client in (0, 2, 3):
        expected[client] = gaussian_epsilon(1.5, rounds[client], 1e-4)

    assert rounds == [2, 0, 4, 1]
    torch.testing.assert_close(metric.compute(), expected, equal_nan=True)
    assert metric.diagnostics().keys() == {"rounds"}
    assert metric.diagnostics()["rounds"].tolist() == rounds
    assert metric.spent() is None


def test_privacy_budget_is_exceeded_first_by_the_most_frequent_client():
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=4.5)
    epsilon_of_4_rounds = gaussian_epsilon(2.0, 4, privacy.delta)
    epsilon_of_5_rounds = gaussian_epsilon(2.0, 5, privacy.delta)
    assert epsilon_of_4_rounds < privacy.max_epsilon < epsilon_of_5_rounds
    assert privacy.affordable_rounds() == 4

    metric = PrivacyLoss(privacy, num_clients=4)
    for cohort in COHORTS:
        assert metric.spent() is None
        metric.update(torch.tensor(cohort))

    rounds_of_clients = [2, 0, 4, 1]
    rounds_left = [4 - rounds for rounds in rounds_of_clients]
    assert metric.diagnostics()["affordable"].tolist() == rounds_left
    message = metric.spent()
    assert message is not None
    assert f"client 2 has spent epsilon = {epsilon_of_4_rounds:.3f}" in message
