"""AUROC, average precision and F1 of classes as utilities, compared with scikit-learn's."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics
from torch import Tensor, nn

from flsv.errors import ConfigurationError
from flsv.games import ModelEvaluator, performance_of
from flsv.parameters import ParameterSpace

KINDS = {
    "two logits": lambda: nn.Linear(3, 2),
    "one logit": lambda: nn.Linear(3, 1),
    "three logits": lambda: nn.Linear(3, 3),
    "probabilities": lambda: nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)),
}
METRICS = {
    "auroc": torchmetrics.AUROC(task="binary"),
    "average_precision": torchmetrics.AveragePrecision(task="binary"),
    "f1": torchmetrics.F1Score(task="binary"),
}


def batches(classes: int) -> list[tuple[Tensor, Tensor]]:
    """Labels that no line tells apart."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = torch.where(torch.arange(60) % 3 > 0, x[:, 0] > 0, torch.arange(60) // 3 % classes)
    return list(zip(x.split(16), y.split(16)))


def evaluator(net: nn.Module, measure: Any, data: list[tuple[Tensor, Tensor]]) -> ModelEvaluator:
    return ModelEvaluator(net, ParameterSpace(net), data, metric=performance_of("mine", measure, None).of)  # type: ignore[union-attr,arg-type]


def by_scikit_learn(name: str, probabilities: np.ndarray, y: np.ndarray) -> float:
    of = {"auroc": sklearn.metrics.roc_auc_score, "average_precision": sklearn.metrics.average_precision_score}
    if name == "f1":
        average = "binary" if probabilities.shape[1] == 2 else "macro"
        return float(sklearn.metrics.f1_score(y, probabilities.argmax(1), average=average))
    if probabilities.shape[1] == 2:
        return float(of[name](y, probabilities[:, 1]))
    return float(np.mean([of[name](y == c, probabilities[:, c]) for c in np.unique(y)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METRICS)
def test_scores_of_classes_are_scikit_learns(kind: str, name: str) -> None:
    net, data = KINDS[kind](), batches(3 if kind == "three logits" else 2)
    space = ParameterSpace(net)
    vectors = torch.randn(5, space.size, generator=torch.Generator().manual_seed(1))
    x, y = (torch.cat(parts) for parts in zip(*data))
    expected = []
    for vector in vectors:
        own = copy.deepcopy(net)
        space.write(own, vector)
        with torch.no_grad():
            found = own(x).double()
        found = torch.cat([torch.zeros_like(found), found], 1) if kind == "one logit" else found
        found = found if kind == "probabilities" else found.softmax(1)
        expected.append(by_scikit_learn(name, found.numpy(), y.numpy()))
    assert len(set(expected)) > 1
    for measure in (name,) if kind == "three logits" else (name, METRICS[name]):
        found = evaluator(net, measure, data)(vectors).value("metric")
        assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "measure", "labels", "message"),
    [
        ("two logits", "f1", torch.rand(8), "one integer class per sample"),
        ("two logits", "auroc", torch.ones(8, 3).long(), "one integer class per sample"),
        ("two logits", "auroc", torch.ones(8).long(), "all of class 1"),
        ("three logits", METRICS["auroc"], torch.arange(8) % 2, "BinaryAUROC does"),
    ],
)
def test_what_has_no_such_score_is_refused(kind: str, measure: Any, labels: Tensor, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        evaluator(KINDS[kind](), measure, [(torch.rand(8, 3), labels)])
