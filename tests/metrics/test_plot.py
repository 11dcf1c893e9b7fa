"""Pictures of contributions say what is known, and can be read at any size."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from flsv.metrics import ClassSpecificShapley, CumulativeShapley
from flsv.metrics.plot import plot_contributions

NAN = float("nan")


def save_figure(figure, folder: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no room, no glyph
        figure.savefig(folder / "figure.png", dpi=40)


def label_texts(texts) -> list[str]:
    return [text.get_text() for text in texts if text.get_visible()]


def test_unknown_values_per_class_are_drawn_hatched_and_not_as_zero(tmp_path):
    values = torch.tensor(
        [
            [0.5, NAN],
            [NAN, NAN],
            [-0.2, 0.0],
        ]
    )

    _, axis = plot_contributions(values)

    (image,) = axis.images
    is_masked = torch.from_numpy(np.ma.getmaskarray(image.get_array()))
    assert torch.equal(is_masked, values.isnan())
    assert axis.patch.get_hatch()
    assert label_texts(axis.texts) == ["0.50", "-0.20", "0.00"]


def test_unknown_values_of_clients_have_no_bar():
    _, axis = plot_contributions(torch.tensor([0.5, NAN, 0.0]))

    centers = [bar.get_x() + bar.get_width() / 2 for bar in axis.patches]
    texts = [text.get_text().strip() for text in axis.texts]
    assert centers == [0, 2]
    assert texts == ["no value"]


@pytest.mark.parametrize(
    ("values", "intervals"),
    [
        pytest.param(torch.full((3, 2), NAN), None, id="per class"),
        pytest.param(
            torch.full((3,), NAN),
            [torch.full((3,), NAN)] * 2,
            id="of clients",
        ),
    ],
)
def test_unknown_values_alone_can_be_drawn(tmp_path, values, intervals):
    figure, _ = plot_contributions(values, intervals=intervals)

    save_figure(figure, tmp_path)


def test_bars_have_names_a_unit_a_zero_line_and_standard_errors(tmp_path):
    low = torch.tensor([0.09, -0.22, NAN])
    high = torch.tensor([0.11, -0.18, NAN])

    figure, axis = plot_contributions(
        torch.tensor([0.1, -0.2, NAN]),
        client_names=["Boston", "Lyon", "2"],
        unit="gain in accuracy",
        intervals=(low, high),
        limits=(-0.5, 0.5),
    )

    horizontal_lines = [list(line.get_ydata()) for line in axis.lines]
    (bars,) = [bars for bars in axis.containers if getattr(bars, "has_yerr", False)]
    (error_lines,) = bars.lines[2]
    intervals = [segment[:, 1] for segment in error_lines.get_segments()]
    expected_intervals = [
        [0.09, 0.11],
        [-0.22, -0.18],
    ]
    assert axis.get_ylabel() == "gain in accuracy"
    assert label_texts(axis.get_xticklabels()) == ["Boston", "Lyon", "2"]
    assert axis.get_ylim() == (-0.5, 0.5)
    assert [0, 0] in horizontal_lines
    assert np.allclose(intervals, expected_intervals)
    save_figure(figure, tmp_path)


def test_second_plot_on_an_axis_extends_its_limits():
    for values in (lambda top: torch.tensor([top]), lambda top: [torch.tensor([top])] * 2):
        _, axis = plot_contributions(values(0.1))
        plot_contributions(values(2.0), axis)
        assert axis.get_ylim()[1] > 2


def test_clients_without_a_value_are_not_among_the_lowest_of_a_plot():
    values = torch.arange(1.0, 31.0)
    values[10:20] = NAN

    _, axis = plot_contributions([values, values])

    highest_and_lowest = [29, 28, 27, 26, 25, 4, 3, 2, 1, 0]
    expected = [f"client {client}" for client in highest_and_lowest]
    assert label_texts(axis.get_legend().get_texts()) == expected


def test_metric_plots_show_client_names_class_names_and_units():
    cssv = ClassSpecificShapley(num_clients=2, num_classes=2)
    cssv.bind(
        2,
        2,
        ["Shirt", "Dress"],
        client_names=["Boston", "Lyon"],
    )

    figure, axis = cssv.plot(torch.rand(2, 2))

    assert label_texts(axis.get_xticklabels()) == ["Shirt", "Dress"]
    assert label_texts(axis.get_yticklabels()) == ["Boston", "Lyon"]
    assert figure.axes[1].get_ylabel() == "cosine with the aggregate"
    assert cssv.guide()["unit"] == "cosine with the aggregate"


def test_waterfall_leads_from_the_untrained_models_score_to_that_of_all():
    values = torch.tensor([0.5, -0.25, 0.25])
    intervals = (values - 0.125, values + 0.125)

    _, axis = plot_contributions(
        values,
        intervals=intervals,
        waterfall_from=0.125,
    )

    heights = [bar.get_height() for bar in axis.patches]
    bottoms = [bar.get_y() for bar in axis.patches]
    heights_of_scores = [0.125, 0.625]
    assert heights == [*heights_of_scores, 0.5, -0.25, 0.25]
    assert bottoms == [0, 0, 0.125, 0.625, 0.375]


def test_waterfall_of_values_per_class_is_refused():
    metric = ClassSpecificShapley(num_clients=2, num_classes=2)

    with pytest.raises(ValueError, match="one value per client"):
        metric.plot(torch.rand(2, 2), kind="waterfall")


def test_plot_of_a_sampled_metric_has_its_standard_errors():
    metric = CumulativeShapley(
        num_clients=3, estimator="permutation", estimator_args={"budget": 20}
    )
    metric.bind(3, 2)
    metric.update(torch.arange(3), lambda masks: masks.float().sum(1))
    metric.variance += 0.01

    _, axis = metric.plot()

    assert any(getattr(bars, "has_yerr", False) for bars in axis.containers)
