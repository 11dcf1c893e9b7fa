"""Runs with every sort of state: each coalition against a fit of its members alone, in a process of its own."""

import pytest

from helpers import kinds_of_attributes, kinds_of_modules, kinds_of_parts, kinds_of_scores, refused
from helpers.hidden_state import Kind, fit_members_alone, fit_with_values, in_fork

#: What a copy of a run keeps of a module is in tests/utilities/test_run_copy.py, and that each client begins with it in
#: tests/compat/test_states.py. Here are those that need a whole fit: state elsewhere, made in training, and counted.
OF_MODULES = (
    "a closure",
    "a global",
    "an open file",
    "buffers and objects made in training",
    "a structure that training changes",
    "torchmetrics in steps",
    "bf16-mixed",
)
ALL_OF_MODULES = {**kinds_of_modules.KINDS, **kinds_of_attributes.KINDS}
KINDS = {
    **{name: ALL_OF_MODULES[name] for name in OF_MODULES},
    **kinds_of_parts.KINDS,
    **kinds_of_scores.KINDS,
}

REFUSED_KINDS = [name for name, kind in KINDS.items() if kind.outcome == "refused"]
VALUED_KINDS = [name for name, kind in KINDS.items() if kind.outcome != "refused"]
LAST_TRAINED_COALITION = (0, 1)
ALL_CLIENTS = (0, 1, 2)


@pytest.fixture(scope="module", autouse=True)
def train_once():
    """Fit once before any fork, which pays for imports and threads."""
    fit_with_values(Kind())


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_KINDS)
def test_run_whose_coalitions_would_be_wrong_is_refused(name):
    kind = KINDS[name]
    with refused(kind.message):
        in_fork(fit_with_values, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUED_KINDS)
def test_coalitions_are_fits_of_their_members_alone(name):
    kind = KINDS[name]
    kind_alone = kind.alone or kind

    run = in_fork(fit_with_values, kind)
    last_utility, _ = in_fork(fit_members_alone, kind_alone, LAST_TRAINED_COALITION)
    grand_utility, grand_model = in_fork(fit_members_alone, kind_alone, ALL_CLIENTS)

    assert run.game[LAST_TRAINED_COALITION] == pytest.approx(last_utility, rel=0, abs=1e-6)
    assert run.game[ALL_CLIENTS] == pytest.approx(grand_utility, rel=0, abs=1e-6)
    assert run.model == grand_model, "the metric has changed the training"

    is_warned = kind.outcome == "by company"
    assert len(run.consistency_warnings) == is_warned
    for message in run.consistency_warnings:
        assert "clients train otherwise in the first round of coalitions" in message
