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


def drawn_intervals(axis) -> list[np.ndarray]:
    """Return the lower and the upper end of each bar's interval."""
    (bars,) = [bars for bars in axis.containers if getattr(bars, "has_yerr", False)]
    _, _, (error_lines,) = bars.lines
    return [segment[:, 1] for segment in error_lines.get_segments()]


def test_unknown_values_per_class_are_drawn_hatched_and_not_as_zero(tmp_path):
    values = torch.tensor([[0.5, NAN], [NAN, NAN], [-0.2, 0.0]])

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
        pytest.param(torch.full((1000,), NAN), None, id="of many clients"),
        pytest.param(torch.full((3,), NAN), [torch.full((3,), NAN)] * 2, id="of clients"),
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

    y_of_lines = [list(line.get_ydata()) for line in axis.lines]
    zero_line = [0, 0]
    assert axis.get_ylabel() == "gain in accuracy"
    assert label_texts(axis.get_xticklabels()) == ["Boston", "Lyon", "2"]
    assert axis.get_ylim() == (-0.5, 0.5)
    assert zero_line in y_of_lines
    assert np.allclose(drawn_intervals(axis), [[0.09, 0.11], [-0.22, -0.18]])
    save_figure(figure, tmp_path)


@pytest.mark.parametrize(
    ("values", "higher_values"),
    [
        pytest.param(torch.tensor([0.1]), torch.tensor([2.0]), id="bars"),
        pytest.param([torch.tensor([0.1])] * 2, [torch.tensor([2.0])] * 2, id="lines"),
    ],
)
def test_second_plot_on_an_axis_extends_its_limits(values, higher_values):
    _, axis = plot_contributions(values)
    plot_contributions(higher_values, axis)

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
    cssv.bind(2, 2, class_names=["Shirt", "Dress"], client_names=["Boston", "Lyon"])

    figure, axis = cssv.plot(torch.rand(2, 2))

    assert label_texts(axis.get_xticklabels()) == ["Shirt", "Dress"]
    assert label_texts(axis.get_yticklabels()) == ["Boston", "Lyon"]
    assert figure.axes[1].get_ylabel() == "cosine with the aggregate"
    assert cssv.guide()["unit"] == "cosine with the aggregate"


def test_waterfall_leads_from_the_untrained_models_score_to_that_of_all():
    values = torch.tensor([0.5, -0.25, 0.25])
    intervals = (values - 0.125, values + 0.125)

    untrained_score = 0.125
    score_of_all = 0.125 + 0.5 - 0.25 + 0.25

    _, axis = plot_contributions(values, intervals=intervals, waterfall_from=untrained_score)

    heights = [bar.get_height() for bar in axis.patches]
    bottoms = [bar.get_y() for bar in axis.patches]
    assert heights == [untrained_score, score_of_all, *values.tolist()]
    # Each client's bar begins where the one before it ends.
    assert bottoms == [0, 0, 0.125, 0.125 + 0.5, 0.125 + 0.5 - 0.25]


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


def make_many_values() -> torch.Tensor:
    """Return the values of 1,000 clients. Only those of the clients 100 to 299 are known, and they ascend."""
    values = torch.full((1000,), NAN)
    values[100:300] = torch.arange(200.0)
    return values


NAMES_OF_MANY = [f"hospital {client}" for client in range(1000)]
#: The 25 clients with the lowest values and the 25 with the highest.
EXPECTED_OF_MANY = NAMES_OF_MANY[100:125] + NAMES_OF_MANY[275:300]
NOTE = "(50 of 1,000 clients: the highest and the lowest values)"


def test_bars_of_many_clients_are_those_of_the_highest_and_lowest_values():
    values = make_many_values()
    intervals = (values - 1, values + 2)

    _, axis = plot_contributions(values, client_names=NAMES_OF_MANY, intervals=intervals)

    assert label_texts(axis.get_xticklabels()) == EXPECTED_OF_MANY
    heights = [bar.get_height() for bar in axis.patches]
    highest_value = 199
    assert heights == [*range(25), *range(175, 200)]
    assert list(drawn_intervals(axis)[-1]) == [highest_value - 1, highest_value + 2]
    assert axis.get_xlabel() == f"client {NOTE}"


def test_heatmap_of_many_clients_has_a_row_for_the_highest_and_lowest_values():
    values = make_many_values()
    values_by_class = torch.stack([values, torch.full_like(values, NAN)], dim=1)

    _, axis = plot_contributions(values_by_class, client_names=NAMES_OF_MANY)

    (image,) = axis.images
    cells = image.get_array()
    assert cells.shape == (50, 2)
    assert cells[:, 0].tolist() == [*range(25), *range(175, 200)]
    assert label_texts(axis.get_yticklabels()) == EXPECTED_OF_MANY
    assert axis.get_ylabel() == f"client {NOTE}"


def test_lines_of_many_clients_are_those_of_the_highest_and_lowest_values():
    values = make_many_values()
    later_values = torch.full_like(values, NAN)
    later_values[0] = -1.0  # the lowest of all, known in the last round only

    _, axis = plot_contributions([values, later_values], client_names=NAMES_OF_MANY)

    assert len(axis.lines) == 50
    *_, lowest_client = label_texts(axis.get_legend().get_texts())
    assert "hospital 0" in lowest_client
    assert axis.get_xlabel() == f"round {NOTE}"
