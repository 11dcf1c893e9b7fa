from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, minimize

from flsv.functional import few_coalitions, kernel_shap
from flsv.functional.shapley.few_coalitions import Which


def worths(masks: torch.Tensor, seed: int = 0) -> torch.Tensor:
    table = torch.rand(2 ** masks.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return table[(masks * 2 ** torch.arange(masks.shape[1])).sum(1)]


@pytest.mark.parametrize("which", ["singles", "leave-one-out", "both"])
def test_it_is_the_least_weighted_square(which: Which) -> None:
    """Solved by SciPy under the constraint; the kernel's weight is the same for one player and for all but one."""
    masks = few_coalitions(4, which)
    utilities = worths(masks)
    inner, gains = masks[2:].double().numpy(), (utilities[2:] - utilities[0]).numpy()
    total = float(utilities[1] - utilities[0])
    best = minimize(
        lambda phi: float(((inner @ phi - gains) ** 2).sum()),
        np.zeros(4),
        constraints=LinearConstraint(np.ones(4), total, total),
        tol=1e-12,
    )
    np.testing.assert_allclose(kernel_shap(masks, utilities).numpy(), best.x, atol=1e-5)


def test_what_the_coalitions_leave_open_is_dealt_out_equally() -> None:
    masks = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0]]).bool()
    torch.testing.assert_close(kernel_shap(masks, torch.tensor([0.0, 3, 2])), torch.tensor([2, 0.5, 0.5]).double())


def test_wrong_input() -> None:
    masks = few_coalitions(3, "both")
    for bad, utilities in ((masks[1:], torch.rand(7)), (masks[[0, 2, 3]], torch.rand(3)), (masks, torch.rand(7))):
        with pytest.raises(ValueError, match="nobody and everybody among them"):
            kernel_shap(bad, utilities)
