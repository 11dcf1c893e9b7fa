"""The performance that metrics share out, at the start and the end, beside that of the most frequent class."""

import json

import pytest
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MaxMetric
from torchmetrics.classification import MulticlassAccuracy

from flsv.federation import FederatedLoop
from flsv.metrics import CosineGradientShapley, PartialFederatedShapley, ShadowShapley
from flsv.payment import write_report
from flsv.results.text import describe_change
from flsv.sampling import UniformSampler
from helpers.data import toy_data
from helpers.fits import fit, trainer_for
from helpers.models import LogsLoss, Plain
from helpers.pages import text_of_page
from helpers.runs import read_output


@pytest.mark.fast_rows
@pytest.mark.parametrize("performance", ["accuracy", "negative_loss", "auroc"])
def test_performance_and_sum_of_values_are_in_record_terminal_and_page(
    tmp_path, capsys, performance
):
    metric = PartialFederatedShapley(performance=performance)
    loop = FederatedLoop(metrics={"sv": metric}, seed=0)

    fit(loop, tmp_path, Plain(), toy_data(), rounds=2)

    record = read_record(tmp_path)
    assert record["by"] == performance
    sum_of_values = loop.contributions["sv"].nansum().item()
    assert record["sum"] == pytest.approx(sum_of_values)

    sentence = describe_change(record)
    page = text_of_page(write_report(tmp_path))
    assert sentence[1:] in read_output(capsys)
    assert f"The model's {sentence}." in page


def read_record(folder):
    """Return what a run's record says of the performance that the metric "sv" shares out."""
    return json.loads((folder / "run.json").read_text())["paid_in"]["sv"]


MAJORITY = "always predicting the most frequent class: "


def test_accuracy_is_beside_that_of_the_most_frequent_class(tmp_path):
    loop = FederatedLoop(metrics={"sv": PartialFederatedShapley(performance="accuracy")}, seed=0)
    data = toy_data()

    fit(loop, tmp_path, Plain(), data, rounds=1)

    labels = torch.cat([y for _, y in data.val_dataloader()])
    share_of_most_frequent_class = labels.bincount().max().item() / len(labels)
    record = read_record(tmp_path)
    assert record["majority"] == pytest.approx(share_of_most_frequent_class)
    assert MAJORITY in describe_change(record)


@pytest.mark.fast_rows
@pytest.mark.parametrize("performance", ["negative_loss", "auroc"])
def test_performance_but_the_accuracy_is_without_the_most_frequent_class(tmp_path, performance):
    loop = FederatedLoop(metrics={"sv": PartialFederatedShapley(performance=performance)}, seed=0)

    fit(loop, tmp_path, rounds=1)

    record = read_record(tmp_path)
    assert record["majority"] is None
    assert MAJORITY not in describe_change(record)


@pytest.mark.slow
def test_resumed_run_keeps_the_initial_performance_of_the_first_fit(tmp_path):
    def fit_and_read_record(folder, rounds, ckpt_path=None):
        metrics = {"sv": PartialFederatedShapley(), "cgsv": CosineGradientShapley()}
        loop = FederatedLoop(metrics=metrics, seed=0)
        trainer = trainer_for(loop, folder, rounds)
        trainer.fit(Plain(), toy_data(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(folder / "last.ckpt")
        return read_record(folder)

    uninterrupted = fit_and_read_record(tmp_path / "uninterrupted", 2)
    fit_and_read_record(tmp_path / "begun", 1)
    resumed = fit_and_read_record(tmp_path / "resumed", 2, tmp_path / "begun" / "last.ckpt")

    assert resumed == uninterrupted
    assert uninterrupted["start"] < uninterrupted["end"]


class BestAccuracy(Plain):
    """Logs the best accuracy of all validations since the training began."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.best = MaxMetric()

    def on_train_start(self):
        self.best.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy.update(self(x), y)

    def on_validation_epoch_end(self):
        self.best.update(self.accuracy.compute())
        self.accuracy.reset()
        self.log("best", self.best.compute())


@pytest.mark.slow
def test_untrained_model_is_scored_without_the_state_of_the_sanity_check(tmp_path):
    scores = []
    for num_steps in (0, 1):
        metric = PartialFederatedShapley(performance="best", mode="max")
        loop = FederatedLoop(metrics={"sv": metric}, seed=0)
        module = BestAccuracy()
        folder = tmp_path / str(num_steps)
        # The data have several batches, of which the sanity check sees one.
        data = toy_data(server_val=0.5, batch_size=4)
        fit(loop, folder, module, data, rounds=1, num_sanity_val_steps=num_steps)
        scores.append(read_record(folder)["start"])

    score_without_sanity_check, score_after_sanity_check = scores
    assert score_after_sanity_check == score_without_sanity_check


class Averaged(Plain):
    """Logs the loss of an average of weights."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.net)

    def update_average(self):
        if self.current_epoch > 0:
            self.average.update_parameters(self.net)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("average_loss", F.cross_entropy(self.average(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class AveragedAfterTraining(Averaged):
    def on_train_epoch_end(self):
        self.update_average()


class AveragedBeforeValidation(Averaged):
    def on_validation_epoch_start(self):
        self.update_average()


#: A module, arguments of the loop, and of the metric.
GAINS = {
    "averaged after training": (
        AveragedAfterTraining,
        {},
        {"performance": "average_loss", "mode": "min"},
    ),
    "averaged before validation": (
        AveragedBeforeValidation,
        {},
        {"performance": "average_loss", "mode": "min"},
    ),
    "values that are means over rounds": (Plain, {"sampler": UniformSampler(2)}, {}),
}


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", GAINS)
def test_recorded_gain_is_what_the_values_of_coalitions_distribute(tmp_path, name):
    make, federation, options = GAINS[name]
    metric = ShadowShapley(coalitions="all", **options)
    loop = FederatedLoop(metrics={"sv": metric}, seed=0, **federation)

    fit(loop, tmp_path, make(), toy_data((2, 1, 1)), rounds=3)

    record = read_record(tmp_path)
    gain = record["end"] - record["start"]
    if options.get("mode") == "min":
        gain = -gain
    assert gain == pytest.approx(record["sum"], abs=1e-9)


@pytest.mark.slow
def test_finished_run_that_is_resumed_shows_what_the_module_has_logged(tmp_path, capsys):
    outputs = []
    records = []
    for checkpoint in (None, tmp_path / "last.ckpt"):
        loop = FederatedLoop(metrics={"sv": ShadowShapley(coalitions="singles")}, seed=0)
        trainer = trainer_for(loop, tmp_path, 1)
        trainer.fit(LogsLoss(), toy_data((2, 1, 1)), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        outputs.append(read_output(capsys))
        records.append(json.loads((tmp_path / "run.json").read_text())["logged"])

    assert all("Model: val_loss" in output for output in outputs)
    assert records[0] == records[1] != {}
