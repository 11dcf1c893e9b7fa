"""ClassifierClient alone, without the federated loop, on scikit-learn's digits; its scores against scikit-learn's."""

from __future__ import annotations

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
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAUROC

from flsv.data import FederatedDataModule, SizePartitioner
from flsv.errors import ConfigurationError
from flsv.models import MLP
from flsv.models.classifier import ClassifierClient
from flsv.models.imbalance import ClassScores, EpochScores

SMALL = {"channels": [4, 8], "hidden": [16], "padding": 2}


class Digits(L.LightningDataModule):
    """320 training images, and validation images of all classes but 3."""

    def __init__(self, known: bool = True):
        super().__init__()
        self.known = known

    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        y = torch.tensor(labels)
        self.train, rest = (x[:320], y[:320]), y[320:520] != 3
        self.val = x[320:520][rest], y[320:520][rest]
        if self.known:
            self.num_classes, self.input_shape = 10, (1, 8, 8)

    def train_dataloader(self):
        return DataLoader(TensorDataset(*self.train), batch_size=32)

    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.val), batch_size=48)

    test_dataloader = predict_dataloader = val_dataloader


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trainer(tmp_path):
    return partial(
        L.Trainer,
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _equal_states(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_unknown_shape_builds_from_the_data(trainer):
    client = ClassifierClient("lenet5", SMALL)
    assert not client.state_dict()
    with pytest.raises(ConfigurationError, match="no network yet"):
        client(torch.rand(2, 1, 8, 8))
    fit = trainer(max_epochs=1)
    fit.fit(client, Digits())
    assert client.network.classifier[-1].out_features == 10
    assert client.hparams.num_classes == client.hparams_initial.num_classes == 10
    assert client.hparams.input_shape == client.hparams_initial.input_shape == [1, 8, 8]
    network = client.network
    fit.validate(client, Digits(), verbose=False)
    assert client.network is network


def test_same_seed_same_weights_however_it_is_built(trainer):
    L.seed_everything(3, verbose=False)
    now = ClassifierClient("lenet5", SMALL, num_classes=10, input_shape=(1, 8, 8))
    later = ClassifierClient("lenet5", SMALL)
    data = Digits()
    data.setup("fit")
    later.trainer = trainer()
    later.trainer._data_connector.attach_datamodule(later, datamodule=data)
    L.seed_everything(3, verbose=False)
    later.configure_model()
    assert _equal_states(now.state_dict(), later.state_dict())


def test_training_step_is_the_cross_entropy_and_logs_nothing(trainer):
    weights = [1.0, 2.0, 0.5]
    client = ClassifierClient(MLP(3, (4,)), num_classes=3, label_smoothing=0.1, class_weights=weights)
    x, y = torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    expected = nn.CrossEntropyLoss(torch.tensor(weights), label_smoothing=0.1)(client.network(x), y)
    torch.testing.assert_close(client.training_step((x, y), 0), expected)

    fit = trainer(max_epochs=1, limit_val_batches=0)
    fit.fit(ClassifierClient("lenet5", SMALL), Digits())
    assert not fit.logged_metrics


@pytest.mark.parametrize("class_weights", [None, [1.0, 2.0, 1.0, 5.0, 1.0] * 2])
def test_scores_are_scikit_learns_over_the_whole_set(trainer, class_weights):
    client = ClassifierClient("softmax", optimizer=partial(torch.optim.SGD, lr=0.5), class_weights=class_weights)
    fit, data = trainer(max_epochs=2), Digits()
    fit.fit(client, data)
    val = fit.validate(client, data, verbose=False)[0]
    test = fit.test(client, data, verbose=False)[0]
    probabilities = torch.cat(fit.predict(client, data))

    x, y = data.val
    assert 3 not in y
    with torch.no_grad():
        logits = client(x)
    torch.testing.assert_close(probabilities, logits.softmax(1))
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
    assert val["val_loss"] == pytest.approx(F.cross_entropy(logits, y, client.class_weights).item(), rel=1e-5)
    assert {name.replace("val_", "test_"): value for name, value in val.items()} == pytest.approx(test)


@pytest.mark.parametrize(
    ("scheduler", "monitor"),
    [(ReduceLROnPlateau, "val_loss"), (partial(CliPlateau, monitor="val_accuracy"), "val_accuracy")],
)
def test_plateau_scheduler(trainer, scheduler, monitor):
    fit = trainer(max_epochs=1)
    fit.fit(ClassifierClient("softmax", scheduler=scheduler), Digits())
    assert fit.lr_scheduler_configs[0].monitor == monitor


def test_checkpoint_without_data_module(trainer, tmp_path):
    adam = partial(torch.optim.Adam, lr=1e-3)
    client = ClassifierClient("lenet5", SMALL, optimizer=adam, label_smoothing=0.1)
    fit = trainer(max_epochs=1)
    fit.fit(client, Digits())
    path = tmp_path / "client.ckpt"
    fit.save_checkpoint(path)
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]  # plain types only
    assert hparams["num_classes"] == 10
    assert hparams["input_shape"] == [1, 8, 8]
    loaded = ClassifierClient.load_from_checkpoint(path)
    assert loaded.hparams.label_smoothing == 0.1
    assert _equal_states(loaded.state_dict(), client.state_dict())
    # and it goes on training
    resumed = trainer(max_epochs=2)
    resumed.fit(ClassifierClient("lenet5", SMALL, optimizer=adam), Digits(), ckpt_path=path)
    assert resumed.global_step == 2 * fit.global_step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 7}, r"The model has num_classes=7, but the data \(Digits\) has num_classes=10"),
        ({"input_shape": (1, 28, 28)}, r"model has input_shape=\(1, 28, 28\).*\(Digits\) has input_shape=\(1, 8, 8\)"),
        ({"network": MLP(7, (1, 8, 8))}, r"MLP returns \(2, 7\)"),
        ({"network": MLP(10, (1, 28, 28))}, r"MLP cannot process samples of shape \(1, 8, 8\)"),
        ({"class_weights": [1.0, 2.0]}, "10 numbers were expected"),
        ({"network": "lenet5"}, "8x8 are too small"),
        ({"network": "lenet7"}, "Unknown network 'lenet7'"),
        ({"network_args": {"hiden": [3]}}, "unexpected keyword argument 'hiden'"),
    ],
)
def test_what_contradicts_the_data_is_found_before_training(trainer, options, message):
    client = ClassifierClient(**{"network": "mlp", **options})
    with pytest.raises(ConfigurationError, match=message):
        trainer(max_epochs=1).fit(client, Digits())
    assert client.global_step == 0


@pytest.mark.parametrize("missing", ["num_classes", "input_shape"])
def test_nobody_knows(trainer, missing):
    known = {"num_classes": 10, "input_shape": (1, 8, 8)}
    del known[missing]
    with pytest.raises(ConfigurationError, match=f"{missing} is not known"):
        trainer(max_epochs=1).fit(ClassifierClient("mlp", **known), Digits(known=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "optimizer is an object of type SGD"),
        ({"network": {"class_path": "x"}}, "expected a Module"),
        ({"scheduler": 3}, "scheduler is an object of type int"),
        ({"network_args": {"num_classes": 3}}, "network_args contains num_classes"),
        ({"network": MLP(), "network_args": {"hidden": [3]}}, "network_args are for named networks"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ClassifierClient(**{"network": "mlp", **options})


def _scored(logits, y, batch_size, class_weights=None):
    scores = EpochScores(logits.shape[1])
    for x, t in zip(logits.split(batch_size), y.split(batch_size), strict=True):
        weight = len(t) if class_weights is None else class_weights[t].sum()
        scores.update(x, t, F.cross_entropy(x, t, weight=class_weights), weight)
    return scores.compute()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("absent", [(), (3,), (0, 4)])
def test_against_scikit_learn(seed, absent):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(101, 5, generator=generator)
    present = torch.tensor([c for c in range(5) if c not in absent])
    y = present[torch.randint(len(present), (101,), generator=generator)]
    result = _scored(logits, y, batch_size=32)
    predicted = logits.argmax(1).numpy()
    # scikit-learn warns where a class is predicted that does not occur: it leaves it out, and so does flsv.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = balanced_accuracy_score(y.numpy(), predicted)
    assert result["balanced_accuracy"].item() == pytest.approx(expected)
    assert result["accuracy"].item() == pytest.approx(accuracy_score(y.numpy(), predicted))
    assert result["loss"].item() == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)


def test_weighted_loss_does_not_depend_on_the_batches():
    torch.manual_seed(0)
    logits, y, weights = torch.randn(50, 3), torch.randint(3, (50,)), torch.tensor([1.0, 5.0, 0.2])
    expected = F.cross_entropy(logits, y, weight=weights)
    for batch_size in (50, 16, 7):
        torch.testing.assert_close(_scored(logits, y, batch_size, weights)["loss"], expected)


def test_auroc_needs_two_classes_and_at_most_a_hundred() -> None:
    assert "auroc" not in _scored(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), 2)
    assert "auroc" not in _scored(torch.zeros(4, 101), torch.arange(4) % 3, 2)
    assert _scored(torch.zeros(4, 100), torch.arange(4) % 3, 2)["auroc"] == 0.5
    assert _scored(torch.zeros(4, 2), torch.arange(4) % 2, 2)["auroc"] == 0.5
    never = ClassScores(2)
    never.update(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    assert never.compute()["auroc"].isnan()


def test_auroc_of_more_classes_against_torchmetrics_and_scikit_learn() -> None:
    torch.manual_seed(0)
    y = torch.arange(120) % 5
    logits = torch.randn(120, 5) + torch.nn.functional.one_hot(y, 5)
    found = _scored(logits, y, 32)["auroc"]
    torch.testing.assert_close(found, MulticlassAUROC(5, average="macro")(logits, y))
    expected = roc_auc_score(y, logits.double().softmax(1), multi_class="ovr", average="macro")
    assert found.item() == pytest.approx(expected, abs=1e-6)
    # Of classes that do not occur nothing can be told: they are left out, not counted as 0.
    some = y < 3
    each = [roc_auc_score(y[some] == c, logits[some].double().softmax(1)[:, c]) for c in range(3)]
    assert _scored(logits[some], y[some], 32)["auroc"].item() == pytest.approx(sum(each) / 3, abs=1e-6)


def test_balanced_weights_are_scikit_learns(trainer) -> None:
    y = (torch.arange(300) % 10 == 0).long()
    data = FederatedDataModule(
        torch.utils.data.TensorDataset(torch.randn(300, 4), y), SizePartitioner([2, 1]), batch_size=20
    )
    client = ClassifierClient("softmax", class_weights="balanced")
    trainer(max_epochs=1).fit(client, data)
    held = torch.cat([data.client_labels(0), data.client_labels(1)]).numpy()
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=held)
    np.testing.assert_allclose(client.class_weights, expected, rtol=1e-6)
    assert client.hparams.class_weights == pytest.approx(expected.tolist())
    again = ClassifierClient(**{**client.hparams, "network": "softmax"})
    assert torch.equal(again.class_weights, client.class_weights)


def test_balanced_weights_are_refused_where_nobody_knows_the_counts(trainer) -> None:
    x, y = torch.randn(20, 4), torch.arange(20) % 2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    client = ClassifierClient("softmax", num_classes=2, input_shape=(4,), class_weights="balanced")
    with pytest.raises(ConfigurationError, match=r"does not say how many samples.*Give 2 numbers"):
        trainer(max_epochs=1).fit(client, loader)
