"""MeanTestAccuracy, against scikit-learn's accuracy of each client."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score

from flsv.errors import ConfigurationError
from flsv.metrics import MeanTestAccuracy


def test_a_client_counts_once_however_many_samples_it_has():
    generator = torch.Generator().manual_seed(0)
    metric, expected = MeanTestAccuracy(4), []
    for client, samples in enumerate((3, 40, 0, 17)):
        logits, target = torch.randn(samples, 5, generator=generator), torch.randint(5, (samples,), generator=generator)
        for x, y in zip(logits.split(16), target.split(16)):
            metric.update(client, x if client else x.argmax(1), y)
        if samples:
            expected.append(accuracy_score(target.numpy(), logits.argmax(1).numpy()))
    assert metric.compute().item() == pytest.approx(np.mean(expected))
    assert metric.per_client[2].isnan()
    np.testing.assert_allclose(metric.per_client[[0, 1, 3]].numpy(), expected, rtol=1e-6)


def test_without_samples():
    assert MeanTestAccuracy(2).compute().isnan()


def test_wrong_input():
    with pytest.raises(ConfigurationError):
        MeanTestAccuracy(0)
    metric = MeanTestAccuracy(2)
    for client in (-1, 2):
        with pytest.raises(ValueError, match="client_id"):
            metric.update(client, torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="target"):
        metric.update(0, torch.zeros(2, 3), torch.tensor([0]))
