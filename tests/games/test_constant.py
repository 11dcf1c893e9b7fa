"""A model that always gives the same answer has learned nothing, whatever its accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from toys import Plain, fit

from flsv.games.constant import LEVEL, told_apart
from flsv.games.evaluation.scores import Scores, score_batch
from flsv.loop import FederatedLoop
from flsv.metrics import PartialFederatedShapley
from flsv.report import write_report

BY = ("accuracy", "balanced_accuracy", "negative_loss")


def scores_of(logits: Tensor, y: Tensor) -> Scores:
    correct, losses = score_batch(logits[None], y)
    return Scores(correct, torch.bincount(y, minlength=logits.shape[1]), losses / len(y))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("share", [0.06, 0.5])
def test_predictions_that_have_nothing_to_do_with_the_labels_are_hardly_ever_told_apart(by: str, share: float) -> None:
    generator, found = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        y = (torch.rand(200, generator=generator) < share).long()
        logits = torch.stack([torch.zeros(200), share - 0.5 + torch.randn(200, generator=generator)], 1)
        found += told_apart(scores_of(logits, y), by)
    assert found <= 400 * LEVEL + 3 * (400 * LEVEL * (1 - LEVEL)) ** 0.5


@pytest.mark.parametrize("by", BY)
def test_a_constant_answer_is_not_told_apart_and_one_that_follows_the_labels_is(by: str) -> None:
    y = torch.tensor([0] * 70 + [1] * 30)
    prior = torch.tensor([0.7, 0.3]).log().repeat(100, 1)
    assert not told_apart(scores_of(prior, y), by)
    assert told_apart(scores_of(prior + 2 * torch.nn.functional.one_hot(y, 2), y), by)


@pytest.mark.parametrize(("lr", "learned"), [(0.0, False), (0.5, True)])
def test_the_warning_the_record_and_the_report_say_it(tmp_path: Path, lr: float, learned: bool) -> None:
    module = Plain(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr))
    for parameter in list(module.parameters())[-2:]:
        torch.nn.init.zeros_(parameter)
    loop = FederatedLoop(metrics={"sv": PartialFederatedShapley(performance="negative_loss")}, seed=0)
    if learned:
        fit(loop, tmp_path, module, rounds=2)
    else:
        with pytest.warns(UserWarning, match="not told apart from a constant answer by negative_loss"):
            fit(loop, tmp_path, module, rounds=2)
    told = json.loads((tmp_path / "run.json").read_text())["paid_in"]["sv"]
    assert told["told_apart"] == learned
    assert (told["end"] > told["start"]) == learned
    assert told["sum"] == pytest.approx(float(loop.contributions["sv"].nansum()))
    page = write_report(tmp_path, out=tmp_path / "a.md")[0].read_text()
    assert ("always gives the same answer" in page) == (not learned)
    assert "What sv shares out" in page
