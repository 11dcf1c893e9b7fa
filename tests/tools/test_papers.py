"""What the tables measure, against formulas by hand."""

import pytest
import torch
from paper_guo import agreement, check
from paper_pfedsv import communication, judged, one_by_one
from paper_shapfed import gap
from paper_shapleyfl import utilities
from personalization.judged import Judged
from torch import nn

from flsv.core.local_data import opened
from flsv.core.parameter_space import ParameterSpace
from flsv.personalization.base import OWN_MODEL


@pytest.mark.parametrize(
    ("scenario", "values", "met", "number"),
    [
        ("same", [1.0, 0.9, 1.0, 1.0, 1.0], True, -10.0),
        ("same", [1.0, 0.95, 0.89, 1.0, 0.93], False, -11.0),
        ("same", [0.0] * 5, True, 0.0),
        ("sizes", [0.1, 0.2, 0.3, 0.4, 0.5], True, 1.0),
        ("sizes", [0.2, 0.1, 0.3, 0.4, 0.5], False, 0.9),  # 1 - 6 (1 + 1) / (5 (25 - 1))
        ("noisy", [0.5, 0.4, 0.3, 0.2, 0.1], True, 1.0),
        ("noisy", [0.2] * 5, False, 0.0),
        ("mixtures", [0.3, 0.3, 0.3, 0.1, -0.01], False, -0.01),
        ("biased", [0.10, 0.11, 0.12, 0.1, 0.5], True, 0.38),
        ("biased", [-0.10, -0.11, -0.12, -0.1, 0.5], False, 0.6),
    ],
)
def test_agreement_of_values_with_guos_scenarios_equals_that_by_hand(scenario, values, met, number):
    assert check(scenario, values) is met
    assert agreement(scenario, values) == pytest.approx(number)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # By distance its own model counts as at the mean of the others' distances, 2: 1/2, 1, 1/3.
        ("by distance", [3 / 11, 6 / 11, 2 / 11]),
        ("equally", [1 / 3, 1 / 3, 1 / 3]),
        # By loss: it started at a loss of 4, has come to 2 in a step of 1, and the others' losses are 0 and 8.
        (
            "by loss",
            [
                2 / (2 + 4 / 2**0.5),
                4 / 2**0.5 / (2 + 4 / 2**0.5),
                0,
            ],
        ),
    ],
)
def test_weights_of_pfedsvs_figure_4_equal_those_by_hand(weights, expected):
    """Two others, at distances 1 and 3 of the parameters; the last entry is a buffer."""
    initial = torch.tensor([0.0, -1, 0, 0])
    own_model = torch.zeros(4)
    first_model = torch.tensor([1.0, 0, 0, 9])
    second_model = torch.tensor([0.0, 0, 3, 9])
    losses = {
        tuple(initial.tolist()): 4.0,
        tuple(own_model.tolist()): 2.0,
        tuple(first_model.tolist()): 0.0,
        tuple(second_model.tolist()): 8.0,
    }
    client = Judged(0, lambda vector: -losses[tuple(vector.tolist())])
    client.data.set_models(initial, own_model)

    with opened(client.data):
        computed = one_by_one(
            client.data,
            [first_model, second_model],
            None,
            weights=weights,
            num_parameters=3,
            generator=torch.Generator(),
        )

        torch.testing.assert_close(
            computed.float(),
            torch.tensor(expected),
        )
        _, of_first, of_second = expected
        mixed = of_first * first_model + of_second * second_model
        torch.testing.assert_close(client.data.state[OWN_MODEL], mixed)


def test_pfedsv_auroc_and_share_of_pairs_above_thresholds_equal_those_by_hand():
    """Client 0 has looked at all clients, client 1 at its two relevant ones, client 2 at one of its two."""
    # Six clients in a ring: to each its two neighbours are relevant.
    truth = torch.tensor(
        [
            [0, 1, 0, 0, 0, 1],
            [1, 0, 1, 0, 0, 0],
            [0, 1, 0, 1, 0, 0],
            [0, 0, 1, 0, 1, 0],
            [0, 0, 0, 1, 0, 1],
            [1, 0, 0, 0, 1, 0],
        ]
    ).bool()
    unseen = float("nan")
    values = torch.full((6, 6), unseen)  # of other clients, a row for each client
    values[0] = torch.tensor([unseen, 0.5, -0.5, -0.5, -0.5, 0.5])
    values[1, 0] = 0.5
    values[1, 2] = 0.5
    values[2, 1] = -0.5

    scores = judged(values[None], truth)  # after one round

    # Seen and relevant: 0.5 four times and -0.5 once. Seen and not relevant: -0.5 three times.
    wins = 4 * 3
    ties = 1 * 3
    assert scores["auroc"] == pytest.approx((wins + ties / 2) / (5 * 3))
    num_relevant = 6 * 2
    percent_of_relevant = 100 * 4 / num_relevant
    percent_of_others = 0.0
    assert scores["above"] == [pytest.approx(percent_of_relevant), percent_of_others]


def test_pfedsv_communication_sums_transfers_in_millions_of_parameters():
    num_rounds = 20
    downloads_by_round = [5.0] * 2 + [2.0] * 18
    num_downloads = 2 * 5 + 18 * 2
    fixed_k = 5  # models that come down in each round

    millions = communication(
        {"downloads": downloads_by_round},
        beside={},
        row="pFedSV",
        column="pathological, MNIST",
    )

    model = 44426  # parameters of LeNet-5
    head = 84 * 10 + 10
    extractor = model - head
    # Of one client. In every round a model goes up.
    up = num_rounds * model
    expected = {
        # A shared extractor comes down in every round, and the heads of others.
        "pFedSV (D+C)": up + num_rounds * extractor + num_downloads * head,
        "pFedSV (D)": up + num_downloads * model,
        "FedFomo, pFedSV with k fixed": up + num_rounds * fixed_k * model,
        "FedAMP, FedAvg": up + num_rounds * model,
    }

    for name, numbers in expected.items():
        assert millions[name]["lenet5"] == pytest.approx(numbers / 1e6)


def test_gap_of_shapfeds_figure_3_is_between_blocks_on_and_off_the_diagonal():
    # Clients [4] by classes [4], in blocks of two.
    values = torch.zeros(4, 4)
    values[:2, :2] = 1.0
    values[2:, 2:] = 0.5  # the lowest on the diagonal
    values[:2, 2:] = 0.1  # the highest off the diagonal

    gap_of_blocks = gap({"cssv": values.tolist()}, {}, "", "")

    assert gap_of_blocks == pytest.approx(0.5 - 0.1)


def test_coalition_utilities_are_those_of_averaged_models():
    """Against torch's own forward pass of every coalition's average."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    space = ParameterSpace(network)
    vectors = torch.randn(4, space.size, generator=generator)
    initial = torch.randn(space.size, generator=generator)
    images = torch.randn(40, 1, 2, 3, generator=generator)
    labels = torch.randint(3, (40,), generator=generator)

    table = utilities(vectors, initial, images, labels)

    for coalition in range(16):
        members = [client for client in range(4) if coalition >> client & 1]
        model = initial
        if members:
            model = vectors[members].mean(0)
        space.write(network, model)
        is_right = network(images).argmax(1) == labels
        accuracy = is_right.double().mean().item()
        assert float(table[coalition]) == pytest.approx(accuracy)
