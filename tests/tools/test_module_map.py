"""tests/map.txt is of the modules and tests that there are, and importing is told from reaching."""

from __future__ import annotations

from pathlib import Path

from test_map import ROOT, importing, modules, read_map

MAP = read_map(ROOT / "tests" / "map.txt")


def test_every_module_has_tests() -> None:
    there = {path.relative_to(ROOT).as_posix() for path in modules(ROOT)}
    assert there - MAP.keys() == set(), "run their tests: python tools/test_map.py TEST_FILE"
    assert MAP.keys() - there == set(), "remove their lines of tests/map.txt"
    assert [module for module, tests in MAP.items() if not tests] == []


def test_every_test_that_is_named_is_there() -> None:
    missing = {test: module for module, tests in MAP.items() for test in tests if not (ROOT / test).is_file()}
    assert missing == {}, "run the tests of these modules: python tools/test_map.py TEST_FILE"


def test_who_imports_by_way_of_a_helper(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name, text in {
        "helper.py": "from flsv.far import away\n",
        "test_by_helper.py": "from helper import away\n",
        "test_itself.py": "def test_it():\n    import flsv.far.away\n",
        "test_of_another.py": "from flsv.far import off\n",
    }.items():
        (tmp_path / "tests" / name).write_text(text)
    assert importing(tmp_path, "flsv/far/away.py") == ["tests/test_by_helper.py", "tests/test_itself.py"]
