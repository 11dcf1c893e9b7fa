"""The rules on gradients whose bad samples are known, and the figures of what is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flsv.participants.artifacts import write_artifacts
from flsv.valuation import FedBary, clients_of, flag_samples, keep_pictures, server_of
from flsv.valuation.showing import draw_contributions, histograms_of


@pytest.mark.parametrize("share", [0.0, 0.05, 0.45])
def test_outliers_are_flagged_whatever_their_share_each_class_by_its_own_center(share: float) -> None:
    values = torch.randn(900, generator=torch.Generator().manual_seed(0))
    bad, y = torch.randperm(900, generator=torch.Generator().manual_seed(1)) < 900 * share, torch.arange(900) % 3
    values[bad] += 30
    flagged = flag_samples(values - values.mean())
    assert flagged[bad].all()
    assert flagged[~bad].float().mean() < 0.02
    apart = values + 100.0 * y
    apart -= apart.mean()
    alone, together = flag_samples(apart, y=y), flag_samples(apart)
    assert alone[bad & (apart > 0)].all()
    assert alone[~bad].float().mean() < 0.02
    assert not together[bad & (y == 0)].any()  # hidden by the other classes


def test_few_and_equal_samples() -> None:
    for values in (torch.zeros(0), torch.tensor([-1.0, 1.0]), torch.zeros(7)):
        assert not flag_samples(values).any()
    assert flag_samples(torch.tensor([0.0, 0.0, 0.0, 5.0])).tolist() == [False, False, False, True]
    assert flag_samples(torch.tensor([-1.0, 1.0]), "positive").tolist() == [False, True]


def images(count: int, seed: int, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, channels, 4, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(count) % 2


def test_the_grid_shows_the_worst_samples_and_is_written_where_the_client_says(tmp_path: Path) -> None:
    x, y = images(30, 1)
    x[[3, 8]] += 20
    x[5, 0, 0, 0] = float("nan")
    empty = torch.zeros(0, 1, 4, 4), torch.zeros(0).long()
    clients = clients_of([(x, y), images(20, 2), empty])
    found = FedBary(support=9, iterations=3).value(clients, server_of(*images(20, 0)), torch.Generator())
    assert clients[0].ask(keep_pictures, 3) is None
    figure = clients[0].ask(lambda local: local.memory["artifacts"]["most_harmful"]())
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles[0] == "1: inf"
    assert {title[0] for title in titles[1:]} == {"0", "1"}  # labels of samples 3 and 8
    assert len(titles) == 3
    clients[0].ask(write_artifacts, tmp_path / "0", 4)
    assert (tmp_path / "0" / "most_harmful.png").stat().st_size > 1000
    assert any("events" in path.name for path in (tmp_path / "0" / "pictures").iterdir())
    clients[1].ask(write_artifacts, tmp_path / "1")
    assert not (tmp_path / "1").exists()  # it has kept nothing
    # What the server draws of them.
    bars, shares = draw_contributions(found).axes
    held = found.distances[:2].tolist()
    assert [bar.get_height() for bar in bars.patches] == pytest.approx(held)
    assert sum(bar.get_height() for bar in shares.patches) == pytest.approx(1)
    panels = [axis for axis in histograms_of(found).axes if axis.get_title().startswith("client")]
    assert [len(axis.patches) for axis in panels] == [1, 1, 0]


def test_no_picture_of_what_is_no_image() -> None:
    for x, y in ((torch.randn(9, 5), torch.arange(9) % 2), images(9, 0, channels=2)):
        clients = clients_of([(x, y), (x, y)])
        clients[0].ask(keep_pictures, 4)  # nor before it has judged
        FedBary(support=3, iterations=1).value(clients, None, torch.Generator())
        clients[0].ask(keep_pictures, 4)
        assert clients[0].ask(lambda local: "artifacts" not in local.memory)
