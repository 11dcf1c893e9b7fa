"""Class statistics and the ground cost against NumPy."""

import numpy as np
import pytest
import scipy.linalg
import torch
from functional.transport.samples import make_labeled
from torch import Tensor

from flsv.functional import class_statistics, label_augmented_cost, label_distance, label_embedding
from flsv.functional.transport import cost
from flsv.utilities.errors import ConfigurationError


def test_class_means_and_deviations_equal_numpys_per_class() -> None:
    x, y = make_labeled(0)
    diagonal = class_statistics(x, y)
    full = class_statistics(x, y, covariance="full")

    assert diagonal.labels.tolist() == [0, 2, 5]
    assert diagonal.deviations is not None
    assert full.deviations is not None

    for row, label in enumerate([0, 2, 5]):
        rows = x[y == label].numpy()
        assert diagonal.counts[row] == len(rows)
        np.testing.assert_allclose(diagonal.means[row], rows.mean(0))
        np.testing.assert_allclose(diagonal.deviations[row], rows.std(0))
        root = scipy.linalg.sqrtm(np.cov(rows.T, bias=True))
        np.testing.assert_allclose(full.deviations[row], root, atol=1e-9)


def test_label_distance_with_wrong_covariances_or_labels_is_refused() -> None:
    x, y = make_labeled(4)
    with pytest.raises(ConfigurationError, match="different covariances"):
        label_distance(class_statistics(x, y), class_statistics(x, y, covariance="none"))
    with pytest.raises(ConfigurationError, match=r"classes \[1\] are not in the statistics"):
        class_statistics(x, y).index(torch.tensor([0, 1]))


def stack_vectors_by_hand(x: Tensor, y: Tensor, covariance: str, label_weight: float) -> np.ndarray:
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
            values, vectors = np.linalg.eigh(np.cov(members.T, bias=True))
            root_of_covariance = vectors * np.sqrt(values.clip(0)) @ vectors.T
            parts.append(root_of_weight * root_of_covariance.ravel())
        rows.append(np.concatenate(parts))

    return np.stack(rows)


@pytest.mark.parametrize("covariance", ["diag", "full", "none"])
@pytest.mark.parametrize("rows_per_chunk", [100, 1, 7])
def test_label_augmented_cost_and_embedding_equal_stacked_vectors_in_numpy(
    covariance: str, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    label_weight = 3.0
    num_columns = 25
    x, y = make_labeled(0)
    x2, y2 = make_labeled(1, m=num_columns)
    bytes_of_row = cost.BYTES_PER_ENTRY * num_columns
    monkeypatch.setattr(cost, "CHUNK_BYTES", bytes_of_row * rows_per_chunk)

    costs = label_augmented_cost(x, y, x2, y2, covariance=covariance, label_weight=label_weight)
    embedding = label_embedding(x, y, covariance=covariance, label_weight=label_weight)

    vectors = stack_vectors_by_hand(x, y, covariance, label_weight=label_weight)
    vectors2 = stack_vectors_by_hand(x2, y2, covariance, label_weight=label_weight)
    differences = vectors[:, None] - vectors2[None]

    np.testing.assert_allclose(
        costs,
        (differences**2).sum(-1),
        rtol=1e-9,
    )
    np.testing.assert_allclose(embedding, vectors, atol=1e-9)


def test_cost_with_an_unlabeled_side_is_that_of_the_features() -> None:
    (x, y), (x2, y2) = make_labeled(0), make_labeled(1)
    expected = torch.cdist(x, x2) ** 2
    for labels, labels2 in [(None, y2), (y, None), (None, None)]:
        torch.testing.assert_close(label_augmented_cost(x, labels, x2, labels2), expected)
    torch.testing.assert_close(label_augmented_cost(x, y, x2, y2, label_weight=0.0), expected)


def test_cost_of_invalid_samples_or_labels_raises_with_their_count() -> None:
    x, y = make_labeled(0)
    x2, y2 = make_labeled(1)
    not_finite = x.clone()
    not_finite[1, 0] = torch.nan
    not_finite[4, 0] = torch.inf
    invalid_sides = {
        "2 of 40 rows": (not_finite, y, x2, y2),
        "3 features and x2 has 2": (x, y, x2[:, :2], y2),
        "x2 is empty": (
            x,
            y,
            x2[:0],
            y2[:0],
        ),
        "40 integer classes": (x, y[:5], x2, y2),
        "Flatten": (x.long(), y, x2, y2),
    }

    for message, sides in invalid_sides.items():
        with pytest.raises(ConfigurationError, match=message):
            label_augmented_cost(*sides)
