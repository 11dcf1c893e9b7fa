"""A model that always gives the same answer has learned nothing, whatever its accuracy."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from flsv.federation import FederatedLoop
from flsv.federation.learned import LEVEL, beats_constant, score_beats_chance
from flsv.games.scores import Scores, score_batch
from flsv.metrics import ContributionMetric, CosineGradientShapley, PartialFederatedShapley
from flsv.report import write_report
from flsv.results.text import change
from flsv.scores.ranking import ClassScore
from helpers.data import toy_data
from helpers.fits import fit, trainer_for
from helpers.models import Plain
from helpers.pages import text_of

BY = ("accuracy", "balanced_accuracy", "negative_loss")


def scores_of(logits: Tensor, y: Tensor) -> Scores:
    correct, losses = score_batch(logits[None], y)
    support = torch.bincount(y, minlength=logits.shape[1])
    return Scores({"correct": correct, "loss": losses / len(y)}, support)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("share", [0.06, 0.5])
def test_predictions_independent_of_the_labels_seldom_beat_a_constant(by: str, share: float) -> None:
    generator, found = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        y = (torch.rand(200, generator=generator) < share).long()
        logits = torch.stack([torch.zeros(200), share - 0.5 + torch.randn(200, generator=generator)], 1)
        found += beats_constant(scores_of(logits, y), by)
    assert found <= 400 * LEVEL + 3 * (400 * LEVEL * (1 - LEVEL)) ** 0.5


@pytest.mark.parametrize("share", [0.06, 0.5])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("by", ["auroc", "average_precision", "f1"])
def test_class_scores_of_random_probabilities_seldom_beat_chance(by: str, classes: int, share: float) -> None:
    generator, found, learned = torch.Generator().manual_seed(0), 0, 0
    for _ in range(200):
        y = (torch.rand(200, generator=generator) < share).long()
        y = y * torch.randint(1, classes, (200,), generator=generator)
        drawn = torch.rand(200, classes, generator=generator).softmax(1)
        for noise, told in ((1.0, False), (0.5, True)):
            score = ClassScore(by)
            score.update((1 - noise) * torch.nn.functional.one_hot(y, classes) + noise * drawn, y)
            apart = score_beats_chance(by, float(score.compute()), y, classes)
            found, learned = found + (apart and not told), learned + (apart and told)
    assert found <= 200 * LEVEL + 3 * (200 * LEVEL * (1 - LEVEL)) ** 0.5
    assert learned > 190
    assert not score_beats_chance("auroc", 0.5, y, classes)


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (4, 0), (5, 0), (9, 1), (9, 4)])
def test_accuracy_beats_the_majority_class_by_scipys_binomial_test(won: int, lost: int) -> None:
    scores = Scores({"correct": torch.tensor([[94 - lost, won]])}, torch.tensor([94, 9]))
    expected = won + lost > 0 and bool(binomtest(won, won + lost, alternative="greater").pvalue < LEVEL)
    assert beats_constant(scores, "accuracy") == expected


class Stuck(Plain):
    """Gives all classes the same logit, and with a learning rate learns what to give."""

    def __init__(self, lr: float) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr))
        for parameter in list(self.parameters())[-2:]:
            torch.nn.init.zeros_(parameter)


class Pair(Plain):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.net(x) * scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0], 1.0), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def told_of(folder: Path) -> tuple[dict[str, Any], str]:
    return json.loads((folder / "run.json").read_text()), text_of(write_report(folder))


AUROC = PartialFederatedShapley(performance="auroc")
LOSS, COSINE = PartialFederatedShapley(performance="negative_loss"), CosineGradientShapley()


@pytest.mark.parametrize(("lr", "learned"), [(0.0, False), (0.5, True)])
@pytest.mark.parametrize(
    ("metric", "named", "by"),
    [(LOSS, "sv", "negative_loss"), (AUROC, "sv", "auroc"), (COSINE, "", "balanced_accuracy")],
    ids=repr,
)
def test_model_no_better_than_a_constant_prediction_is_reported_in_record_and_page(
    tmp_path: Path, capsys: Any, metric: ContributionMetric, named: str, by: str, lr: float, learned: bool
) -> None:
    loop = FederatedLoop(metrics={"sv": copy.deepcopy(metric)}, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, tmp_path, Stuck(lr), rounds=2)
    warned = [
        each
        for each in caught
        if f"Measured by {by}, the model is not clearly better than a constant prediction" in str(each.message)
    ]
    record, page = told_of(tmp_path)
    told = record["paid_in"][named]
    assert (told["by"], told["told_apart"]) == (by, learned)
    assert (told["end"] > told["start"]) == learned
    assert len(warned) == (not learned)
    assert ("always gives the same answer" in page) == (not learned)
    table = " ".join(capsys.readouterr().out.split())  # in a narrow terminal its lines are broken
    assert change(by, told["start"], told["end"])[1:] in table
    assert "not_known" not in record
    assert ("the model is not clearly better than one that always gives the same answer" in table) == (not learned)
    if "sv" in record["paid_in"]:
        paid = record["paid_in"]["sv"]
        assert paid["sum"] == pytest.approx(float(loop.contributions["sv"].nansum()))
        rows = page.partition("distributes the model's")[2].splitlines()
        (row,) = [line for line in rows if line.startswith("| sv |")]
        assert row.endswith(f"| {paid['sum']:.3g} |")


@pytest.mark.parametrize(
    ("module", "data", "options", "why"),
    [
        (Plain, {"server_val": 0.0}, {}, "the server has no validation set"),
        (Pair, {}, {}, "Pair.forward(x) raises TypeError"),
        (Plain, {}, {"limit_val_batches": 0}, "limit_val_batches=0"),
    ],
)
def test_record_says_why_learning_cannot_be_tested(
    tmp_path: Path, capsys: Any, module: type[Plain], data: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    loop = FederatedLoop(metrics={"cgsv": CosineGradientShapley()}, seed=0)
    fit(loop, tmp_path, module(), toy_data(**data), rounds=1, **options)
    record, page = told_of(tmp_path)
    assert record["paid_in"] == {}
    assert why in record["not_known"]
    assert why in page
    said = "flsv cannot test whether the model has learned anything"
    assert f"{said}: " in page
    assert f"{said}: " in capsys.readouterr().out
    assert f"{said}." in text_of(write_report(tmp_path, 0))


def test_resumed_run_keeps_the_initial_performance_of_the_first_fit(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, ckpt_path: Path | None = None) -> dict[str, Any]:
        loop = FederatedLoop(metrics={"sv": PartialFederatedShapley(), "cgsv": CosineGradientShapley()}, seed=0)
        trainer = trainer_for(loop, tmp_path / folder, rounds)
        trainer.fit(Plain(), toy_data(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / folder / "last.ckpt")
        return json.loads((tmp_path / folder / "run.json").read_text())["paid_in"]["sv"]

    whole = run("whole", 3)
    run("first", 1)
    assert run("second", 3, tmp_path / "first/last.ckpt") == whole
    assert whole["start"] < whole["end"]
