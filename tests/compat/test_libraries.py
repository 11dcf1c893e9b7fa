"""Modules of public libraries, in an environment of their own: weights and values are those of a loop by hand."""

import json

import pytest
import torch
from compat.base import make_federated_data
from compat.by_hand import fedavg_by_hand, validate_with_trainer
from compat.libraries import KINDS
from compat.runs import ROUNDS, train_federated, train_with_values

from flsv.metrics import ShadowShapley

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module", params=KINDS)
def library(request):
    """The module of a library that is installed."""
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture(scope="module")
def pair(library, tmp_path_factory):
    """The same training in a federation that plays a game every round, and by hand."""
    return train_with_values(KINDS[library], tmp_path_factory.mktemp(library))


def test_module_of_a_library_trains_as_the_loop_by_hand(pair):
    pair.check()


def test_shapley_values_with_a_librarys_module_equal_those_by_hand(pair):
    pair.check_values()


def test_values_by_retraining_a_librarys_module_equal_those_by_hand(library, tmp_path):
    """What compares all clients' second training with the run doubts nothing."""
    kind = KINDS[library]
    metric = ShadowShapley(
        coalitions="all",
        performance=kind.logged,
        mode="min",
        verify="all",
    )
    _, loop = train_federated(
        kind,
        tmp_path,
        metrics={"value": metric},
    )

    gains = {}
    for members in [(), (0,), (1,), (0, 1)]:
        model = kind.module()
        if members:
            model, _ = fedavg_by_hand(
                model,
                kind.data(),
                make_federated_data(kind),
                tmp_path,
                ROUNDS,
                kind.callbacks,
                members=members,
            )
        loss = validate_with_trainer(model, kind.data(), kind.logged)
        gains[members] = -loss
    added_alone = torch.tensor([gains[0,], gains[1,]]) - gains[()]
    added_last = gains[0, 1] - torch.tensor([gains[1,], gains[0,]])
    expected = (added_alone + added_last) / 2
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["events"] == []
    torch.testing.assert_close(
        loop.contributions["value"],
        expected,
        rtol=1e-5,
        atol=1e-6,
    )
