"""The four pictures: what their doctests do not say."""

from __future__ import annotations

import numpy as np
import pytest

from flsv.plots import beeswarm, waterfall


@pytest.mark.parametrize(("start", "end"), [(0.3, 0.9), (0.3, 0.3), (0.0, 0.0)])
def test_values_that_do_not_lead_to_the_end_are_no_waterfall(start: float, end: float) -> None:
    with pytest.raises(ValueError, match=f"to {start + 0.4:.6g}, not to {end:.6g}: they do not add up"):
        waterfall([0.5, -0.1], start=start, end=end)


def test_points_of_one_value_lie_side_by_side_about_their_line() -> None:
    _, axis = beeswarm([[0.5, 0.1]] * 5)
    for place, dots in enumerate(axis.collections[:2]):
        aside = np.asarray(dots.get_offsets())[:, 1] - place
        np.testing.assert_allclose(np.sort(aside), [-0.24, -0.12, 0.0, 0.12, 0.24], atol=1e-12)
