"""The metric is the function, whatever the order in which clients come."""

from __future__ import annotations

import pytest
import torch

from flsv.functional import collaborative_fairness
from flsv.metrics import CollaborativeFairness

ALONE, FINAL = torch.tensor([0.8, 0.5, 0.3, 0.4]), torch.tensor([0.9, 0.7, 0.65, 0.8])


def test_all_at_once_or_one_by_one() -> None:
    whole, parts = CollaborativeFairness(), CollaborativeFairness()
    whole.update(ALONE, FINAL)
    for i in range(4):
        parts.update(ALONE[i : i + 1], FINAL[i : i + 1])
    torch.testing.assert_close(whole.compute(), collaborative_fairness(ALONE, FINAL))
    torch.testing.assert_close(parts.compute(), whole.compute())


def test_shapes() -> None:
    with pytest.raises(ValueError, match="expected standalone"):
        CollaborativeFairness().update(ALONE, FINAL[:2])
