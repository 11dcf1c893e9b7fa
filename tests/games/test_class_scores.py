"""AUROC, average precision and F1 of classes as utilities, compared with scikit-learn's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics
from played import federated, never, played
from task_kinds import Data, Kind, Multilabel, Regression, numbers
from torch import Tensor
from toys import fit, trainer_for

from flsv import Reporting
from flsv.errors import ConfigurationError
from flsv.games.retraining import RetrainedUtility
from flsv.loop import FederatedLoop
from flsv.metrics import PartialFederatedShapley
from flsv.parameters import ParameterSpace


class Classes(Kind):
    """A logit for each of some classes, or one logit of two; labels that no line tells apart."""

    outputs = 2

    @classmethod
    def data(cls) -> Data:
        classes = max(2, cls.outputs)

        def item(i: int) -> tuple[Tensor, Tensor]:
            x = numbers(i, 3)
            return x, (x[0] > 0).long() if i % 3 else torch.tensor(i // 3 % classes)

        return Data(item, sizes=(60,))

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0])
        both = torch.cat([torch.zeros_like(logits), logits], 1) if self.outputs == 1 else logits
        return torch.nn.functional.cross_entropy(both, batch[1])


class OneOutput(Classes):
    outputs = 1


class ThreeClasses(Classes):
    outputs = 3


class Certain(Classes):
    """Probabilities; the most probable class is what counts, and not how sure the model is."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).softmax(1)

    def loss(self, batch: Any) -> Tensor:
        return torch.nn.functional.nll_loss(self(batch[0]).log(), batch[1])


def by_scikit_learn(name: str, probabilities: np.ndarray, y: np.ndarray) -> float:
    of = {"auroc": sklearn.metrics.roc_auc_score, "average_precision": sklearn.metrics.average_precision_score}
    if name == "f1":
        average = "binary" if probabilities.shape[1] == 2 else "macro"
        return float(sklearn.metrics.f1_score(y, probabilities.argmax(1), average=average))
    if probabilities.shape[1] == 2:
        return float(of[name](y, probabilities[:, 1]))
    return float(np.mean([of[name](y == c, probabilities[:, c]) for c in np.unique(y)]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Classes, OneOutput, ThreeClasses, Certain])
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("auroc", torchmetrics.AUROC(task="binary")),
        ("average_precision", torchmetrics.AveragePrecision(task="binary")),
        ("f1", torchmetrics.F1Score(task="binary")),
    ],
)
def test_scores_of_classes_are_scikit_learns(tmp_path: Path, kind: Any, name: str, metric: Any) -> None:
    torch.manual_seed(1)
    module = kind()
    x, y = (torch.cat(parts) for parts in zip(*kind.data().val_dataloader()))
    for measure in (name,) if kind is ThreeClasses else (name, metric):
        values, vectors = played(tmp_path, module, federated(kind.data()), performance=measure)
        expected = []
        for vector in vectors:
            own = copy.deepcopy(module).eval()
            ParameterSpace(own).write(own, vector)
            with torch.no_grad():
                found = own(x).double()
            both = torch.cat([torch.zeros_like(found), found], 1) if kind is OneOutput else found
            expected.append(by_scikit_learn(name, (both if kind is Certain else both.softmax(1)).numpy(), y.numpy()))
        assert len(set(expected)) > 1
        assert values.tolist() == pytest.approx(expected, abs=1e-6)


def test_scores_of_classes_by_retraining_and_refused(tmp_path: Path) -> None:
    def trainer(cohort: Any) -> L.Trainer:
        return trainer_for(FederatedLoop(sampler=cohort, seed=0, reporting=Reporting(table=False)), tmp_path, 1)

    utility = RetrainedUtility(trainer, Classes(), federated(Classes.data()), "auroc")
    assert 0 < float(utility(torch.tensor([[True, False, True]]))) < 1
    refused = [
        (Regression, "f1", "one integer class per sample"),
        (Multilabel, "auroc", "one integer class per sample"),
    ]
    alone = type("Alone", (Classes,), {"data": staticmethod(lambda: Data(lambda i: (numbers(i, 3), torch.tensor(1))))})
    refused += [
        (alone, "auroc", "all of class 1"),
        (ThreeClasses, torchmetrics.AUROC(task="binary"), "BinaryAUROC does"),
    ]
    for kind, measure, said in refused:
        loop = FederatedLoop(metrics={"mine": PartialFederatedShapley(performance=measure)}, seed=3)
        with pytest.raises(ConfigurationError, match=said):
            fit(loop, tmp_path, never(kind), federated(kind.data()))
