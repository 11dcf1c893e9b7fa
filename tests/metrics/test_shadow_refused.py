"""What ShadowShapley refuses before training, and what it notices while it trains."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from shadow_cases import Draws, Reads, data, loop
from toys import Plain, fit, network

from flsv.aggregation import ShapleyWeighted
from flsv.attacks import ALittleIsEnough
from flsv.clients.algorithms import Ditto, FedProx
from flsv.errors import ConfigurationError
from flsv.loop.shadow import ShadowTraining
from flsv.metrics import ShadowShapley, SurrogateFederatedShapley
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy


class Twice(Plain):
    """Steps by something that batched training does not know."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad *= 2


def refused(folder: Path, match: str, module: L.LightningModule | None = None, **options: Any) -> None:
    def attempt() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(loop(**options), folder, module or Plain(network(batch_norm=False)), data(), rounds=1)

    with pytest.raises(ConfigurationError, match=match):
        attempt()


REFUSED: dict[str, tuple[str, Any]] = {
    "personalizer": ("gives each client a start point", lambda: {"personalizer": Standalone()}),
    "a game that the aggregator reads": ("evaluate models in every round", lambda: {
        "aggregator": ShapleyWeighted("ssv"), "metrics": {"ssv": SurrogateFederatedShapley()}}),
    "noise": ("noise would be spent", lambda: {"uploads": [GaussianPrivacy(1.0, 0.1)]}),
    "colluders": ("compare the updates of one cohort", lambda: {"uploads": [ALittleIsEnough(clients=[0, 1])]}),
    "share": ("stay at their clients", lambda: {"share": ["!net.4.*"]}),
    "optimizer": ("persist", lambda: {"optimizer_state": "persist"}),
    "engine": ("vmap", lambda: {"engine": "vmap"}),
    "two sets": ("different coalitions", lambda: {"metrics": {"other": ShadowShapley(coalitions="singles")}}),
    "algorithm": ("client_algorithm=Ditto", lambda: {"client_algorithm": Ditto()}),
    "no such client": ("names clients", lambda: {"metric": ShadowShapley(coalitions=[[7]])}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_training(tmp_path: Path, what: str) -> None:
    match, options = REFUSED[what]
    refused(tmp_path, match, **options())


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (lambda: Draws(network(batch_norm=False)), "flsv retrain"),
        (lambda: Reads(network(batch_norm=False)), "does not allow it: vmap: .*flsv retrain"),
        (lambda: Twice(network(batch_norm=False)), "on_after_backward"),
        (lambda: Plain(network(batch_norm=False), lambda p: torch.optim.LBFGS(p)), "LBFGS"),
    ],
)
def test_modules_that_cannot_be_batched(tmp_path: Path, module: Any, match: str) -> None:
    refused(tmp_path, match, module())


def test_a_row_that_is_not_the_clients_own_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both began alike and saw the same: here rows step twice as far."""
    from flsv.clients.kernel import StackedOptimizer

    step = StackedOptimizer.step

    def twice(self: Any, *args: Any) -> None:
        step(self, *args)
        step(self, *args)

    monkeypatch.setattr(StackedOptimizer, "step", twice)
    refused(tmp_path, "model of a coalition differs by")


def test_a_loop_of_other_metrics_has_no_shadows() -> None:
    federation = loop()
    assert isinstance(federation.client_algorithm, ShadowTraining)
    assert federation.replace(seed=1).client_algorithm.coalitions == federation.client_algorithm.coalitions
    assert federation.replace(metrics=None).client_algorithm is None
    other = federation.replace(metrics={"s": ShadowShapley(coalitions="singles")})
    assert other.client_algorithm.coalitions == "singles"
    proximal = loop(client_algorithm=FedProx(0.1))
    assert proximal.replace(seed=1).client_algorithm.algorithm.mu == 0.1
    assert isinstance(proximal.replace(metrics=None).client_algorithm, FedProx)
