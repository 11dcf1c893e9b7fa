"""Whole numbers and back: the error is a rounding, and no sum overflows."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from flsv.engines.remote.secure import SecureSums
from flsv.engines.remote.secure import settings as of
from flsv.errors import ConfigurationError


@pytest.mark.parametrize("bits", [8, 16, 17, 32, 40])
@pytest.mark.parametrize("sites", [3, 7, 100])
def test_no_sum_overflows(bits: int, sites: int) -> None:
    """All weigh as much as they can, and all entries are at the ends of the range; in Python's integers."""
    sums = SecureSums(bits=bits, clip=2.0)
    weight = sums.most_weight(sites)
    values = np.array([2.0, -2.0, 1e9, -1e9, 0.0])
    whole, cut = sums.to_whole(values, weight)
    assert cut == 2
    exact = [sites * int(each) for each in whole]
    assert max(map(abs, exact)) < 2 ** (sums.ring - 1)
    total = sum((sums.in_ring(whole) for _ in range(sites)), start=sums.in_ring(np.zeros(5, dtype=np.int64)))
    assert sums.signed(total).tolist() == exact


@pytest.mark.parametrize(("bits", "ring"), [(12, 32), (16, 32), (24, 64), (32, 64)])
def test_the_error_is_half_a_step(bits: int, ring: int) -> None:
    sums = SecureSums(bits=bits, clip=4.0)
    assert sums.ring == ring
    values = np.random.default_rng(0).uniform(-4, 4, 1000)
    whole, cut = sums.to_whole(values, 1)
    assert cut == 0
    assert np.abs(whole / sums.scale - values).max() <= 0.5 / sums.scale * (1 + 1e-9)
    weighted, _ = sums.to_whole(values, 5)
    assert (weighted == 5 * whole).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"threshold": 2}, "threshold=2.*Of a sum of two"),
        ({"threshold": 3.5}, "threshold"),
        ({"clip": 0.0}, "clip=0"),
        ({"bits": 4}, "bits=4"),
        ({"bits": 41}, "bits=41"),
    ],
)
def test_wrong_arguments(options: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        SecureSums(**options)


def test_thresholds() -> None:
    assert [SecureSums().threshold_of(k) for k in (3, 4, 5, 6, 7, 9, 30)] == [3, 3, 4, 5, 5, 7, 21]
    assert all(2 * SecureSums().threshold_of(k) > k for k in range(3, 200))
    with pytest.raises(ConfigurationError, match="of 2 sites: expected 3"):
        SecureSums().threshold_of(2)
    with pytest.raises(ConfigurationError, match="of 4 sites: expected 5"):
        SecureSums(threshold=5).threshold_of(4)
    with pytest.raises(ConfigurationError, match="not more than half of 6"):
        SecureSums(threshold=3).threshold_of(6)


def test_what_a_user_says() -> None:
    assert SecureSums.of(True) == SecureSums()
    assert SecureSums.of(False) is None
    assert SecureSums.of(SecureSums(clip=1.0)).clip == 1.0  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="secure='yes'"):
        SecureSums.of("yes")  # type: ignore[arg-type]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, "RequirementCache", lambda what: False)
    with pytest.raises(ConfigurationError, match=r"pip install 'flsv\[secure\]'"):
        SecureSums()
