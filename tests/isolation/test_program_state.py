"""What a program keeps outside of its objects is put back."""

import pytest

from flsv.isolation.program_state import restored_program


def remember(value, seen=[]):  # noqa: B006
    seen.append(value)
    return list(seen)


def remember_by_name(value, *, seen={}):  # noqa: B006
    seen[value] = True
    return list(seen)


def count(value):
    count.values = [*getattr(count, "values", []), value]
    return list(count.values)


class Program:
    def remember(self, value, seen=[]):  # noqa: B006
        seen.append(value)
        return list(seen)


@pytest.mark.parametrize(
    "function",
    [remember, remember_by_name, count, Program().remember],
    ids=["default", "default by name", "attribute", "default of a method"],
)
def test_functions_keep_what_they_kept_before(function):
    with restored_program() as changed_tensors:
        assert function(1) == [1]
        assert function(2) == [1, 2]

    assert function(3) == [3]
    assert changed_tensors == []
