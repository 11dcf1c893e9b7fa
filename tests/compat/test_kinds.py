"""Every kind of module, as it is, in a federation: what comes out is what a loop written by hand gives, and resumes."""

from functools import partial
from pathlib import Path

import pytest
import torch
from compat.base import make_federated_data
from compat.by_hand import SEED, coalition_values, validate_with_trainer
from compat.kinds import KINDS
from compat.runs import Pair, train_both_ways
from lightning import LightningModule

from flsv import FederatedLoop, Reporting
from flsv.metrics import PartialFederatedShapley
from helpers import slow_except
from helpers.fits import assert_resumes


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same training in a federation that plays a game every round, and by hand."""
    kind = KINDS[request.param]
    metric = PartialFederatedShapley(
        performance=kind.logged, mode="min", weighting="samples", estimator="exact"
    )
    return train_both_ways(kind, tmp_path_factory.mktemp(request.param), metrics={"value": metric})


def test_every_kind_of_module_trains_as_the_loop_by_hand(pair: Pair) -> None:
    pair.check()


def test_shapley_values_of_every_kind_of_module_equal_those_by_hand(pair: Pair) -> None:
    """Of the last round: a Trainer validates the average of every coalition."""
    kind = pair.kind
    last_round = pair.history[-1]
    source = kind.data()

    def negative_loss(model: LightningModule) -> float:
        return -validate_with_trainer(model, source, kind.logged, **kind.trainer)

    expected = coalition_values(last_round, negative_loss, last_round.sizes)
    values = pair.loop.contributions["value"].double()

    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)


#: State in odd places. Fast: two optimizers, a state that is carried on.
RESUMED = ("byol", "frozen-backbone", "manual-accumulation", "hooks")
FAST = ("wgan-spectral-norm", "carried-lstm-state")


@pytest.mark.parametrize("name", slow_except(FAST, (*FAST, *RESUMED)))
def test_kind_of_module_resumes_bitwise(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]

    def loop() -> FederatedLoop:
        value = PartialFederatedShapley(performance=kind.logged, mode="min")
        reporting = Reporting(table=False)
        return FederatedLoop(
            metrics={"value": value}, optimizer_state="persist", seed=SEED, reporting=reporting
        )

    assert_resumes(loop, tmp_path, kind.module, partial(make_federated_data, kind))
