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
#: The coalitions whose members are trained alone: the one that is trained last, and that of all clients.
COMPARED = [(0, 1), (0, 1, 2)]


@pytest.fixture(scope="module", autouse=True)
def train_once():
    """Fit once before any fork, which pays for imports and threads."""
    fit_with_values(Kind())


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_coalitions_are_fits_of_their_members_or_have_a_warning_or_are_refused(name):
    kind = KINDS[name]
    if kind.outcome == "refused":
        with refused(kind.message):
            in_fork(fit_with_values, kind)
        return

    run = in_fork(fit_with_values, kind)
    differences = []
    for members in COMPARED:
        utility, model = in_fork(fit_members_alone, kind.alone or kind, members)
        differences.append(abs(run.game[members] - utility))

    if kind.outcome == "by company":
        (consistency_warning,) = run.consistency_warnings
        assert "clients train otherwise in the first round of coalitions" in consistency_warning
    else:
        assert run.consistency_warnings == []
    # The last coalition is that of all clients.
    assert run.model == model, "the metric has changed the training"
    assert max(differences) <= 1e-6
