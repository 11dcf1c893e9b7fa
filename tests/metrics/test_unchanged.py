"""A metric changes no training: the weights with and without it are equal to the bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flsv import FederatedLoop, Reporting, metrics
from flsv.privacy import GaussianPrivacy
from flsv.training.algorithms import InRunValues
from helpers.data import toy_data
from helpers.fits import fit, state_vector
from helpers.models import STEP_CASES, Plain, network

MODULES: dict[str, Callable[[], Any]] = {
    "a generator of NumPy": STEP_CASES["a generator of NumPy"][0],
    "dropout": lambda: Plain(network(batch_norm=False, dropout=0.4)),
    "BatchNorm": Plain,
}
#: What some need beside them.
NEEDS: dict[str, Callable[[], dict[str, Any]]] = {
    "InRunShapley": lambda: {"client_algorithm": InRunValues()},
    "PrivacyLoss": lambda: {"uploads": [GaussianPrivacy(1.0, 0.1)]},
}
#: The base class; and what only a personalizer has measured, which reads it.
LEFT_OUT = ("ContributionMetric", "DomainRelevance")
OPTIONS: dict[str, dict[str, Any]] = {
    "CalibratedOTGradient": {"features": "pixels", "support": 1, "iterations": 1},
    "WassersteinContribution": {"features": "pixels", "support": 1, "iterations": 1},
    "OneRoundShapley": {"rounds": 2},
    "PrivacyLoss": {"privacy": GaussianPrivacy(1.0, 0.1)},
}
ALL = [name for name in metrics.__all__ if name not in LEFT_OUT]


def make_untouched_metric(name: str) -> Any:
    return getattr(metrics, name)(**OPTIONS.get(name, {}))


def fit_and_read_weights(
    folder: Path, make: Any, names: list[str], needs: Any = dict
) -> torch.Tensor:
    loop = FederatedLoop(
        metrics={name: make_untouched_metric(name) for name in names},
        seed=5,
        reporting=Reporting(table=False, files=False),
        **needs(),
    )
    torch.manual_seed(0)

    return state_vector(
        fit(
            loop,
            folder,
            make(),
            toy_data((3, 3, 3), server_val=0.3, client_val=0.2, drop_last=True),
            rounds=2,
        )
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES)
def test_trained_weights_are_the_same_with_and_without_every_metric(
    tmp_path: Path, module: str
) -> None:
    fitted = partial(fit_and_read_weights, tmp_path, MODULES[module])
    without = fitted([])
    together = [name for name in ALL if name not in (*NEEDS, "ShadowShapley")]

    assert torch.equal(fitted(together), without)

    if module in ("a generator of NumPy", "dropout"):  # a fit or two more for each
        assert torch.equal(fitted(["ShadowShapley"]), without)
        assert torch.equal(fitted(["InRunShapley"], NEEDS["InRunShapley"]), without)
        assert torch.equal(
            fitted(["PrivacyLoss"], NEEDS["PrivacyLoss"]), fitted([], NEEDS["PrivacyLoss"])
        )
