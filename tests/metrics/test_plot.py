"""Pictures of contributions say what is known, and can be read at any size."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flsv.metrics import ClassSpecificShapley, CumulativeShapley
from flsv.metrics.plot import plot_contributions

NAN = float("nan")


def save_figure(figure: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no room, no glyph
        figure.savefig(folder / "figure.png", dpi=40)


def label_texts(texts: Any) -> list[str]:
    return [text.get_text() for text in texts if text.get_visible()]


def test_unknown_values_are_drawn_hatched_and_not_as_zero(tmp_path: Path) -> None:
    figure, axis = plot_contributions(torch.tensor([[0.5, NAN], [NAN, NAN], [-0.2, 0.0]]))
    (image,) = axis.images

    assert np.ma.getmaskarray(image.get_array()).tolist() == [
        [False, True],
        [True, True],
        [False, False],
    ]
    assert axis.patch.get_hatch()
    assert label_texts(axis.texts) == ["0.50", "-0.20", "0.00"]

    figure, axis = plot_contributions(torch.tensor([0.5, NAN, 0.0]))
    assert [bar.get_x() + bar.get_width() / 2 for bar in axis.patches] == [0, 2]
    assert [text.get_text().strip() for text in axis.texts] == ["no value"]

    save_figure(plot_contributions(torch.full((3, 2), NAN))[0], tmp_path)
    save_figure(
        plot_contributions(torch.full((3,), NAN), stderr=torch.full((3,), NAN))[0], tmp_path
    )


def test_bars_have_names_a_unit_a_zero_line_and_standard_errors(tmp_path: Path) -> None:
    figure, axis = plot_contributions(
        torch.tensor([0.1, -0.2, NAN]),
        client_names=["Boston", "Lyon", "2"],
        unit="gain in accuracy",
        stderr=torch.tensor([0.01, 0.02, NAN]),
        limits=(-0.5, 0.5),
    )

    assert axis.get_ylabel() == "gain in accuracy"
    assert label_texts(axis.get_xticklabels()) == ["Boston", "Lyon", "2"]
    assert axis.get_ylim() == (-0.5, 0.5)
    assert [0, 0] in [list(line.get_ydata()) for line in axis.lines]

    (errors,) = next(bars for bars in axis.containers if getattr(bars, "has_yerr", False)).lines[2]
    assert np.allclose(
        [segment[:, 1] for segment in errors.get_segments()], [[0.09, 0.11], [-0.22, -0.18]]
    )

    save_figure(figure, tmp_path)


def test_second_plot_on_an_axis_extends_its_limits() -> None:
    for values in (lambda top: torch.tensor([top]), lambda top: [torch.tensor([top])] * 2):
        _, axis = plot_contributions(values(0.1))
        plot_contributions(values(2.0), axis)
        assert axis.get_ylim()[1] > 2


def test_clients_without_a_value_are_not_among_the_lowest_of_a_plot() -> None:
    values = torch.arange(1.0, 31.0)
    values[10:20] = NAN
    _, axis = plot_contributions([values, values])

    assert label_texts(axis.get_legend().get_texts()) == [
        *(f"client {i}" for i in (29, 28, 27, 26, 25, 4, 3, 2, 1, 0))
    ]


def test_metric_plots_show_client_names_class_names_and_units() -> None:
    cssv = ClassSpecificShapley(num_clients=2, num_classes=2)
    cssv.bind(2, 2, ["Shirt", "Dress"], client_names=["Boston", "Lyon"])
    figure, axis = cssv.plot(torch.rand(2, 2))

    assert (label_texts(axis.get_xticklabels()), label_texts(axis.get_yticklabels())) == (
        ["Shirt", "Dress"],
        ["Boston", "Lyon"],
    )

    _, lines = cssv.plot(
        [torch.rand(2, 2), torch.rand(2, 2)]
    )  # of a round each: the overall values

    assert label_texts(lines.get_legend().get_texts()) == ["Boston", "Lyon"]
    assert figure.axes[1].get_ylabel() == cssv.guide().unit == "cosine with the aggregate"

    sampled = CumulativeShapley(
        num_clients=3, estimator="permutation", estimator_args={"budget": 20}
    )
    sampled.bind(3, 2)
    sampled.update(torch.arange(3), lambda masks: masks.float().sum(1))
    sampled.variance += 0.01

    assert [bars for bars in sampled.plot()[1].containers if getattr(bars, "has_yerr", False)]
