"""Designs of coalitions: what each trains, and designs of a program's own."""

import pytest
import torch

from flsv.retraining.price import Choice
from flsv.values.designs import BySize, Design, Halves, Listed, design_named, design_of
from helpers import refused


class Ring(Design):
    """Each client alone, and with its neighbor in a ring."""

    def coalitions(self, num_clients):
        alone = torch.eye(num_clients, dtype=torch.bool)
        return torch.cat([alone, alone | alone.roll(1, dims=1)])


class Returns(Design):
    """What it is given."""

    def __init__(self, coalitions):
        self.returned = coalitions

    def coalitions(self, num_clients):
        return self.returned


@pytest.mark.parametrize(("num_clients", "num_coalitions"), [(2, 4), (3, 8), (5, 12)])
def test_coalitions_of_a_design_count_once_with_nobody_and_all_first(num_clients, num_coalitions):
    masks = Ring().masks(num_clients)

    assert masks.sum(1).tolist()[:2] == [0, num_clients]
    assert len(masks) == len(masks.unique(dim=0)) == num_coalitions


@pytest.mark.parametrize(
    ("coalitions", "got"),
    [
        (torch.eye(3), r"torch\.float32 \[3, 3\]"),
        (torch.eye(4, dtype=torch.bool), r"torch\.bool \[4, 4\]"),
    ],
)
def test_design_with_another_type_or_shape_is_refused(coalitions, got):
    with refused(f"Returns.coalitions.3. has returned {got}. Return a bool tensor of shape"):
        Returns(coalitions).masks(3)


@pytest.mark.parametrize(
    ("design", "coalitions"),
    [(BySize("pairs"), "pairs"), (Halves(2), "halves"), (Listed(((0,), (1, 2))), [[0], [1, 2]])],
)
def test_choice_comes_back_from_its_record(design, coalitions):
    record = Choice(design, is_at_once=False, price=2.0).record(3)

    assert record[0] == coalitions
    assert Choice.of_record(record, None).design == design
    assert Choice.of_record(record, Ring()).design == Ring()


def test_named_designs_are_found_by_their_coalitions():
    for name in ("singles", "pairs", "both", "pairs+leave-two-out"):
        assert design_of(design_named(name).masks(6)) == BySize(name)
    assert design_of(Halves(2).planned_masks(6)) == Halves(2)
    assert design_of(Ring().masks(6)) is None
