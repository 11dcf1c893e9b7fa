"""LAVA's values and distances of classes against POT."""

import numpy as np
import ot
import pytest
import torch
from functional.transport.samples import make_blobs
from scipy.special import logsumexp
from torch import Tensor

from flsv.functional import lava
from flsv.functional.transport.lava import class_distances

NUM_SYMMETRIC_ITERATIONS = 2000


def flip_labels(y: Tensor, share: float, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    bad = torch.rand(len(y), generator=generator) < share
    return torch.where(
        bad, (y + torch.randint(1, classes, y.shape, generator=generator)) % classes, y
    ), bad


def class_distances_by_pot(
    x: np.ndarray, y: np.ndarray, x2: np.ndarray, y2: np.ndarray
) -> np.ndarray:
    """Squared W_2 of the classes' samples."""
    rows = [
        [ot.emd2([], [], ot.dist(x[y == a], x2[y2 == b])) for b in np.unique(y2)]
        for a in np.unique(y)
    ]
    return np.array(rows)


def dual_by_pot(
    x: np.ndarray, y: np.ndarray, x2: np.ndarray, y2: np.ndarray, label_weight: float, eps: float
) -> np.ndarray:
    """The dual on the first side, up to a constant; towards the same samples the symmetric one, by its fixed point."""
    distances_of_classes = class_distances_by_pot(x, y, x2, y2)
    _, rows = np.unique(y, return_inverse=True)
    _, columns = np.unique(y2, return_inverse=True)
    distances_of_labels = distances_of_classes[rows][:, columns]
    cost = ot.dist(x, x2) / 2 + label_weight * distances_of_labels / 2

    if x is x2:
        return symmetric_dual(cost, eps)

    _, log = ot.sinkhorn(
        np.full(len(x), 1 / len(x)),
        np.full(len(x2), 1 / len(x2)),
        cost,
        eps,
        method="sinkhorn_log",
        numItermax=5_000,
        stopThr=1e-9,
        log=True,
    )
    log_scaling = log["log_u"]
    return eps * log_scaling


def symmetric_dual(cost: np.ndarray, eps: float) -> np.ndarray:
    """By its fixed point, approached by half the way at each iteration."""
    num_samples = len(cost)
    dual = np.zeros(num_samples)
    for _ in range(NUM_SYMMETRIC_ITERATIONS):
        exponents = (dual - cost) / eps - np.log(num_samples)
        fixed_point = -eps * logsumexp(exponents, axis=1)
        dual = (dual + fixed_point) / 2
    return dual


def calibrated_gradient_by_pot(
    x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, label_weight: float, eps: float
) -> np.ndarray:
    """The calibrated gradient, sample by sample."""
    sides = x.numpy(), y.numpy(), x2.numpy(), y2.numpy()
    first_side = sides[:2]
    dual = dual_by_pot(*sides, label_weight, eps)
    dual_to_itself = dual_by_pot(*first_side, *first_side, label_weight, eps)
    f = dual - dual_to_itself
    m = len(f)
    return np.array([f[i] - sum(f[j] for j in range(m) if j != i) / (m - 1) for i in range(m)])


@pytest.mark.parametrize("weight", [3.0, 0.0])
def test_lava_equals_the_duals_of_pot(weight):
    x, y = make_blobs(40, 0)
    x2, y2 = make_blobs(25, 1)
    x = x.double()
    x2 = x2.double()
    eps = 4.0
    y, _ = flip_labels(y, 0.2, 4)

    values = lava(x, y, x2, y2, label_weight=weight, eps=eps)

    expected = calibrated_gradient_by_pot(x, y, x2, y2, weight, eps)
    tolerance = 1e-3 * np.abs(expected).max()

    np.testing.assert_allclose(values.numpy(), expected, atol=tolerance)
    assert float(values.sum()) == pytest.approx(0, abs=1e-9)


def test_lavas_class_distances_equal_the_reference_and_are_0_within_a_class():
    x, y = make_blobs(60, 0)
    x2, y2 = make_blobs(50, 1)
    has_class = y2 != 2
    x2 = x2[has_class]
    y2 = y2[has_class]

    distances = class_distances(x, y, x2, y2)
    distances_to_itself = class_distances(x, y, x, y)

    assert distances.shape == (4, 3)

    expected = class_distances_by_pot(
        *(
            part.numpy()
            for part in (
                x.double(),
                y,
                x2.double(),
                y2,
            )
        )
    )

    np.testing.assert_allclose(distances, expected, rtol=1e-9)
    assert torch.equal(distances_to_itself, distances_to_itself.T)

    distances_to_a_copy = class_distances(x, y, x.clone(), y)
    torch.testing.assert_close(distances_to_itself, distances_to_a_copy)
    assert (distances_to_itself.diag() == 0).all()
