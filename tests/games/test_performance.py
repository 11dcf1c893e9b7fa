"""A performance that a game is played in: torchmetrics, by configuration, by retraining, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from played import MASKS, federated, never, played, validated
from task_kinds import (
    VAE,
    Data,
    Glue,
    Kind,
    LanguageModel,
    Multilabel,
    OneLogit,
    Regression,
    Segmentation,
    SeveralLoaders,
    numbers,
)
from torch import Tensor
from toys import Plain, fit, toy_data, trainer_for

from flsv import ClientEvaluation, Reporting
from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.errors import ConfigurationError
from flsv.games.retraining import RetrainedUtility
from flsv.loop import FederatedLoop
from flsv.metrics import (
    CumulativeShapley,
    DecayedShapley,
    LeaveOneOut,
    OneRoundShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.parameters import ParameterSpace


def test_classifiers_are_measured_on_all_loaders_and_without_augmentation(tmp_path: Path) -> None:
    """Hooks see that it is a validation, whatever is evaluated."""

    class Classifier(SeveralLoaders):
        data = staticmethod(lambda: Data(lambda i: ((x := numbers(i, 3)), int(x.sum() > 0)), sizes=(7, 12)))

        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 2)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return (x * 0 if self.trainer.training else x + dataloader_idx), y

        def loss(self, batch: Any) -> Tensor:
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    module = Classifier()
    loop = FederatedLoop(
        metrics={
            "fast": LeaveOneOut(performance="negative_loss"),
            "logged": LeaveOneOut(performance="val_loss", mode="min"),
            "hits": LeaveOneOut(),
            "metric": LeaveOneOut(performance=torchmetrics.Accuracy(task="multiclass", num_classes=2)),
        },
        evaluation=ClientEvaluation(every=1),
        seed=3,
        reporting=Reporting(table=False),
    )
    data = FederatedDataModule(Classifier.data(), SizePartitioner([3, 1, 2]), splits=Splits(client_test=0.5))
    Classifier.training_step = lambda self, batch, _: self.loss((batch[0] + 1, batch[1]))  # type: ignore[assignment]
    fit(loop, tmp_path, module, data, rounds=1)
    found = loop.contributions
    assert found["fast"].abs().min() > 0
    torch.testing.assert_close(found["fast"], found["logged"], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found["hits"], found["metric"])
    assert loop.client_accuracy is not None
    for client, accuracy in enumerate(loop.client_accuracy.tolist()):
        x, y = (torch.cat(parts) for parts in zip(*data.client_loader(client, "test")))
        assert accuracy == pytest.approx((module(x).argmax(-1) == y).float().mean().item())


METRICS = [
    (Regression, torchmetrics.MeanSquaredError(), -1),
    (OneLogit, torchmetrics.F1Score(task="binary"), 1),
    (Segmentation, torchmetrics.JaccardIndex(task="multiclass", num_classes=2), 1),
    (Multilabel, torchmetrics.AUROC(task="multilabel", num_labels=3), 1),
    (LanguageModel, torchmetrics.text.Perplexity(), -1),
]


@pytest.mark.parametrize(("kind", "metric", "sign"), METRICS, ids=[kind.__name__ for kind, _, _ in METRICS])
def test_a_torchmetrics_metric_of_forward(tmp_path: Path, kind: Any, metric: Any, sign: int) -> None:
    torch.manual_seed(1)
    module = kind()
    values, vectors = played(tmp_path, module, federated(kind.data()), performance=metric)
    expected = []
    for vector in vectors:
        own = copy.deepcopy(module).eval()
        ParameterSpace(own).write(own, vector)
        batches = list(kind.data().val_dataloader())
        with torch.no_grad():
            preds, y = torch.cat([own(x) for x, _ in batches]), torch.cat([y for _, y in batches])
        preds = preds.sigmoid() if kind in (OneLogit, Multilabel) else preds
        expected.append(sign * float(copy.deepcopy(metric)(preds.squeeze(-1) if preds.shape[1:] == (1,) else preds, y)))
    assert len(set(expected)) > 1
    assert values.tolist() == pytest.approx(expected, rel=1e-5)
    assert not metric.update_called


class Probability(OneLogit):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sigmoid()


@pytest.mark.parametrize("kind", [OneLogit, Probability])
def test_logits_and_probabilities_are_told_apart_once(tmp_path: Path, kind: Any) -> None:
    """torchmetrics would take a batch whose logits all lie in [0, 1] for probabilities. All of these models' do."""

    class Small(kind):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    torch.manual_seed(1)
    module = Small()
    module.net.weight.data *= 0.05
    module.net.bias.data.fill_(0.3)
    values, vectors = played(tmp_path, module, federated(kind.data()), performance=torchmetrics.Accuracy(task="binary"))
    hits = [
        float((((x @ vector[:3] + vector[3]) > 0) == y).float().mean())
        for vector in vectors
        for x, y in [[torch.cat(parts) for parts in zip(*kind.data().val_dataloader())]]
    ]
    assert values.tolist() == pytest.approx(hits)


FAMILY: dict[str, Any] = {
    "partial": PartialFederatedShapley,
    "cumulative": CumulativeShapley,
    "leave": LeaveOneOut,
    "decayed": DecayedShapley,
    "surrogate": SurrogateFederatedShapley,
    "one_round": lambda **kwargs: OneRoundShapley(2, **kwargs),
}


@pytest.mark.slow
def test_resumed_bit_for_bit_and_not_with_another_measure(tmp_path: Path) -> None:
    def loop(average: str = "macro", mode: Any = "min") -> FederatedLoop:
        f1 = torchmetrics.F1Score(task="multiclass", num_classes=5, average=average)
        metrics = {
            "logged": PartialFederatedShapley(performance="val_loss", mode=mode, momentum=0.5),
            "f1": CumulativeShapley(performance=f1),
        }
        return FederatedLoop(metrics=metrics, seed=3, reporting=Reporting(table=False))

    class Noisy(VAE):
        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x)[:, :2])

    def start() -> Noisy:
        torch.manual_seed(1)
        return Noisy()

    whole, half, rest = loop(), loop(), loop()
    fit(whole, tmp_path / "whole", start(), federated(VAE.data()), rounds=3)
    saving = {"enable_checkpointing": True, "callbacks": [L.pytorch.callbacks.ModelCheckpoint(tmp_path, "half")]}
    fit(half, tmp_path, start(), federated(VAE.data()), rounds=2, **saving)
    fit(rest, tmp_path, start(), federated(VAE.data()), rounds=3, ckpt_path=tmp_path / "half.ckpt")
    for name, value in whole.contributions.items():
        assert torch.equal(value, rest.contributions[name]), name
    for other, said in ((loop(average="micro"), "metrics.f1 is"), (loop(mode="max"), "metrics.logged is")):
        with pytest.raises(ConfigurationError, match=said):
            fit(other, tmp_path, start(), federated(VAE.data()), rounds=3, ckpt_path=tmp_path / "half.ckpt")


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision_is_the_trainers(tmp_path: Path, precision: str) -> None:
    class Logs(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            assert logits.dtype == (torch.bfloat16 if "bf16" in precision else torch.float64)
            self.log("loss", torch.nn.functional.cross_entropy(logits.double(), batch[1]))

    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
    metrics = {
        "logged": LeaveOneOut(performance="loss", mode="min"),
        "loss": LeaveOneOut(performance="negative_loss"),
        "metric": LeaveOneOut(performance=accuracy),
        "hits": LeaveOneOut(),
    }
    loop = FederatedLoop(metrics=metrics, seed=3, reporting=Reporting(table=False))
    fit(loop, tmp_path, Logs(), toy_data(server_val=0.3), rounds=1, precision=precision)
    found = loop.contributions
    torch.testing.assert_close(found["logged"], found["loss"], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found["metric"], found["hits"])


def test_by_retraining(tmp_path: Path) -> None:
    data = federated(Regression.data())

    def trainer(cohort: Any) -> L.Trainer:
        return trainer_for(
            FederatedLoop(sampler=cohort, seed=5, reporting=Reporting(table=False)), tmp_path, 1, limit_val_batches=0
        )

    torch.manual_seed(1)
    module = Regression()
    logged = RetrainedUtility(trainer, module, data, metric="val_loss", mode="min")(MASKS[[0, 4]])
    measured = RetrainedUtility(trainer, module, data, metric=torchmetrics.MeanSquaredError())(MASKS[[0, 4]])
    torch.testing.assert_close(logged, measured, rtol=1e-5, atol=1e-6)
    expected = validated(module, ParameterSpace(module).read(module), Regression.data(), tmp_path)["val_loss"]
    assert logged[0].item() == -expected


class TwoNumbers(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_step_only", 1.0, on_step=True, on_epoch=False)


class GlueWithForward(Glue):
    def forward(self, batch: Any) -> Tensor:
        raise AssertionError("batches that are no pairs are not given to forward")


class NoValidation(Kind):
    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "measure", "said"),
    [
        (
            Regression,
            {"performance": "acc", "mode": "max"},
            r"Regression logs no 'acc' when it validates. It logs \['v",
        ),
        (TwoNumbers, {"performance": "val_step_only", "mode": "max"}, r"logs no 'val_step_only' .* It logs \[\]"),
        (NoValidation, {"performance": "val_loss", "mode": "min"}, "validation_step, which is not defined"),
        (
            GlueWithForward,
            {"performance": torchmetrics.F1Score(task="binary")},
            "on batches .x, y., and a batch is dict",
        ),
        (
            Segmentation,
            {"performance": torchmetrics.Accuracy(task="multiclass", num_classes=2, average="none")},
            r"gives \[2\], expected one number",
        ),
    ],
)
def test_refused_before_the_first_round(tmp_path: Path, kind: Any, measure: Any, said: str) -> None:
    loop = FederatedLoop(metrics={"mine": PartialFederatedShapley(**measure)}, seed=3)
    data = federated(getattr(kind, "data", Regression.data)())
    with pytest.raises(ConfigurationError, match=said):
        fit(loop, tmp_path, never(kind), data)


@pytest.mark.parametrize("make", [PartialFederatedShapley, *list(FAMILY.values())[1:]])
@pytest.mark.parametrize(
    ("measure", "said"),
    [
        ({"performance": "acc"}, r"performance='acc'\): for a value that the module logs .* say also mode="),
        ({"performance": "custom"}, r"performance='custom'\): for a value"),
        ({"performance": "val_loss", "mode": "down"}, 'expected "min" or "max"'),
        ({"performance": "accuracy", "mode": "min"}, "more of it is better"),
        ({"performance": torchmetrics.MeanMetric()}, "does not say whether more of it is better"),
        ({"performance": 3}, "expected one of"),
    ],
)
def test_refused_at_construction(make: Any, measure: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make(**measure)
