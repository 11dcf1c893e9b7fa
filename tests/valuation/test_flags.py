"""The rules on gradients whose bad samples are known, and the figures of what is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flsv.participants.artifacts import write_artifacts
from flsv.valuation import FedBary, Valuation, clients_of, flag_samples, keep_pictures, server_of
from flsv.valuation.showing import draw_contributions, histograms_of


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.45])
def test_outliers_are_flagged_whatever_their_share(share: float) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bad = torch.arange(1000) < 1000 * share
    values[bad] += 30
    values -= values.mean()
    flagged = flag_samples(values)
    assert flagged[bad].all()
    assert flagged[~bad].float().mean() < 0.02


def test_few_and_equal_samples() -> None:
    for values in (torch.zeros(0), torch.zeros(1), torch.tensor([-1.0, 1.0]), torch.zeros(7)):
        assert not flag_samples(values).any()
    assert flag_samples(torch.tensor([0.0, 0.0, 0.0, 5.0])).tolist() == [False, False, False, True]


def test_classes_have_centres_of_their_own() -> None:
    values = torch.randn(900, generator=torch.Generator().manual_seed(0))
    y = torch.arange(900) % 3
    bad = torch.arange(900) % 5 == 0
    values[bad] += 30
    values += 100.0 * y
    values -= values.mean()
    alone, together = flag_samples(values, y=y), flag_samples(values)
    assert alone[bad & (values > 0)].all()
    assert alone[~bad].float().mean() < 0.02
    assert not together[bad & (y == 0)].any()  # hidden by the other classes


def images(count: int, seed: int, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, channels, 4, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(count) % 2


def test_the_grid_shows_the_worst_samples_and_is_written_where_the_client_says(tmp_path: Path) -> None:
    x, y = images(30, 1)
    x[[3, 8]] += 20
    x[5, 0, 0, 0] = float("nan")
    clients = clients_of([(x, y), images(20, 2)])
    FedBary(support=9, iterations=3).value(clients, server_of(*images(20, 0)), torch.Generator())
    assert clients[0].ask(keep_pictures, 3) is None
    figure = clients[0].ask(lambda local: local.memory["artifacts"]["most_harmful"]())
    titles = [text.get_text() for text in figure.axes[0].texts]
    assert len(titles) == 3
    assert titles[0] == "1: inf"
    assert {title[0] for title in titles[1:]} == {"0", "1"}  # labels of samples 3 and 8
    clients[0].ask(write_artifacts, tmp_path / "0", 4)
    assert (tmp_path / "0" / "most_harmful.png").stat().st_size > 1000
    assert any("events" in path.name for path in (tmp_path / "0" / "pictures").iterdir())
    clients[1].ask(write_artifacts, tmp_path / "1")
    assert not (tmp_path / "1").exists()  # it has kept nothing


def test_no_picture_of_what_is_no_image() -> None:
    for x, y in ((torch.randn(9, 5), torch.arange(9) % 2), images(9, 0, channels=2)):
        clients = clients_of([(x, y), (x, y)])
        FedBary(support=3, iterations=1).value(clients, None, torch.Generator())
        clients[0].ask(keep_pictures, 4)
        assert clients[0].ask(lambda local: "artifacts" not in local.memory)
    untouched = clients_of([images(3, 0), images(3, 1)])
    untouched[0].ask(keep_pictures, 4)
    assert untouched[0].ask(lambda local: not local.memory)


def test_figures_of_the_server() -> None:
    empty = torch.zeros(0, 1, 4, 4), torch.zeros(0).long()
    clients = clients_of([images(30, 1), empty, images(20, 2)])
    found = FedBary(support=9, iterations=3).value(clients, server_of(*images(20, 0)), torch.Generator())
    bars, shares = draw_contributions(found).axes
    assert [round(bar.get_height(), 4) for bar in bars.patches] == [
        round(d, 4) for d in found.distances[[0, 2]].tolist()
    ]
    assert found.distances[1].isnan()
    assert sum(bar.get_height() for bar in shares.patches) == pytest.approx(1)
    panels = [axis for axis in histograms_of(found).axes if axis.get_title().startswith("client")]
    assert len(panels) == 3
    assert [len(axis.patches) for axis in panels] == [1, 0, 1]
    many = Valuation(tuple(range(30)), torch.zeros(30), torch.zeros(30), torch.zeros(30), (None,) * 30, 1)
    assert sum(axis.get_title().startswith("client") for axis in histograms_of(many).axes) == 24
