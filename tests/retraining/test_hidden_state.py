"""Runs with state in each place that a run has: each coalition against a fit of its members alone, in a process of its
own. What one copy of an object keeps, tests/utilities/test_run_copy.py shows."""

import re
from typing import Any

import pytest

from flsv.utilities.errors import ConfigurationError
from helpers import hidden_state, kinds_of_modules, kinds_of_parts, slow_except
from helpers.hidden_state import (
    FitAlone,
    FitWithValues,
    Kind,
    fit_members_alone,
    fit_with_values,
    in_fork,
)

KINDS = {
    **hidden_state.KINDS,
    **kinds_of_modules.KINDS,
    **kinds_of_parts.KINDS,
}
#: State that the module shares, weights that a callback swaps in, and checkpoints; a kind of each other outcome.
FAST = (
    "a closure",
    "EMAWeightAveraging",
    "a subclass of ModelCheckpoint",
    "a global",
    "an open file",
)
#: The coalitions whose members are trained alone: the one that is trained last, and that of all clients.
COMPARED = [(0, 1), (0, 1, 2)]


@pytest.fixture(scope="module", autouse=True)
def train_once() -> None:
    """What a first fit imports and starts is paid for once, before any fork."""
    fit_with_values(Kind())


def fit_with_values_of(name: str, options: dict[str, Any]) -> FitWithValues:
    return fit_with_values(KINDS[name], **options)


def fit_alone(name: str, members: tuple[int, ...]) -> FitAlone:
    kind = KINDS[name]
    return fit_members_alone(kind.alone or kind, members)


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_coalitions_are_fits_of_their_members_or_doubted_or_refused(name: str) -> None:
    kind = KINDS[name]
    if kind.outcome == "refused":
        with pytest.raises(ConfigurationError, match=kind.message):
            in_fork(fit_with_values_of, name, {})
        return

    run = in_fork(fit_with_values_of, name, {})
    fits = [in_fork(fit_alone, name, members) for members in COMPARED]
    differences = []
    for members, fit in zip(COMPARED, fits):
        differences.append(abs(run.game[members] - fit.utility))

    if kind.outcome == "doubt":
        assert re.search(kind.message, " ".join(run.doubts))
        return
    assert run.doubts == []
    assert run.model == fits[-1].model, "the metric has changed the training"
    if kind.outcome == "right":
        assert max(differences) <= 1e-6
    else:
        assert max(differences) > 1e-6
