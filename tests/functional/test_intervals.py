"""Intervals of one seed, by hand and on the tables of the tuning set."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flsv.benchmark import federation, names, truth_table
from flsv.functional.intervals import BRACKETS, one_seed_stderr
from flsv.metrics import ShadowShapley


def test_one_seed_stderr_adds_the_errors_of_fit_seeds_untrained_models_and_last_rounds() -> None:
    """0.025 of 2.0 paid, 0.3 of the fit, untrained models that deviate by 0.1 (of the sample) over two clients, and
    values with the variances 0.02 and 0.08 between the last two rounds."""
    values, fit = torch.tensor([2.0, -1.0]), torch.tensor([0.3, 0.0])
    found = one_seed_stderr(values, fit, torch.tensor([0.0, 0.1, 0.2]))
    np.testing.assert_allclose(
        found.numpy(), [(0.09 + 0.0025 + 0.0025) ** 0.5, (0.0025 + 0.0025) ** 0.5], atol=1e-7
    )
    recent = values + torch.tensor([[0.1, 0.2], [-0.1, -0.2]])
    found = one_seed_stderr(values, fit, torch.tensor([0.0, 0.1, 0.2]), recent)
    np.testing.assert_allclose(found[1].item() ** 2, 0.0025 + 0.0025 + (0.02 + 0.08) / 2, atol=1e-7)
    columns = one_seed_stderr(torch.tensor([[2.0, 0.0], [-1.0, 4.0]]), torch.zeros(2, 2))
    np.testing.assert_allclose(columns.numpy(), [[0.09, 0.18], [0.09, 0.18]])


@pytest.mark.slow
def test_one_seeds_90_percent_interval_holds_the_other_seeds_mean_for_90_to_96_percent() -> None:
    """Of the tuning set, on which its two constants were chosen, allowing for the error of that mean: 90 to 96 % of the
    clients, by whichever is known."""
    held: dict[bool, list[float]] = {False: [], True: []}
    for name in names("tuning"):
        truth = truth_table(federation(name))
        if truth.utilities is None or truth.num_clients > 7:
            continue
        for seed, values in enumerate(truth.values):
            others = torch.cat([truth.values[:seed], truth.values[seed + 1 :]])
            off = (values - others.mean(0)).abs() / (1 + 1 / len(others)) ** 0.5
            for known in held:
                half = 1.645 * one_seed_stderr(
                    values, torch.zeros_like(values), truth.utilities[:, 0] if known else None
                )
                held[known].append(float((off <= half).double().mean()))
    assert all(0.9 < np.mean(each) < 0.96 for each in held.values())


def test_sentence_on_interval_brackets_is_the_same_in_docs_and_docstring() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/howto/look.md").read_text(encoding="utf-8")
    for text in (page, str(ShadowShapley.__doc__)):
        words = " ".join(text.split())
        assert BRACKETS.removeprefix("The brackets ").rstrip(".") in words  # it may go on
