"""ClassifierClient alone, without the federated loop, on scikit-learn's digits; its scores against scikit-learn's."""

import warnings
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import ReduceLROnPlateau as CliPlateau
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from flsv.data import FederatedDataModule, SizePartitioner
from flsv.models import MLP
from flsv.models.classifier import ClassifierClient
from flsv.scores.class_scores import EpochScores
from helpers import refused
from helpers.fits import plain_trainer

SMALL = {"channels": [4, 8], "hidden": [16], "padding": 2}


class Digits(L.LightningDataModule):
    """320 training images, and validation images of all classes but 3."""

    def __init__(self, has_facts: bool = True):
        super().__init__()
        self.has_facts = has_facts

    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        y = torch.tensor(labels)
        is_validated = y[320:520] != 3
        self.train = x[:320], y[:320]
        self.val = x[320:520][is_validated], y[320:520][is_validated]
        if self.has_facts:
            self.num_classes = 10
            self.input_shape = (1, 8, 8)

    def train_dataloader(self):
        return DataLoader(TensorDataset(*self.train), batch_size=32)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.val), batch_size=48)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.fixture(autouse=True)
def _seeded():
    L.seed_everything(0, verbose=False)


@pytest.fixture
def trainer(tmp_path):
    return partial(plain_trainer, tmp_path, rounds=1)


def _equal_states(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_network_built_at_fit_equals_one_built_at_construction_from_the_same_seed(trainer):
    L.seed_everything(3, verbose=False)
    now = ClassifierClient("lenet5", SMALL, num_classes=10, input_shape=(1, 8, 8))
    client = ClassifierClient("lenet5", SMALL)

    assert not client.state_dict()

    with refused("no network before training starts"):
        client(torch.rand(2, 1, 8, 8))

    L.seed_everything(3, verbose=False)
    fit = trainer(limit_train_batches=0)
    fit.fit(client, Digits())

    assert _equal_states(now.state_dict(), client.state_dict())
    assert client.hparams.num_classes == client.hparams_initial.num_classes == 10
    assert client.hparams.input_shape == client.hparams_initial.input_shape == [1, 8, 8]

    network = client.network
    fit.validate(client, Digits(), verbose=False)

    assert client.network is network


def test_training_step_is_the_cross_entropy():
    class_weights = [1.0, 2.0, 0.5]
    client = ClassifierClient(
        MLP(3, (4,)), num_classes=3, label_smoothing=0.1, class_weights=class_weights
    )
    x = torch.randn(7, 4)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])

    loss = client.training_step((x, y), 0)

    cross_entropy = nn.CrossEntropyLoss(torch.tensor(class_weights), label_smoothing=0.1)
    assert_close(loss, cross_entropy(client.network(x), y))


@pytest.mark.fast_rows
@pytest.mark.parametrize("class_weights", [None, [1.0, 2.0, 1.0, 5.0, 1.0] * 2])
def test_classifier_scores_over_the_whole_set_equal_scikit_learns(trainer, class_weights):
    client = ClassifierClient(
        "softmax", optimizer=partial(torch.optim.SGD, lr=0.5), class_weights=class_weights
    )
    fit = trainer(rounds=2)
    data = Digits()
    fit.fit(client, data)
    val = fit.validate(client, data, verbose=False)[0]
    test = fit.test(client, data, verbose=False)[0]
    probabilities = torch.cat(fit.predict(client, data))

    x, y = data.val
    assert 3 not in y

    with torch.no_grad():
        logits = client(x)
    assert_close(probabilities, logits.softmax(1))

    predicted = logits.argmax(1)
    assert 3 in predicted  # where torchmetrics' macro accuracy would count a recall of 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        balanced = balanced_accuracy_score(y, predicted)

    assert set(val) == {"val_loss", "val_accuracy", "val_balanced_accuracy", "val_auroc"}

    areas = [roc_auc_score(y == c, logits.double().softmax(1)[:, c]) for c in y.unique()]
    assert val["val_auroc"] == pytest.approx(sum(areas) / 9)
    assert val["val_accuracy"] == pytest.approx(accuracy_score(y, predicted))
    assert val["val_balanced_accuracy"] == pytest.approx(balanced)
    assert val["val_loss"] == pytest.approx(
        F.cross_entropy(logits, y, client.class_weights).item(), rel=1e-5
    )
    assert {name.replace("val_", "test_"): value for name, value in val.items()} == pytest.approx(
        test
    )


@pytest.mark.parametrize(
    ("scheduler", "monitor"),
    [
        (ReduceLROnPlateau, "val_loss"),
        (partial(CliPlateau, monitor="val_accuracy"), "val_accuracy"),
    ],
)
def test_classifier_plateau_scheduler_monitors_the_right_score(trainer, scheduler, monitor):
    fit = trainer()
    fit.fit(ClassifierClient("softmax", scheduler=scheduler), Digits())
    assert fit.lr_scheduler_configs[0].monitor == monitor


@pytest.mark.parametrize(("interval", "num_steps"), [("epoch", 1), ("step", 10)])
def test_classifier_scheduler_steps_every_epoch_or_every_batch(trainer, interval, num_steps):
    halve = partial(StepLR, step_size=1, gamma=0.5)
    client = ClassifierClient("softmax", scheduler=halve, scheduler_interval=interval)
    trainer().fit(client, Digits())  # 320 samples in batches of 32

    (rate,) = client.lr_schedulers().get_last_lr()
    assert rate == pytest.approx(0.01 * 0.5**num_steps)


def test_classifier_loads_from_a_checkpoint_without_a_data_module(trainer, tmp_path):
    client = ClassifierClient("lenet5", SMALL, label_smoothing=0.1)
    fit = trainer()
    fit.fit(client, Digits())
    path = tmp_path / "client.ckpt"
    fit.save_checkpoint(path)
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]  # plain types only

    assert hparams["num_classes"] == 10
    assert hparams["input_shape"] == [1, 8, 8]

    loaded = ClassifierClient.load_from_checkpoint(path)
    assert loaded.hparams.label_smoothing == 0.1
    assert _equal_states(loaded.state_dict(), client.state_dict())


@pytest.mark.parametrize(
    ("has_facts", "options", "message"),
    [
        (
            True,
            {"num_classes": 7},
            r"The model has num_classes=7, but the data \(Digits\) has num_classes=10",
        ),
        (
            True,
            {"input_shape": (1, 28, 28)},
            r"model has input_shape=\(1, 28, 28\).* has input_shape=\(1, 8, 8\)",
        ),
        (True, {"network": MLP(7, (1, 8, 8))}, r"MLP returns \(2, 7\)"),
        (True, {"network": "lenet5"}, "8x8 are too small"),
        (
            False,
            {"network": MLP(), "network_args": {"hidden": [3]}},
            "network_args are for networks given by name",
        ),
        (False, {"input_shape": (1, 8, 8)}, "num_classes is not known"),
    ],
)
def test_classifier_that_does_not_fit_the_data_is_refused_before_training(
    trainer, has_facts, options, message
):
    with refused(message):
        trainer().fit(
            ClassifierClient(
                **{
                    "network": "mlp",
                    **options,
                }
            ),
            Digits(has_facts),
        )


def _scored(logits, y):
    scores = EpochScores(logits.shape[1])
    scores.update(logits, y, F.cross_entropy(logits, y), len(y))
    return scores.compute()


def test_auroc_is_scored_only_with_two_classes_present_and_at_most_a_hundred():
    labels_of_one_class = torch.zeros(4, dtype=torch.long)
    labels_of_three_classes = torch.arange(4) % 3

    of_one_class = _scored(torch.zeros(4, 2), labels_of_one_class)
    of_100_outputs = _scored(torch.zeros(4, 100), labels_of_three_classes)
    of_101_outputs = _scored(torch.zeros(4, 101), labels_of_three_classes)

    assert "auroc" not in of_one_class
    assert of_100_outputs["auroc"] == 0.5  # equal outputs tell nothing apart
    assert "auroc" not in of_101_outputs


def test_auroc_tells_samples_apart_whose_probabilities_round_to_1():
    logits = torch.tensor([[90.0, 0.0], [80.0, 0.0], [100.0, 0.0], [85.0, 0.0]])
    labels = torch.tensor([0, 1, 0, 1])  # class 0 has the higher logits

    assert _scored(logits, labels)["auroc"] == 1.0


def test_balanced_class_weights_equal_those_of_scikit_learn(trainer):
    y = (torch.arange(300) % 10 == 0).long()
    data = FederatedDataModule(
        torch.utils.data.TensorDataset(torch.randn(300, 4), y),
        SizePartitioner([2, 1]),
        batch_size=20,
    )
    client = ClassifierClient("softmax", class_weights="balanced")
    trainer().fit(client, data)
    labels = torch.cat([data.client_labels(0), data.client_labels(1)]).numpy()
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=labels)

    np.testing.assert_allclose(client.class_weights, expected, rtol=1e-6)
    assert client.hparams.class_weights == pytest.approx(expected.tolist())

    copied = ClassifierClient(**{**client.hparams, "network": "softmax"})
    assert torch.equal(copied.class_weights, client.class_weights)


def test_balanced_class_weights_without_known_counts_are_refused(trainer):
    client = ClassifierClient(
        "softmax", num_classes=10, input_shape=(1, 8, 8), class_weights="balanced"
    )
    with refused("all clients' samples.*10 numbers"):
        trainer().fit(client, Digits())
