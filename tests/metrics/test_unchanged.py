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
#: Loop options without which these metrics have no values.
OPTIONS_OF_LOOP: dict[str, Callable[[], dict[str, Any]]] = {
    "InRunShapley": lambda: {"client_algorithm": InRunValues()},
    "PrivacyLoss": lambda: {"uploads": [GaussianPrivacy(clip=1.0, noise_multiplier=0.1)]},
}
#: The base class; and what only a personalizer has measured, which reads it.
LEFT_OUT = ("ContributionMetric", "DomainRelevance")
OPTIONS_OF_METRIC: dict[str, dict[str, Any]] = {
    "CalibratedOTGradient": {"features": "pixels", "support": 1, "iterations": 1},
    "WassersteinContribution": {"features": "pixels", "support": 1, "iterations": 1},
    "OneRoundShapley": {"rounds": 2},
    "PrivacyLoss": {"privacy": GaussianPrivacy(clip=1.0, noise_multiplier=0.1)},
}
ALL = [name for name in metrics.__all__ if name not in LEFT_OUT]


def make_untouched_metric(name: str) -> Any:
    return getattr(metrics, name)(**OPTIONS_OF_METRIC.get(name, {}))


def fit_and_read_weights(
    folder: Path,
    make_module: Any,
    metric_names: list[str],
    make_loop_options: Callable[[], dict[str, Any]] = dict,
) -> torch.Tensor:
    loop = FederatedLoop(
        metrics={name: make_untouched_metric(name) for name in metric_names},
        seed=5,
        reporting=Reporting(table=False, files=False),
        **make_loop_options(),
    )
    torch.manual_seed(0)
    data = toy_data((3, 3, 3), server_val=0.3, client_val=0.2, drop_last=True)

    module = fit(loop, folder, make_module(), data, rounds=2)
    return state_vector(module)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES)
def test_trained_weights_are_the_same_with_and_without_every_metric(
    tmp_path: Path, module: str
) -> None:
    weights = partial(fit_and_read_weights, tmp_path, MODULES[module])
    weights_without_metrics = weights([])
    without_loop_options = [
        name for name in ALL if name not in OPTIONS_OF_LOOP and name != "ShadowShapley"
    ]

    assert torch.equal(weights(without_loop_options), weights_without_metrics)

    if module in ("a generator of NumPy", "dropout"):  # a fit or two more for each
        assert torch.equal(weights(["ShadowShapley"]), weights_without_metrics)

        in_run_values = OPTIONS_OF_LOOP["InRunShapley"]  # they change no weights
        assert torch.equal(weights(["InRunShapley"], in_run_values), weights_without_metrics)

        noise = OPTIONS_OF_LOOP["PrivacyLoss"]
        assert torch.equal(weights(["PrivacyLoss"], noise), weights([], noise))
