"""What every contribution metric is told of a federation, says of itself, and refuses."""

import inspect
import pickle

import pytest
import torch
from testing.metric_cases import METRIC_CASES

from flsv.federation import FederatedLoop
from flsv.metrics import ContributionMetric
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit


class Curious(ContributionMetric):
    def init_states(self, num_clients, num_classes):
        self.add_state("seen", torch.full((num_clients,), float("nan")), dist_reduce_fx="max")

    def update(self, client_ids):
        self.seen[client_ids] = float(self.class_counts is not None)

    def compute(self):
        return self.seen


class Evaluating(Curious):
    uses_ground_truth = True


def test_only_a_metric_that_declares_it_gets_the_class_counts(tmp_path):
    data = toy_data()
    plain = Curious()
    evaluating = Evaluating()
    fit(
        FederatedLoop(metrics={"plain": plain, "evaluating": evaluating}),
        tmp_path,
        data=data,
        rounds=1,
    )

    assert plain.class_counts is None
    assert plain.compute().tolist() == [0, 0, 0]
    assert evaluating.class_counts is not None
    assert torch.equal(evaluating.class_counts, data.class_counts)
    assert evaluating.compute().tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["../x", ""])
def test_metric_named_by_a_path_is_refused(name):
    with refused("metric .*: expected a plain"):
        FederatedLoop(metrics={name: Curious()})


@pytest.mark.parametrize("name", METRIC_CASES)
def test_constructor_arguments_of_a_metric_are_read_only(name):
    metric = METRIC_CASES[name].new()
    attributes = vars(metric).keys() - metric._defaults
    parameters = inspect.signature(type(metric)).parameters
    arguments = [name for name in parameters if name in attributes]

    assert "num_clients" in arguments
    for argument in arguments:
        with refused(f"{name}.{argument} =.*late.*Make another metric"):
            setattr(metric, argument, getattr(metric, argument))


def test_updates_of_a_custom_metric_are_counted_and_need_the_clients():
    metric = Curious(num_clients=3, num_classes=2)
    metric.update(client_ids=torch.tensor([1]))
    copied = pickle.loads(pickle.dumps(metric)).clone()
    copied.update(torch.tensor([0]))

    assert int(metric.rounds) == 1
    assert int(copied.rounds) == 2

    with refused("Pass num_clients and num_classes"):
        Curious().update(torch.tensor([0]))
    with pytest.raises(TypeError, match="missing a required argument: 'client_ids'"):
        metric.update()
