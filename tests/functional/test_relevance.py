"""Overlaps of labels against NumPy, AUROC against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from flsv.functional import (
    label_overlap,
    relevance_auroc,
)


def test_label_overlap_equals_numpys():
    counts = torch.randint(0, 3, (12, 6), generator=torch.Generator().manual_seed(0)) * 7
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    expected = np.minimum(shares[:, None], shares).sum(-1)
    np.testing.assert_allclose(label_overlap(counts), expected, rtol=1e-6)


@pytest.mark.parametrize("digits", [0, 6])
def test_relevance_auroc_equals_scikit_learns(digits):
    generator = torch.Generator().manual_seed(digits)
    n = 15
    truth = torch.rand(n, n, generator=generator) > 0.7
    relevance = ((torch.randn(n, n, generator=generator) + truth) * 10**digits).round() / 10**digits
    relevance[torch.rand(n, n, generator=generator) > 0.8] = float("nan")
    relevance.fill_diagonal_(1e6)  # must not count
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j and not math.isnan(relevance[i, j])]
    expected = roc_auc_score([bool(truth[p]) for p in pairs], [float(relevance[p]) for p in pairs])
    assert relevance_auroc(relevance, truth).item() == pytest.approx(expected, abs=1e-12)
    for one_kind in (torch.ones(n, n), torch.eye(n)):
        assert relevance_auroc(relevance, one_kind).isnan()
