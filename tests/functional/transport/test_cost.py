"""The cost matrix and the embedding against the stacked vectors of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from functional.transport.test_statistics import labeled
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.functional.transport import label_augmented_cost, label_embedding


def stacked(x: Tensor, y: Tensor, covariance: str, weight: float) -> np.ndarray:
    """Section 4.1: [x; m_y; vec(Sigma^(1/2))], sample by sample."""
    rows = []
    for sample, label in zip(x.numpy(), y.numpy()):
        members = x.numpy()[y.numpy() == label]
        parts = [sample, weight**0.5 * members.mean(0)]
        if covariance == "diag":
            parts.append(weight**0.5 * members.std(0))
        if covariance == "full":
            values, vectors = np.linalg.eigh(np.cov(members.T, bias=True))
            parts.append(weight**0.5 * ((vectors * np.sqrt(values.clip(0))) @ vectors.T).ravel())
        rows.append(np.concatenate(parts))
    return np.stack(rows)


@pytest.mark.parametrize("covariance", ["diag", "full", "none"])
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_cost_and_embedding_are_the_stacked_vectors(covariance: str, chunk: int | None) -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1, m=25)
    left, right = stacked(x, y, covariance, 3.0), stacked(x2, y2, covariance, 3.0)
    expected = ((left[:, None] - right[None]) ** 2).sum(-1)
    cost = label_augmented_cost(x, y, x2, y2, covariance=covariance, label_weight=3.0, chunk=chunk)
    np.testing.assert_allclose(cost, expected, rtol=1e-9)
    np.testing.assert_allclose(label_embedding(x, y, covariance=covariance, label_weight=3.0), left, atol=1e-9)


def test_an_unlabeled_side_leaves_the_features() -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1)
    expected = torch.cdist(x, x2) ** 2
    for labels, labels2 in [(None, y2), (y, None), (None, None)]:
        torch.testing.assert_close(label_augmented_cost(x, labels, x2, labels2), expected)
    torch.testing.assert_close(label_augmented_cost(x, y, x2, y2, label_weight=0.0), expected)


def test_wrong_input_is_named() -> None:
    (x, y), (x2, y2) = labeled(0), labeled(1)
    broken = x.clone()
    broken[[1, 4], 0] = torch.tensor([torch.nan, torch.inf], dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="2 of 40 rows"):
        label_augmented_cost(broken, y, x2, y2)
    with pytest.raises(ConfigurationError, match="3 features and x2 has 2"):
        label_augmented_cost(x, y, x2[:, :2], y2)
    with pytest.raises(ConfigurationError, match="x2 is empty"):
        label_augmented_cost(x, y, x2[:0], y2[:0])
    with pytest.raises(ConfigurationError, match="40 integer classes"):
        label_augmented_cost(x, y[:5], x2, y2)
    with pytest.raises(ConfigurationError, match="label_weight=-1"):
        label_augmented_cost(x, y, x2, y2, label_weight=-1)
    with pytest.raises(ConfigurationError, match="Flatten"):
        label_augmented_cost(x.long(), y, x2, y2)
    with pytest.raises(ConfigurationError, match=r"0\.\.5 are not all in 0\.\.4"):
        label_embedding(x, y, num_classes=5)
    with pytest.raises(ConfigurationError, match='covariance="diag"'):
        label_embedding(torch.zeros(2, 65), torch.tensor([0, 1]), covariance="full")
