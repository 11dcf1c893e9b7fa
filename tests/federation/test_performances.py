"""The performance that metrics share out, at the start and the end, beside that of the most frequent class."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flsv.federation import FederatedLoop
from flsv.metrics import CosineGradientShapley, LeaveOneOut, PartialFederatedShapley
from flsv.report import write_report
from flsv.results.text import describe_change
from helpers.data import toy_data
from helpers.fits import fit, trainer_for
from helpers.models import Plain
from helpers.pages import text_of_page


@pytest.mark.parametrize("performance", ["accuracy", "negative_loss", "auroc"])
def test_performances_and_majority_class_are_in_record_terminal_and_page(
    tmp_path: Path, capsys: Any, performance: str
) -> None:
    is_accuracy = performance == "accuracy"
    metric = PartialFederatedShapley(performance=performance)
    loop = FederatedLoop(metrics={"sv": metric}, seed=0)
    data = toy_data()
    fit(loop, tmp_path, Plain(), data, rounds=2)

    (record,) = json.loads((tmp_path / "run.json").read_text())["paid_in"].values()
    labels = torch.cat([y for _, y in data.val_dataloader()])
    majority = labels.bincount().max().item() / len(labels)

    assert record["by"] == performance
    assert record["majority"] == (pytest.approx(majority) if is_accuracy else None)
    assert record["sum"] == pytest.approx(float(loop.contributions["sv"].nansum()))

    # In a narrow terminal its lines are broken.
    printed = " ".join(capsys.readouterr().out.split())
    assert describe_change(record)[1:] in printed
    assert f"The model's {describe_change(record)}." in text_of_page(write_report(tmp_path))
    assert ("the most frequent class alone: " in describe_change(record)) is is_accuracy


def test_resumed_run_keeps_the_initial_performance_of_the_first_fit(tmp_path: Path) -> None:
    def run(folder: str, rounds: int, ckpt_path: Path | None = None) -> dict[str, Any]:
        loop = FederatedLoop(
            metrics={"sv": PartialFederatedShapley(), "cgsv": CosineGradientShapley()}, seed=0
        )
        trainer = trainer_for(loop, tmp_path / folder, rounds)
        trainer.fit(Plain(), toy_data(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / folder / "last.ckpt")

        return json.loads((tmp_path / folder / "run.json").read_text())["paid_in"]["sv"]

    whole = run("whole", 3)
    run("first", 1)

    assert run("second", 3, tmp_path / "first/last.ckpt") == whole
    assert whole["start"] < whole["end"]


class Accuracies(Plain):
    """Logs the share of samples whose label is at a rank of its outputs, as an accuracy."""

    def __init__(self, name: str, sign: int) -> None:
        super().__init__()
        self.name = name
        self.sign = sign

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        outputs = self.sign * self(x)
        is_hit = outputs.argmax(1) == y
        accuracy = is_hit.float().mean()
        self.log(self.name, accuracy)


def fit_with_accuracy(
    folder: Path,
    name: str,
    sign: int,
) -> None:
    loop = FederatedLoop(
        metrics={"loo": LeaveOneOut()},
        seed=3,
    )
    module = Accuracies(name, sign)
    fit(loop, folder, module, rounds=2)


@pytest.mark.parametrize(
    "name",
    [
        "val_acc",
        "val/accuracy",
        "valid_accuracy",
    ],
)
def test_other_accuracy_that_the_module_logs_is_named(
    tmp_path: Path,
    name: str,
) -> None:
    message = f"logs {name} = 0.* valued by its accuracy of 1"
    with pytest.warns(UserWarning, match=message):
        fit_with_accuracy(tmp_path, name, sign=-1)


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("val_acc", 1),
        ("val_acc_top5", -1),
    ],
)
def test_same_accuracy_and_other_values_are_not_named(
    tmp_path: Path,
    name: str,
    sign: int,
    recwarn: pytest.WarningsRecorder,
) -> None:
    fit_with_accuracy(tmp_path, name, sign)
    messages = [str(warning.message) for warning in recwarn]
    assert "are valued" not in " ".join(messages)
