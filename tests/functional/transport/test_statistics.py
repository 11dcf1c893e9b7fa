"""Class statistics and their distances against NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from flsv.errors import ConfigurationError
from flsv.functional.transport import class_statistics, label_distance
from flsv.functional.transport.cost import squared_distances


def labeled(seed: int, m: int = 40, d: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, d, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 2, 5])[torch.randint(3, (m,), generator=generator)]
    return x + y[:, None], y


def test_statistics_are_numpys_per_class() -> None:
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


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_one_sample_of_a_class_has_deviation_0(covariance: str) -> None:
    statistics = class_statistics(
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 1.0]]), torch.tensor([7, 1, 1]), covariance=covariance
    )
    assert statistics.deviations is not None
    assert torch.equal(statistics.deviations[1], torch.zeros_like(statistics.deviations[1]))
    assert (statistics.deviations[0] > 0).any()


@pytest.mark.parametrize("covariance", ["diag", "full", "none"])
def test_label_distance_is_the_frobenius_sum(covariance: str) -> None:
    a, b = class_statistics(*labeled(1), covariance=covariance), class_statistics(*labeled(2), covariance=covariance)
    expected = np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            expected[i, j] = ((a.means[i] - b.means[j]) ** 2).sum()
            if a.deviations is not None and b.deviations is not None:
                expected[i, j] += ((a.deviations[i] - b.deviations[j]) ** 2).sum()
    np.testing.assert_allclose(label_distance(a, b), expected)


def test_wrong_covariances_and_labels_say_so() -> None:
    x, y = labeled(4)
    with pytest.raises(ConfigurationError, match="covariance"):
        class_statistics(x, y, covariance="spherical")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="different covariances"):
        label_distance(class_statistics(x, y), class_statistics(x, y, covariance="none"))
    with pytest.raises(ConfigurationError, match=r"classes \[1\] are not in the statistics"):
        class_statistics(x, y).index(torch.tensor([0, 1]))


def test_equal_rows_are_at_0_far_from_the_origin() -> None:
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) + 1e4
    distances = squared_distances(x, x)
    assert torch.equal(distances.diagonal(), torch.zeros(50, dtype=torch.float64))
    expected = (x.double()[:, None] - x.double()[None]).square().sum(-1)
    torch.testing.assert_close(distances, expected, rtol=1e-9, atol=0)
