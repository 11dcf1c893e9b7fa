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


class RecordsWhetherClassCountsAreKnown(ContributionMetric):
    def init_states(self, num_clients, num_classes):
        unknown = torch.full((num_clients,), torch.nan)
        self.add_state("seen", unknown, dist_reduce_fx="max")

    def update(self, client_ids):
        self.seen[client_ids] = float(self.class_counts is not None)

    def compute(self):
        return self.seen


class UsesGroundTruth(RecordsWhetherClassCountsAreKnown):
    uses_ground_truth = True


def test_only_a_metric_that_declares_it_gets_the_class_counts(tmp_path):
    data = toy_data()
    undeclared = RecordsWhetherClassCountsAreKnown()
    declared = UsesGroundTruth()
    loop = FederatedLoop(metrics={"undeclared": undeclared, "declared": declared})
    fit(loop, tmp_path, data=data, rounds=1)

    assert undeclared.class_counts is None
    assert declared.class_counts is not None
    assert torch.equal(declared.class_counts, data.class_counts)
    # Whether each of three clients' updates knew them.
    assert undeclared.compute().tolist() == [0, 0, 0]
    assert declared.compute().tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["../x", ""])
def test_metric_named_by_a_path_is_refused(name):
    with refused("metric .*: expected a plain"):
        FederatedLoop(metrics={name: RecordsWhetherClassCountsAreKnown()})


@pytest.mark.parametrize("name", METRIC_CASES)
def test_constructor_arguments_of_a_metric_are_read_only(name):
    metric = METRIC_CASES[name].new()
    states = metric._defaults
    attributes = vars(metric).keys() - states
    parameters = inspect.signature(type(metric)).parameters
    arguments = [parameter for parameter in parameters if parameter in attributes]

    assert "num_clients" in arguments
    for argument in arguments:
        same_value = getattr(metric, argument)
        with refused(f"{name}.{argument} =.*late.*Make another metric"):
            setattr(metric, argument, same_value)


@pytest.mark.parametrize(
    ("attribute", "successor"),
    [
        ("intervals", r"result\(\)"),
        ("error_bars", r"result\(\)"),
        ("payment_record", r"result\(\)"),
        ("extension", "trains_coalitions"),
    ],
)
def test_metric_with_an_attribute_that_is_no_longer_read_is_refused(attribute, successor):
    with refused(rf"Own\.{attribute} is not read any more.*{successor}"):
        type("Own", (ContributionMetric,), {attribute: None})


def test_updates_of_a_custom_metric_and_of_its_copy_are_counted():
    metric = RecordsWhetherClassCountsAreKnown(num_clients=3, num_classes=2)
    metric.update(client_ids=torch.tensor([1]))
    copied = pickle.loads(pickle.dumps(metric)).clone()
    copied.update(torch.tensor([0]))

    assert int(metric.rounds) == 1
    assert int(copied.rounds) == 2


def test_update_of_a_custom_metric_needs_its_number_of_clients():
    with refused("Pass num_clients and num_classes"):
        RecordsWhetherClassCountsAreKnown().update(torch.tensor([0]))


def test_update_of_a_custom_metric_needs_its_arguments():
    with pytest.raises(TypeError, match="missing a required argument: 'client_ids'"):
        RecordsWhetherClassCountsAreKnown(num_clients=3, num_classes=2).update()
