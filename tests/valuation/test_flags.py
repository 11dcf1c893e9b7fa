"""The rules on gradients whose bad samples are known."""

from __future__ import annotations

import pytest
import torch

from flsv.valuation import flag_samples


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
