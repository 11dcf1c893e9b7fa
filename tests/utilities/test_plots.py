"""The pictures: what their doctests do not say."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from flsv.utilities.charts import BOTTOM, TOP
from flsv.utilities.plots import draw_steps, waterfall


@pytest.mark.parametrize(("start", "end"), [(0.3, 0.9), (0.3, 0.3), (0.0, 0.0)])
def test_waterfall_of_values_that_do_not_add_up_raises(start: float, end: float) -> None:
    with pytest.raises(ValueError, match=f"to {start + 0.4:.6g}, not to {end:.6g}: they do not add up"):
        waterfall([0.5, -0.1], start=start, end=end)


@pytest.mark.parametrize("less", [False, True])
def test_gains_and_losses_have_colors_of_their_own(less: bool) -> None:
    axis = Figure().add_subplot()
    draw_steps(axis, [0.5, -0.1, 0.2], ["a", "b", "c"], 0.0, 0.6, less_is_better=less)
    of = [to_hex(bar.get_facecolor()) for bar in axis.patches[2:]]  # the first two are start and end
    assert of == ([BOTTOM, TOP, BOTTOM] if less else [TOP, BOTTOM, TOP])


def test_waterfall_bars_stay_within_an_axis_that_does_not_begin_at_0() -> None:
    """A page's pictures are not clipped: it would run over the names."""
    _, axis = waterfall([0.01, 0.02], ["Boston", "Lyon"], start=0.9)
    bottom, top = axis.get_ylim()
    assert bottom > 0.5
    for bar in axis.patches:
        assert bottom <= bar.get_y() <= bar.get_y() + bar.get_height() <= top
