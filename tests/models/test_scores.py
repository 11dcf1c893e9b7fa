import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torchmetrics.classification import MulticlassAUROC

from flsv.models.imbalance import ClassScores, EpochScores


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


@pytest.mark.parametrize("scale", [1, 16])
def test_auroc_of_two_classes_against_scikit_learn(scale: int) -> None:
    """Also of logits whose probabilities are 1 in single precision."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(300, generator=generator) < 0.05).long()
    logits = torch.randn(300, 2, generator=generator) + torch.nn.functional.one_hot(y, 2)
    logits = (logits * 8).round() * scale / 8  # exactly, so that ties stay ties
    assert (scale == 1) == (logits.diff().sigmoid() < 1).all()
    assert _scored(logits, y, 32)["auroc"].item() == pytest.approx(roc_auc_score(y, logits.diff()))


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


def test_balanced_weights_are_scikit_learns() -> None:
    from flsv import ClassifierClient, FederatedDataModule
    from flsv.data import SizePartitioner

    y = (torch.arange(300) % 10 == 0).long()
    data = FederatedDataModule(
        torch.utils.data.TensorDataset(torch.randn(300, 4), y), SizePartitioner([2, 1]), batch_size=20
    )
    client = ClassifierClient("softmax", class_weights="balanced")
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(client, data)
    held = torch.cat([data.client_labels(0), data.client_labels(1)]).numpy()
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=held)
    np.testing.assert_allclose(client.class_weights, expected, rtol=1e-6)
    assert client.hparams.class_weights == pytest.approx(expected.tolist())
    again = ClassifierClient(**{**client.hparams, "network": "softmax"})
    assert torch.equal(again.class_weights, client.class_weights)


def test_balanced_weights_are_refused_where_nobody_knows_the_counts() -> None:
    from flsv import ClassifierClient
    from flsv.errors import ConfigurationError

    x, y = torch.randn(20, 4), torch.arange(20) % 2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    client = ClassifierClient("softmax", num_classes=2, input_shape=(4,), class_weights="balanced")
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match=r"does not say how many samples.*Give 2 numbers"):
        trainer.fit(client, loader)
    with pytest.raises(ConfigurationError, match='expected "balanced"'):
        ClassifierClient(class_weights="equal")
