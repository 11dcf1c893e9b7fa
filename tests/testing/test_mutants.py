"""The checks of :mod:`flsv.testing` find parts with a fault in their formula, which still run and resume."""

import pytest

from flsv.testing.checks import PartCheck
from helpers.mutants import MUTATED_PARTS, Mutant, MutatedPart, failing_checks

CASES = [
    pytest.param(part, mutant, id=f"{part.class_name}-{mutant.name}")
    for part in MUTATED_PARTS
    for mutant in part.mutants
]


@pytest.mark.parametrize(("part", "mutant"), CASES)
def test_a_check_finds_the_mutant(part: MutatedPart, mutant: Mutant) -> None:
    case = part.case(mutant)
    check = next(check for check in case.checks if check.__name__ == mutant.caught_by)

    with pytest.raises(AssertionError, match=f"fails {mutant.caught_by}: got "):
        PartCheck(case, check)()


#: The others have tests of their own.
OUTSIDERS = [part for part in MUTATED_PARTS if part.module == "helpers.outsiders"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    OUTSIDERS,
    ids=lambda part: part.class_name,
)
def test_the_part_without_a_fault_passes(part: MutatedPart) -> None:
    assert failing_checks(part.case()) == []
