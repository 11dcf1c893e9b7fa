"""Class statistics, embeddings and costs against NumPy and torch."""

import numpy as np
import pytest
import scipy.linalg
import torch
from functional.transport.samples import make_labeled
from numpy.testing import assert_allclose
from torch import Tensor

from flsv.functional import class_statistics, label_embedding
from flsv.functional.transport import cost
from helpers import refused


def test_class_means_and_deviations_equal_numpys_per_class():
    x, y = make_labeled(0)
    diagonal = class_statistics(x, y)
    full = class_statistics(x, y, covariance="full")

    assert diagonal.labels.tolist() == [0, 2, 5]
    for row, label in enumerate([0, 2, 5]):
        rows = x[y == label].numpy()
        assert diagonal.counts[row] == len(rows)
        assert_allclose(diagonal.means[row], rows.mean(0))
        assert_allclose(diagonal.deviations[row], rows.std(0))
        covariances = np.cov(rows.T, bias=True)
        root = scipy.linalg.sqrtm(covariances)
        assert_allclose(full.deviations[row], root, atol=1e-9)


def test_classes_without_statistics_are_refused():
    x, y = make_labeled(4)
    statistics = class_statistics(x, y)
    with refused(r"classes \[1\] are missing.*statistics"):
        statistics.index(torch.tensor([0, 1]))


def stack_vectors_by_hand(
    x: Tensor,
    y: Tensor,
    covariance: str,
    label_weight: float,
):
    """Section 4.1 of the paper: [x; m_y; vec(Sigma^(1/2))], sample by sample."""
    labels = y.numpy()
    root_of_weight = label_weight**0.5
    rows = []
    for sample, label in zip(x.numpy(), labels):
        members = x.numpy()[labels == label]
        parts = [sample, root_of_weight * members.mean(0)]
        if covariance == "diag":
            parts.append(root_of_weight * members.std(0))
        if covariance == "full":
            covariances = np.cov(members.T, bias=True)
            values, vectors = np.linalg.eigh(covariances)
            root_of_covariance = vectors * np.sqrt(values.clip(0)) @ vectors.T
            parts.append(root_of_weight * root_of_covariance.ravel())
        rows.append(np.concatenate(parts))

    return np.stack(rows)


@pytest.mark.parametrize("covariance", ["diag", "full", "none"])
def test_label_embedding_equals_stacked_vectors_in_numpy(covariance):
    x, y = make_labeled(0)

    embedding = label_embedding(x, y, covariance=covariance, label_weight=3.0)

    vectors = stack_vectors_by_hand(x, y, covariance, label_weight=3.0)
    assert_allclose(embedding, vectors, atol=1e-9)


@pytest.mark.parametrize("rows_per_chunk", [100, 1, 7])
def test_squared_costs_equal_torchs_distances(rows_per_chunk, monkeypatch):
    num_columns = 25
    x, _ = make_labeled(0)
    x2, _ = make_labeled(1, m=num_columns)
    bytes_of_row = cost.BYTES_PER_ELEMENT * num_columns
    monkeypatch.setattr(cost, "CHUNK_BYTES", bytes_of_row * rows_per_chunk)

    costs = cost.squared_costs(x, x2)
    distances = torch.cdist(x, x2)
    torch.testing.assert_close(costs, distances**2)


X = torch.rand(40, 3)
WITH_NAN_AND_INFINITY = X.clone()
WITH_NAN_AND_INFINITY[1, 0] = torch.nan
WITH_NAN_AND_INFINITY[4, 0] = torch.inf


@pytest.mark.parametrize(
    ("x", "x2", "message"),
    [
        (WITH_NAN_AND_INFINITY, X, "2 of 40 rows"),
        (X, X[:, :2], "3 features, but x2 has 2"),
        (X, X[:0], "x2 is empty"),
        (X.long(), X, "Flatten"),
    ],
)
def test_costs_of_invalid_samples_are_refused(x, x2, message):
    with refused(message):
        cost.squared_costs(x, x2)


def test_label_embedding_with_labels_of_other_samples_is_refused():
    with refused("40 integer classes"):
        label_embedding(X, torch.zeros(5).long())
