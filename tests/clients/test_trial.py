"""What the module's forward gives is tried before training, and the trial leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import FEATURES, Plain, fit, network, toy_data, vector

from flsv import ClientEvaluation, ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import LeaveOneOut


class OneLogit(Plain):
    """A binary classifier as many are written: one logit, [B] or [B, 1]."""

    def __init__(self, squeeze: bool) -> None:
        super().__init__(nn.Linear(FEATURES, 1))
        self.squeeze = squeeze

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1) if self.squeeze else self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training had started")


EVERY: dict[str, Any] = {"evaluation": ClientEvaluation(every=1)}


@pytest.mark.parametrize(
    ("loop", "asking", "squeeze"),
    [
        (EVERY, r"ClientEvaluation\(every=1\)", True),
        ({"metrics": {"mine": LeaveOneOut()}}, r"metrics \['mine'\]", False),
    ],
)
def test_one_logit_is_no_classifier(tmp_path: Path, loop: dict[str, Any], asking: str, squeeze: bool) -> None:
    shape = r"\[\d+\]" if squeeze else r"\[\d+, 1\]"
    match = rf"{asking}: the module's forward gives torch.float32 {shape} for \d+ samples of 3 classes; expected logits"
    with pytest.raises(ConfigurationError, match=match):
        fit(FederatedLoop(**loop), tmp_path, OneLogit(squeeze), toy_data(server_val=0.2))


def test_the_trial_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that counts and draws, and a dropout in a layer that is to stay in evaluation mode."""

    class Restless(Plain):
        def __init__(self) -> None:
            super().__init__(network(dropout=0.5))
            self.register_buffer("calls", torch.zeros(()))

        def on_train_start(self) -> None:
            self.net[1].eval()  # a frozen BatchNorm
            self.seen = [layer.training for layer in self.modules()], float(self.calls), torch.get_rng_state()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x) + 1e-3 * torch.rand(1)

    runs = []
    for tried in (True, False):
        with monkeypatch.context() as patch:
            if not tried:
                patch.setattr("flsv.engines.one_process.try_forward", lambda *_: None)
            module = Restless()
            torch.manual_seed(5)
            fit(FederatedLoop(**EVERY, seed=1), tmp_path, module, toy_data())
            runs.append((module, vector(module)))
    (tried, one), (untried, other) = runs
    assert tried.seen[:2] == untried.seen[:2]
    assert torch.equal(tried.seen[2], untried.seen[2])
    assert torch.equal(one, other)
