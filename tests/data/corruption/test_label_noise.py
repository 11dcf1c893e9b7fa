"""Closed-set label noise: y -> y + 1 mod C, or uniform flips at a rate."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from flsv.data import ClosedSetLabelNoise
from flsv.errors import ConfigurationError

Y = torch.arange(10_000) % 10
X = torch.arange(10_000.0)[:, None]


def noisy(corruption, y=Y, num_classes=10, seed=0):
    x, new = corruption(X[: len(y)].clone(), y.clone(), num_classes, torch.Generator().manual_seed(seed))
    assert torch.equal(x, X[: len(y)])
    return new


def test_every_label_becomes_the_next():
    assert noisy(ClosedSetLabelNoise()).tolist() == [(int(label) + 1) % 10 for label in Y]


def test_a_rate_flips_exactly_so_many_and_no_other():
    for to in ("next", "random"):
        new = noisy(ClosedSetLabelNoise(rate=0.137, to=to))
        assert int((new != Y).sum()) == 1370
    assert torch.equal(noisy(ClosedSetLabelNoise(rate=0.0)), Y)
    assert set((new - Y)[new != Y].remainder(10).tolist()) == set(range(1, 10))


def test_random_flips_reach_every_other_class_equally():
    shift = (noisy(ClosedSetLabelNoise(to="random")) - Y) % 10
    counts = np.bincount(shift, minlength=10)
    assert counts[0] == 0
    # Binomial(10000, 1/9): mean 1111, standard deviation 31.4.
    assert np.abs(counts[1:] - 10_000 / 9).max() < 5 * 31.4


def test_a_larger_rate_flips_the_same_samples_and_more():
    few, many = (noisy(ClosedSetLabelNoise(rate=rate)) != Y for rate in (0.1, 0.3))
    assert (few & ~many).sum() == 0


def test_what_is_learnt_from_it_is_the_wrong_classes():
    pixels, labels = load_digits(return_X_y=True)
    flipped = noisy(ClosedSetLabelNoise(), torch.tensor(labels)).numpy()
    train, test = slice(0, 1200), slice(1200, None)
    model = LogisticRegression(max_iter=200).fit(pixels[train] / 16, flipped[train])
    predicted = model.predict(pixels[test] / 16)
    assert (predicted == labels[test]).mean() < 0.05
    assert (predicted == (labels[test] + 1) % 10).mean() > 0.85


@pytest.mark.parametrize(
    ("arguments", "message"), [({"rate": 1.1}, r"rate=1.1.: .* \[0, 1\]"), ({"to": "last"}, "expected .next. or")]
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ClosedSetLabelNoise(**arguments)


def test_one_class_has_no_other():
    with pytest.raises(ConfigurationError, match="no other label"):
        noisy(ClosedSetLabelNoise(), torch.zeros(4, dtype=torch.long), num_classes=1)
