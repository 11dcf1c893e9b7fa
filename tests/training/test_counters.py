"""Numbers that a module counts in a round are one client's at the end of the epoch. A warning names what it logs."""

import warnings

import torch
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from flsv import FederatedDataModule
from flsv.data import SizePartitioner, Splits
from helpers import warns
from helpers.users_data import BATCH_SIZE, CLASSES, Net, fit, make_samples


class CountsAndLogs(Net):
    """Counts with whole numbers, and logs when the epoch ends."""

    def __init__(self):
        super().__init__()
        self.correct = 0
        self.total = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        is_right = self.net(x).argmax(1) == y
        self.correct += int(is_right.sum())
        self.total += len(y)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("train_accuracy", self.correct / self.total)


class CountsWithoutLogging(CountsAndLogs):
    def on_train_epoch_end(self):
        self.correct = 0
        self.total = 0


class CountsByMetric(Net):
    """Counts all clients' samples: by torchmetrics, in a list, and by Lightning's mean."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.hits = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        predictions = self.net(x).argmax(1)
        self.accuracy.update(predictions, y)
        is_hit = (predictions == y).float()
        self.hits += is_hit.tolist()
        self.log("by_lightning", is_hit.mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("by_torchmetrics", self.accuracy.compute())
        self.log("by_list", torch.tensor(self.hits).mean())
        self.hits.clear()
        self.accuracy.reset()


def fit_three_clients(folder, module):
    samples = TensorDataset(*make_samples(48, seed=0))
    data = FederatedDataModule(
        samples, SizePartitioner([3, 2, 1]), batch_size=BATCH_SIZE, splits=Splits()
    )
    fit(module, data, folder)


def test_counters_that_are_logged_have_one_warning(tmp_path):
    message = (
        "values of correct, total. .* logs train_accuracy there, which may be computed from them"
    )
    with warns(message) as records:
        fit_three_clients(tmp_path, CountsAndLogs())

    texts = [str(record.message) for record in records]
    assert len([text for text in texts if "clients end a round" in text]) == 1


def fit_without_a_warning(folder, module):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="flsv: clients end a round")
        fit_three_clients(folder, module)


def test_counters_that_are_not_logged_have_no_warning(tmp_path):
    fit_without_a_warning(tmp_path, CountsWithoutLogging())


def test_values_that_count_all_clients_have_no_warning_and_are_equal(tmp_path):
    module = CountsByMetric()
    fit_without_a_warning(tmp_path, module)

    logged_values = module.trainer.callback_metrics
    torch.testing.assert_close(logged_values["by_torchmetrics"], logged_values["by_list"])
    torch.testing.assert_close(logged_values["by_torchmetrics"], logged_values["by_lightning"])
