"""docs/reference/compatibility.md: each row names a test, and each tested kind and option has its place in a row."""

import re
from pathlib import Path

from compat import test_trainer

from zoo.table import rows_with

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "compatibility.md"
TESTED = {
    "tests/compat/test_kinds.py": {*rows_with("by_hand")},
    "tests/compat/test_trainer.py": {*test_trainer.AS_BY_HAND, *test_trainer.CHANGES_NOTHING},
}


def rows_of_table():
    """Return each row's subject, and the test that it names."""
    rows = []
    for line in TABLE.read_text().splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        subject = cells[0]
        test = cells[-1]
        if test not in ("test", "---"):
            rows.append((subject, test.strip("`")))
    return rows


def test_every_row_of_the_compatibility_table_names_an_existing_test():
    assert len(rows_of_table()) > 50
    for support, test in rows_of_table():
        path, _, function = test.partition("::")
        is_defined = f"\ndef {function}(" in (ROOT / path).read_text()
        assert is_defined or (not function and path in TESTED), support


def test_every_tested_kind_and_option_is_listed_in_the_compatibility_table():
    for path, tested in TESTED.items():
        cells = " ".join(support for support, test in rows_of_table() if test == path)
        listed = re.findall(r"`([^`]+)`", cells)
        assert sorted(listed) == sorted(tested)
