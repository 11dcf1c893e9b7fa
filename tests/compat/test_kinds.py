"""Every kind of module, as it is, in a federation: what comes out is what a loop written by hand gives, and resumes."""

from functools import partial

import pytest
from compat.base import make_federated_data
from compat.by_hand import SEED
from compat.kinds import KINDS
from compat.runs import train_with_values

from flsv import FederatedLoop, Reporting
from flsv.metrics import PartialFederatedShapley
from helpers import slow_except
from helpers.fits import assert_resumes


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """The same training in a federation that plays a game every round, and by hand."""
    return train_with_values(KINDS[request.param], tmp_path_factory.mktemp(request.param))


def test_every_kind_of_module_trains_as_the_loop_by_hand(pair):
    pair.check()


def test_shapley_values_of_every_kind_of_module_equal_those_by_hand(pair):
    pair.check_values()


#: State in odd places. Fast: two optimizers, a state that is carried on.
RESUMED = ("byol", "backbone-finetuning", "hooks")
FAST = ("wgan-spectral-norm", "carried-lstm-state")


@pytest.mark.parametrize("name", slow_except(FAST, (*FAST, *RESUMED)))
def test_kind_of_module_resumes_bitwise(tmp_path, name):
    kind = KINDS[name]

    def loop() -> FederatedLoop:
        value = PartialFederatedShapley(performance=kind.logged, mode="min")
        reporting = Reporting(table=False)
        return FederatedLoop(
            metrics={"value": value}, optimizer_state="persist", seed=SEED, reporting=reporting
        )

    assert_resumes(loop, tmp_path, kind.module, partial(make_federated_data, kind))
