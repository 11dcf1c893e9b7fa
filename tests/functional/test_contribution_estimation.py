"""FedCE's formulas, against the authors' code written out again in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flsv.errors import ConfigurationError
from flsv.functional import contribution_estimates, leave_one_out_cosines
from flsv.metrics import ContributionEstimation


def reference_cosines(updates: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    consensus = (coefficients[:, None] * updates).sum(0)
    cosines = []
    for update, coefficient in zip(updates, coefficients):
        minus = consensus - coefficient * update
        cosines.append(update @ minus / (np.linalg.norm(update) * np.linalg.norm(minus)))
    return np.array(cosines)


def reference_coefficients(cosines: np.ndarray, minus_scores: np.ndarray, combine: str) -> np.ndarray:
    """Rounds by clients; the score of the first round is the 0 that every client starts with."""
    directions = 1.0 - cosines.mean(0)
    errors = 1.0 - minus_scores.mean(0)
    directions = np.clip(directions / directions.sum(), 1e-3, None)
    errors = np.clip(errors / errors.sum(), 1e-3, None)
    new = directions * errors if combine == "times" else directions + errors
    return np.clip(new / new.sum(), 1e-3, None)


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines(k: int, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(k)
    updates, weights = draw.normal(size=(k, 20)) + 0.5, draw.dirichlet(np.ones(k))
    tensor = torch.from_numpy(updates).to(dtype)
    found = leave_one_out_cosines(tensor @ tensor.T, torch.from_numpy(weights))
    torch.testing.assert_close(
        found,
        torch.from_numpy(reference_cosines(updates, weights)),
        atol=1e-6 if dtype == torch.float32 else 1e-12,
        rtol=0,
    )


def test_cosines_of_nothing_are_0() -> None:
    updates = torch.tensor([[1.0, 2.0], [0.0, 0.0], [-1.0, -2.0]])
    gram = updates @ updates.T
    assert leave_one_out_cosines(gram, torch.tensor([0.5, 0.0, 0.5]))[1] == 0
    assert leave_one_out_cosines(gram, torch.tensor([1.0, 0.0, 0.0])).tolist() == pytest.approx([0, 0, -1])
    assert leave_one_out_cosines(gram[:1, :1], torch.ones(1)).tolist() == [0]  # nobody else
    # The others' sum is exactly zero: no rounding noise is taken for a direction.
    updates = torch.tensor([[0.1, 0.3], [0.7, 0.1], [-2.1, -0.3]], dtype=torch.float64)
    assert leave_one_out_cosines(updates @ updates.T, torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64))[0] == 0
    with pytest.raises(ValueError, match=r"expected gram \[k, k\]"):
        leave_one_out_cosines(gram, torch.ones(2))


@pytest.mark.parametrize("combine", ["times", "plus"])
def test_coefficients(combine: str) -> None:
    draw = np.random.default_rng(1)
    for k in (2, 5):
        cosines, scores = draw.uniform(-1, 1, (4, k)), draw.uniform(0, 1, (4, k))
        scores[0] = 0
        found = contribution_estimates(torch.from_numpy(cosines.mean(0)), torch.from_numpy(scores.mean(0)), combine)
        np.testing.assert_allclose(found.numpy(), reference_coefficients(cosines, scores, combine), atol=1e-12)


def test_the_floor_and_a_sum_of_0() -> None:
    # A client that points just where the others do, and whose data the others' model knows.
    found = contribution_estimates(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.5, 0.5]))
    assert found[0] == pytest.approx(1e-3)
    assert contribution_estimates(torch.ones(4), torch.ones(4)).tolist() == [0.25] * 4
    with pytest.raises(ValueError, match=r"a score in \[0, 1\]"):
        contribution_estimates(torch.zeros(2), torch.tensor([-0.7, 0.2]))
    with pytest.raises(ConfigurationError, match='expected "times" or "plus"'):
        contribution_estimates(torch.zeros(2), torch.zeros(2), "minus")  # type: ignore[arg-type]


def test_no_error_counts_beyond_the_cap() -> None:
    cosines, scores = torch.tensor([0.1, 0.3, -0.2, 0.0]), torch.tensor([0.9, 0.8, 0.6, 0.7])
    plain = contribution_estimates(cosines, scores)
    assert torch.equal(contribution_estimates(cosines, scores, cap=10.0), plain)
    lied = torch.tensor([0.0, 0.8, 0.6, 0.7])
    told, capped = (contribution_estimates(cosines, lied, cap=cap) for cap in (None, 1.25))
    errors = np.array([min(each, 1.25 * 0.35) for each in (1.0, 0.2, 0.4, 0.3)])
    expected = (1 - cosines.double().numpy()) * errors
    np.testing.assert_allclose(capped.numpy(), expected / expected.sum(), atol=1e-6)
    assert told[0] > 1.5 * capped[0]
    assert capped[0] > plain[0]
    with pytest.raises(ConfigurationError, match="cap"):
        ContributionEstimation(cap=0.0)
