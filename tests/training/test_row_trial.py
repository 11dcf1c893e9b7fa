"""What steps hang on beside parameters, buffers and the batch: rows come to what models come to one after the other, or
are refused before training."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from flsv import FederatedLoop, Reporting
from flsv.core.parameter_space import ParameterSpace
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.utilities.errors import ConfigurationError
from helpers import slow_except
from helpers.coalitions_by_hand import SEED, KeepsModels, data
from helpers.fits import fit, trainer_for, vector
from helpers.models import STEP_CASES, Hooks, Stepped, clamp

#: Clients 0 and 2; all.
MASKS = torch.tensor([[True, False, True], [True, True, True]])
#: One of each way in which a step could be another.
FAST = (
    "annealed per batch by a callback",
    "annealed by current_epoch",
    "a generator of NumPy",
    "NumPy's own generator",
    "a masked loss",
    "torchmetrics",
    "accumulated",
    "a timer that clamps weights",
    "a layer under two names",
)
NAMES = slow_except(FAST, STEP_CASES)


def loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(seed=SEED, reporting=Reporting(table=False, files=False), **options)


def alone(name: str, folder: Path) -> RetrainedUtility:
    make, callbacks, *_ = STEP_CASES[name]
    torch.manual_seed(SEED)

    def trainer(cohort: FixedCohort) -> L.Trainer:
        return trainer_for(loop(sampler=cohort), folder, rounds=2, callbacks=callbacks())

    return RetrainedUtility(trainer, make(), data(), "negative_loss")


def trained(name: str, folder: Path, federation: FederatedLoop, refused: str | None) -> Any:
    """The module after a fit of two rounds; None where it was refused before the first."""
    make, callbacks, *_ = STEP_CASES[name]
    torch.manual_seed(SEED)
    module = make()
    before = vector(module)
    if refused is None:
        return fit(federation, folder, module, data(), rounds=2, callbacks=callbacks())
    with pytest.raises(ConfigurationError, match=refused):
        fit(federation, folder, module, data(), rounds=2, callbacks=callbacks())
    assert federation.round_index == 0
    assert torch.equal(vector(module), before)
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_shadow_coalitions_are_batched_or_trained_by_fits_for_the_stated_reason(tmp_path: Path, name: str) -> None:
    refused = STEP_CASES[name][2]
    federation = loop(metrics={"shadow": KeepsModels(coalitions=[[0, 2]], performance="negative_loss")})
    module = trained(name, tmp_path, federation, None)
    game = alone(name, tmp_path)
    for mask in MASKS:
        game(mask[None])
        if refused is None:
            assert game.model is not None
            model = federation.metrics["shadow"].models[tuple(mask.tolist())]
            torch.testing.assert_close(model, game.model[0], rtol=1e-5, atol=1e-5)
    assert game.model is not None
    assert torch.equal(ParameterSpace(module).read(module), game.model[0])  # of all: a metric changes no training
    way = federation._plan.why  # else each coalition was trained by a fit of its own
    assert way is None if refused is None else re.search(refused, way)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_vmap_clients_equal_sequential_ones_or_are_refused(tmp_path: Path, name: str) -> None:
    many = trained(name, tmp_path, loop(engine="vmap"), STEP_CASES[name][4])
    if many is not None:
        one = trained(name, tmp_path, loop(), None)
        torch.testing.assert_close(vector(many), vector(one), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_weights_changed_between_rounds_switch_to_fits_with_a_warning(tmp_path: Path) -> None:
    federation = loop(metrics={"shadow": KeepsModels(coalitions="singles")})
    with pytest.warns(match="weights or buffers have changed between rounds 1 and 2"):
        fit(federation, tmp_path, Stepped(), data(), rounds=2, callbacks=[Hooks("on_train_epoch_end", clamp)])
