"""Intervals of one seed, by hand and on the tables of the tuning set."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flsv.benchmark import federation, names, truth_table
from flsv.functional.intervals import one_seed_stderr
from flsv.metrics import ShadowShapley
from flsv.utilities.display import BRACKETS


def test_one_seed_stderr_adds_the_errors_of_fit_seeds_untrained_models_and_last_rounds() -> None:
    """0.025 of 2.0 paid, 0.3 of the fit, untrained models that deviate by 0.1 (of the sample) over two clients, and
    values with the variances 0.02 and 0.08 between the last two rounds."""
    values = torch.tensor([2.0, -1.0])
    of_fit = torch.tensor([0.3, 0.0])
    untrained = torch.tensor([0.0, 0.1, 0.2])
    recent = values + torch.tensor([[0.1, 0.2], [-0.1, -0.2]])

    stderr = one_seed_stderr(values, of_fit, untrained)
    with_rounds = one_seed_stderr(values, of_fit, untrained, recent)

    by_hand = [
        (0.09 + 0.0025 + 0.0025) ** 0.5,
        (0.0025 + 0.0025) ** 0.5,
    ]

    np.testing.assert_allclose(
        stderr.numpy(),
        by_hand,
        atol=1e-7,
    )

    variance = 0.0025 + 0.0025 + (0.02 + 0.08) / 2
    np.testing.assert_allclose(
        with_rounds[1].item() ** 2,
        variance,
        atol=1e-7,
    )


def test_one_seed_stderr_of_several_values_is_that_of_each_column() -> None:
    values = torch.tensor([[2.0, 0.0], [-1.0, 4.0]])

    stderr = one_seed_stderr(values, torch.zeros(2, 2))

    np.testing.assert_allclose(stderr.numpy(), [[0.09, 0.18], [0.09, 0.18]])


@pytest.mark.slow
def test_one_seeds_90_percent_interval_holds_the_other_seeds_mean_for_90_to_96_percent() -> None:
    """Of the tuning set, on which its two constants were chosen, allowing for the error of that mean: 90 to 96 % of the
    clients, by whichever is known."""
    covered: dict[bool, list[float]] = {
        False: [],
        True: [],
    }
    for name in names("tuning"):
        truth = truth_table(federation(name))
        if truth.utilities is None or truth.num_clients > 7:
            continue
        for seed, values in enumerate(truth.values):
            other_seeds = torch.cat([truth.values[:seed], truth.values[seed + 1 :]])
            error_of_mean = (1 + 1 / len(other_seeds)) ** 0.5
            deviation = (values - other_seeds.mean(0)).abs() / error_of_mean
            for untrained_is_known, shares in covered.items():
                untrained = truth.utilities[:, 0] if untrained_is_known else None
                stderr = one_seed_stderr(
                    values,
                    torch.zeros_like(values),
                    untrained,
                )
                is_covered = deviation <= 1.645 * stderr
                shares.append(float(is_covered.double().mean()))

    for shares in covered.values():
        assert 0.9 < np.mean(shares) < 0.96


def test_sentence_on_interval_brackets_is_the_same_in_docs_and_docstring() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/howto/look.md").read_text(encoding="utf-8")
    for text in (page, str(ShadowShapley.__doc__)):
        words = " ".join(text.split())
        assert BRACKETS.removeprefix("The brackets ").rstrip(".") in words  # it may go on
