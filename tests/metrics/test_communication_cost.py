"""CommunicationCost: sums, and that they stay whole numbers."""

import pytest
import torch
from toys import fit, toy_data

from flsv import Reporting
from flsv.attacks import Attack
from flsv.filters import OutlierFilter
from flsv.loop import FederatedLoop
from flsv.metrics import CommunicationCost

ROUNDS = [
    (torch.tensor([0, 2]), torch.tensor([10, 10]), torch.tensor([50, 20])),
    (torch.tensor([1, 2]), torch.tensor([10, 10]), torch.tensor([0, 30])),
]


def metric_after(*rounds, **kwargs):
    metric = CommunicationCost(4, **kwargs)
    for each in rounds:
        metric.update(*each)
    return metric


def test_totals_and_the_last_round():
    metric = metric_after(*ROUNDS, bytes_per_parameter=2)
    assert metric.compute()[:3].tolist() == [[10, 50], [10, 0], [20, 50]]
    assert metric.per_client(metric.compute())[:3].tolist() == [60, 10, 70]
    said = {name: value.item() for name, value in metric.diagnostics().items()}
    assert said == {
        "parameters_up": 40,
        "parameters_down": 100,
        "bytes_up": 80,
        "bytes_down": 200,
        "round_parameters_up": 20,
        "round_parameters_down": 30,
        "round_bytes_up": 40,
        "round_bytes_down": 60,
    }


def test_whoever_took_part_without_sending_anything_has_zero():
    metric = CommunicationCost(2)
    metric.update(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))
    torch.testing.assert_close(
        metric.compute(), torch.tensor([[float("nan")] * 2, [0.0, 0.0]]).double(), equal_nan=True
    )


def test_measured_bytes_count_unless_a_size_is_given():
    ids, up, down = ROUNDS[0]
    sizes = (torch.tensor([11.0, 12.5]), torch.tensor([200.0, 80.0], dtype=torch.float64))
    metric = CommunicationCost(4)
    metric.update(ids, up, down, *sizes)
    said = metric.diagnostics()
    assert (said["bytes_up"], said["bytes_down"], said["round_bytes_up"]) == (24, 280, 24)  # whole bytes
    assert said["parameters_up"] == 20
    half = CommunicationCost(4, bytes_per_parameter=2)
    half.update(ids, up, down, *sizes)
    assert half.diagnostics()["bytes_up"] == 40
    with pytest.raises(ValueError, match="uploaded_bytes"):
        metric.update(ids, up, down, sizes[0][:1], sizes[1])


class Spoils(Attack):
    """A client's update is not finite, or far too large."""

    def __init__(self, client, factor):
        super().__init__([client])
        self.factor = factor

    def attack(self, update, context, generator):
        return update * self.factor


def test_what_is_left_out_has_crossed(tmp_path):
    """Client 1's update crosses and is excluded; client 2 sends none, and has received the model."""
    loop = FederatedLoop(
        metrics={"cost": CommunicationCost()},
        uploads=[Spoils(1, 1e6), Spoils(2, float("nan"))],
        filters=[OutlierFilter(exclude=True)],
        seed=1,
        reporting=Reporting(table=False),
    )
    with pytest.warns(UserWarning, match="left out of the round"):
        fit(loop, tmp_path, data=toy_data((4, 3, 4, 3, 4)), rounds=1)
    size = loop.space.size
    assert loop.contributions["cost"].by_class.tolist() == [
        [size, size],
        [size, size],
        [0, size],
        [size, size],
        [size, size],
    ]
    assert loop.metrics["cost"].diagnostics()["bytes_down"] == 5 * 4 * size
