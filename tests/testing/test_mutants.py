"""The checks of :mod:`flsv.testing` find most parts with a fault in their formula, which still run and resume."""

import pytest

from flsv.testing.checks import PartCheck
from helpers.mutants import MUTATED_PARTS, Mutant, MutatedPart, failing_checks


def parametrize_mutants(is_found: bool) -> pytest.MarkDecorator:
    cases = []
    for part in MUTATED_PARTS:
        for mutant in part.mutants:
            name = f"{part.class_name}-{mutant.name}"
            if bool(mutant.caught_by) == is_found:
                cases.append(pytest.param(part, mutant, id=name))
    return pytest.mark.parametrize(("part", "mutant"), cases)


@parametrize_mutants(is_found=True)
def test_a_check_finds_the_mutant(part: MutatedPart, mutant: Mutant) -> None:
    case = part.case(mutant)
    name = mutant.caught_by
    check = next(check for check in case.checks if check.__name__ == name)

    with pytest.raises(AssertionError, match=f"fails {name}: got "):
        PartCheck(case, check)()


@pytest.mark.slow
@pytest.mark.long
@parametrize_mutants(is_found=False)
def test_no_check_finds_the_mutant_for_the_reason_given(
    part: MutatedPart,
    mutant: Mutant,
) -> None:
    assert failing_checks(part.case(mutant)) == []


#: The others have tests of their own.
OUTSIDERS = [part for part in MUTATED_PARTS if part.module == "helpers.outsiders"]


@pytest.mark.slow
@pytest.mark.parametrize("part", OUTSIDERS, ids=lambda part: part.class_name)
def test_the_part_without_a_fault_passes(part: MutatedPart) -> None:
    assert failing_checks(part.case()) == []


def test_two_thirds_of_the_mutants_are_found() -> None:
    mutants = [mutant for part in MUTATED_PARTS for mutant in part.mutants]
    caught = [mutant for mutant in mutants if mutant.caught_by]
    assert len(mutants) == 55
    assert len(caught) >= 2 / 3 * len(mutants)

    for mutant in mutants:
        is_found = bool(mutant.caught_by)
        has_reason = bool(mutant.reason)
        assert is_found != has_reason, mutant.name
