"""The picture of a partition shows the counts, and has readable labels at any size."""

import matplotlib.pyplot as plt
import pytest
import torch

from flsv.data import plot_partition


@pytest.mark.parametrize(("clients", "classes"), [(2, 2), (5, 10), (30, 17), (100, 10), (10, 100), (3, 1)])
def test_bars_have_the_lengths_of_the_counts(clients, classes, tmp_path):
    counts = torch.randint(0, 9, (clients, classes), generator=torch.Generator().manual_seed(0)) + 1
    figure, axes = plot_partition(counts)
    widths = torch.zeros(clients, dtype=torch.long)
    for bar in axes.patches:
        widths[round(bar.get_y() + bar.get_height() / 2)] += round(bar.get_width())
    assert widths.tolist() == counts.sum(1).tolist()
    figure.savefig(tmp_path / "partition.png", dpi=50)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "0"
    assert len(labels) <= 50


def test_legend_has_the_class_names():
    figure, _ = plot_partition(torch.ones(3, 2, dtype=torch.long), ["normal", "pneumonia"])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["normal", "pneumonia"]


def test_pyplot_is_not_touched():
    before = plt.get_fignums()
    plot_partition(torch.ones(3, 2, dtype=torch.long))
    assert plt.get_fignums() == before


def test_data_without_classes_need_no_legend():
    figure, axes = plot_partition(torch.tensor([[3], [5]]), ("samples",))
    assert not figure.legends
    assert len(figure.axes) == 1
    assert axes.get_xlim()[1] > 5


def test_twenty_classes_look_different_to_everybody():
    """With the clients' names beside the bars."""
    figure, axes = plot_partition(torch.ones(2, 20, dtype=torch.long), client_names=["Boston", "Lyon"])
    assert len({patch.get_facecolor() for patch in figure.legends[0].get_patches()}) == 20
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Boston", "Lyon"]
