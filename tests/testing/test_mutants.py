"""The checks of :mod:`flsv.testing` find most parts with a fault in their formula, which still run and resume."""

import pytest

from flsv.testing.checks import PartCheck
from helpers.mutants import MUTATED_PARTS, Mutant, MutatedPart, failing_checks

PAIRS = [(part, mutant) for part in MUTATED_PARTS for mutant in part.mutants]


def parametrize_mutants(pairs: list[tuple[MutatedPart, Mutant]]) -> pytest.MarkDecorator:
    names = [f"{part.class_name}-{mutant.name}" for part, mutant in pairs]
    return pytest.mark.parametrize(("part", "mutant"), pairs, ids=names)


@parametrize_mutants([(part, mutant) for part, mutant in PAIRS if mutant.caught_by])
def test_a_check_finds_the_mutant(part: MutatedPart, mutant: Mutant) -> None:
    case = part.case(mutant)
    check = next(check for check in case.checks if check.__name__ == mutant.caught_by)

    with pytest.raises(AssertionError, match=f"fails {mutant.caught_by}: got "):
        PartCheck(case, check)()


@pytest.mark.slow
@parametrize_mutants([(part, mutant) for part, mutant in PAIRS if mutant.reason])
def test_no_check_finds_the_mutant_for_the_reason_given(part: MutatedPart, mutant: Mutant) -> None:
    assert failing_checks(part.case(mutant)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", MUTATED_PARTS, ids=[part.class_name for part in MUTATED_PARTS])
def test_the_part_without_a_fault_passes(part: MutatedPart) -> None:
    assert failing_checks(part.case()) == []


def test_two_thirds_of_the_mutants_are_found() -> None:
    assert len(PAIRS) == 55
    assert all(bool(mutant.caught_by) != bool(mutant.reason) for _, mutant in PAIRS)
    num_found = sum(bool(mutant.caught_by) for _, mutant in PAIRS)
    assert num_found >= 2 / 3 * len(PAIRS)
