"""Statistics of classes against NumPy."""

import numpy as np
import pytest
import scipy.linalg
import torch
from functional.transport.samples import labeled

from flsv.functional import (
    class_statistics,
    label_distance,
    label_embedding,
)
from flsv.utilities.errors import ConfigurationError


def test_class_means_and_deviations_equal_numpys_per_class() -> None:
    x, y = labeled(0)
    diagonal, full = class_statistics(x, y), class_statistics(x, y, covariance="full")
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
    x, y = labeled(4)
    with pytest.raises(ConfigurationError, match="different covariances"):
        label_distance(class_statistics(x, y), class_statistics(x, y, covariance="none"))
    with pytest.raises(ConfigurationError, match=r"classes \[1\] are not in the statistics"):
        class_statistics(x, y).index(torch.tensor([0, 1]))
    with pytest.raises(ConfigurationError, match='covariance="diag"'):
        label_embedding(torch.zeros(2, 65), torch.tensor([0, 1]), covariance="full")
