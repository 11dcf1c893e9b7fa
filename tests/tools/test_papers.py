"""What the tables measure, against formulas by hand."""

import pytest
import torch
from paper_guo import agreement, check
from paper_shapleyfl import utilities
from torch import nn

from flsv.core.parameter_space import ParameterSpace
from helpers import make_generator


@pytest.mark.parametrize(
    ("scenario", "values", "met", "number"),
    [
        (
            "same",
            [1.0, 0.95, 0.89, 1.0, 0.93],
            False,
            -11.0,
        ),
        (
            "sizes",
            [0.2, 0.1, 0.3, 0.4, 0.5],
            False,
            0.9,
        ),  # 1 - 6 (1 + 1) / (5 (25 - 1))
        (
            "noisy",
            [0.5, 0.4, 0.3, 0.2, 0.1],
            True,
            1.0,
        ),
        (
            "mixtures",
            [0.3, 0.3, 0.3, 0.1, -0.01],
            False,
            -0.01,
        ),
        (
            "biased",
            [-0.10, -0.11, -0.12, -0.1, 0.5],
            False,
            0.6,
        ),
    ],
)
def test_agreement_of_values_with_guos_scenarios_equals_that_by_hand(scenario, values, met, number):
    assert check(scenario, values) is met
    assert agreement(scenario, values) == pytest.approx(number)


def test_coalition_utilities_are_those_of_averaged_models():
    """Against torch's own forward pass of every coalition's average."""
    generator = make_generator()
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(6, 3),
    )
    space = ParameterSpace(network)
    vectors = torch.randn(4, space.size, generator=generator)
    initial = torch.randn(space.size, generator=generator)
    images = torch.randn(40, 1, 2, 3, generator=generator)
    labels = torch.randint(3, (40,), generator=generator)

    table = utilities(vectors, initial, images, labels)

    for coalition in range(16):
        members = []
        for client in range(4):
            if coalition >> client & 1:
                members.append(client)

        model = initial
        if members:
            model = vectors[members].mean(0)
        space.write(network, model)

        predictions = network(images).argmax(1)
        is_right = predictions == labels
        accuracy = is_right.double().mean().item()
        assert float(table[coalition]) == pytest.approx(accuracy)
