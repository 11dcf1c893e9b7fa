"""``metric.plot()`` as the last line of a cell is shown, whichever metric it is, and pyplot knows nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley, DomainRelevance
from flsv.plots import Shown, picture_of

PNG = b"\x89PNG"


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        (ClassSpecificShapley(3, 2), torch.rand(3, 2)),
        (CumulativeShapley(3), torch.rand(3)),
        (CumulativeShapley(3), [torch.rand(3)] * 4),
        (CommunicationCost(3), torch.rand(3, 2)),
        (DomainRelevance(3), torch.rand(3, 3)),
    ],
)
def test_every_metrics_plot_is_a_picture(metric: Any, value: Any) -> None:
    drawn = metric.plot(value)
    figure, axis = drawn  # as ever
    assert axis.figure is figure
    assert isinstance(drawn, Shown)
    assert drawn._repr_png_()[:4] == PNG
    assert figure._repr_png_()[:4] == PNG


def test_ipythons_formatter_finds_it() -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(CumulativeShapley(3).plot(torch.rand(3)))
    assert data["image/png"][:4] == PNG


def test_pyplots_own_figures_are_left_to_it() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    before = pyplot.get_fignums()
    CumulativeShapley(3).plot(torch.rand(3))
    assert pyplot.get_fignums() == before
    figure, axis = pyplot.subplots()
    try:
        assert CumulativeShapley(3).plot(torch.rand(3), ax=axis)._repr_png_() is None
        assert picture_of(figure) is None
    finally:
        pyplot.close(figure)


def test_an_axis_of_ones_own_figure_is_a_picture_too() -> None:
    assert CumulativeShapley(3).plot(torch.rand(3), ax=Figure().add_subplot())._repr_png_()[:4] == PNG
