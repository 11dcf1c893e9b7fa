"""Label overlap, the AUROC of relevance against scikit-learn, and the paper's bound."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from flsv.errors import ConfigurationError
from flsv.functional import discovery_bound, label_overlap, relevance_auroc


def test_overlap_is_above_0_exactly_where_labels_are_shared():
    counts = torch.randint(0, 3, (12, 6), generator=torch.Generator().manual_seed(0)) * 7
    overlap = label_overlap(counts)
    labels = [set(row.nonzero().flatten().tolist()) for row in counts]
    assert [[bool(a & b) for b in labels] for a in labels] == (overlap > 0).tolist()
    assert torch.equal(overlap, overlap.T)
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    for i, j in ((0, 1), (3, 7), (11, 2)):
        assert overlap[i, j].item() == pytest.approx(np.minimum(shares[i].numpy(), shares[j].numpy()).sum())


def test_overlap_of_no_matrix():
    with pytest.raises(ValueError, match=r"\[n, M\]"):
        label_overlap(torch.ones(3))


@pytest.mark.parametrize("digits", [0, 1, 6])
def test_auroc_against_scikit_learn(digits):
    """With many ties, some, and none."""
    generator = torch.Generator().manual_seed(digits)
    n = 15
    truth = torch.rand(n, n, generator=generator) > 0.7
    relevance = ((torch.randn(n, n, generator=generator) + truth) * 10**digits).round() / 10**digits
    relevance[torch.rand(n, n, generator=generator) > 0.8] = float("nan")
    relevance.fill_diagonal_(1e6)  # must not count
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j and not math.isnan(relevance[i, j])]
    expected = roc_auc_score([bool(truth[p]) for p in pairs], [float(relevance[p]) for p in pairs])
    assert relevance_auroc(relevance, truth).item() == pytest.approx(expected, abs=1e-12)


def test_auroc_without_pairs_of_both_kinds():
    scores = torch.rand(3, 3)
    for truth in (torch.ones(3, 3), torch.eye(3)):
        assert relevance_auroc(scores, truth).isnan()
    assert relevance_auroc(torch.full((3, 3), float("nan")), torch.rand(3, 3) > 0.5).isnan()


def test_auroc_of_other_shapes():
    with pytest.raises(ValueError, match=r"\[n, n\]"):
        relevance_auroc(torch.rand(3, 2), torch.rand(3, 2))


def test_the_papers_bound():
    assert discovery_bound(20, 2, 5) == 5  # its example: "at most 5 rounds"
    for n in (5, 10, 33):
        for m in range(n):
            for k in range(1, n + 3):
                tail = 1 if m <= k else math.ceil(m / k)
                assert discovery_bound(n, m, k) == math.ceil((n - m - 1) / k) + tail


@pytest.mark.parametrize("arguments", [(5, 5, 1), (5, -1, 1), (5, 2, 0)])
def test_bound_out_of_range(arguments):
    with pytest.raises(ConfigurationError):
        discovery_bound(*arguments)
