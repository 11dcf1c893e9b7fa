"""Divergences of label distributions against SciPy and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from flsv.functional import label_divergence

COUNTS = torch.tensor([[3, 1, 0, 6], [5, 5, 5, 5], [0, 0, 7, 0], [100, 200, 1, 1]])
OWN = torch.tensor([4.0, 3.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("reference", "q"),
    [("uniform", [0.25] * 4), ("global", COUNTS.sum(0) / COUNTS.sum()), (OWN, OWN / 10)],
    ids=["uniform", "global", "own"],
)
def test_against_scipy(reference: Any, q: Any) -> None:
    q = np.asarray(q, dtype=np.float64)
    p = COUNTS.double().numpy() / COUNTS.double().numpy().sum(1, keepdims=True)
    np.testing.assert_allclose(
        label_divergence(COUNTS, "kl", reference), [entropy(row, q) for row in p], rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(label_divergence(COUNTS, "l2", reference), np.linalg.norm(p - q, axis=1), rtol=1e-6)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_all_mass_in_one_class_is_the_largest_divergence(classes: int) -> None:
    counts = torch.zeros(classes, dtype=torch.long)
    counts[-1] = 40
    assert label_divergence(counts).item() == pytest.approx(math.log(classes))
    assert label_divergence(counts, "l2").item() == pytest.approx(math.sqrt(1 - 1 / classes))
    others = torch.randint(1, 50, (20, classes), generator=torch.Generator().manual_seed(0))
    for kind in ("kl", "l2"):
        assert (label_divergence(others, kind) < label_divergence(counts, kind)).all()  # type: ignore[arg-type]


def test_a_class_that_the_reference_lacks() -> None:
    lacks = torch.tensor([1, 1, 0])
    with pytest.raises(ValueError, match="infinite"):
        label_divergence(torch.tensor([1, 1, 1]), "kl", lacks)
    assert label_divergence(torch.tensor([1, 1, 0]), "kl", lacks) == 0
    assert label_divergence(torch.tensor([1, 1, 1]), "l2", lacks).isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "js"}, 'expected "kl" or "l2"'),
        ({"reference": "equal"}, 'expected "uniform", "global"'),
        ({"reference": torch.ones(3)}, r"reference \[2\], as many as classes, got \[3\]"),
        ({"reference": torch.zeros(2)}, "reference=.*above 0"),
        ({"class_counts": torch.tensor([1, 2]), "reference": "global"}, "needs the class_counts"),
        ({"class_counts": torch.tensor([[1, 2], [0, 0]])}, "above 0"),
        ({"class_counts": torch.tensor([2, -1])}, "not negative"),
        ({"class_counts": torch.ones(1, 2, 3)}, r"class_counts \[M\] or \[n, M\]"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        label_divergence(**{"class_counts": torch.tensor([[1, 2]]), **arguments})
