"""`make test-map` and `make mutants` on a small package whose gaps are known; and what is changed at all."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import mutation
import pytest
from coverage import CoverageData
from test_map import reached, read_map, seconds

TOOLS = Path(mutation.__file__).parent
SOURCE = '''
def larger(a, b):
    """The larger of two.

    >>> larger(1, 2)
    2
    """
    if a > b:
        return a
    return b


def never_called(x):
    return x + 1


def first(n):
    total = 0
    while n > 0:
        n = n - 1
        total = total + 1
    return total
'''
TESTS = """
from flsv.numbers import first, larger


def test_larger():
    assert larger(3, 1) == 3


def test_first():
    assert first(2) == 2
"""


def texts(source: str) -> list[str]:
    return [f"{each.kind}: {each.before} -> {each.after}" for each in mutation.mutants("a.py", source)]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("return a // b", ["return: a // b -> None", "operator: a // b -> a / b"]),
        ("return not a", ["return: not a -> None"]),
        ("return -a", ["return: -a -> None", "sign: -a -> a"]),
        ("x = a and b", ["operator: a and b -> a or b"]),
        ("x = a is None", ["comparison: a is None -> a is not None"]),
        ("x: int = 3", ["constant: 3 -> 4"]),
        ("x = True", ["constant: True -> False"]),
        ("x += a", ["operator: x += a -> x -= a"]),
        ("x = f'{a + 1}'", []),
        ("raise ValueError(a + 1)", []),
        ("warnings.warn('a', stacklevel=2)", []),
        ("x = 'a' + b", []),
        ("x: int | None", []),
    ],
)
def test_what_is_changed(statement: str, expected: list[str]) -> None:
    assert texts(f"def f(a, b, x):\n    {statement}\n") == expected


def test_only_within_functions_and_never_in_annotations() -> None:
    assert texts("LIMIT = 3\n\ndef f(a: 'int | None' = 2) -> 3:\n    pass\n") == ["constant: 2 -> 3"]


def test_what_coverage_counts_by_the_statement_is_looked_for_there() -> None:
    source = 'def f(a=1):\n    """Text."""\n    x = (\n        a +\n        2\n    )\n    return x\n'
    assert [(each.line, each.reach, each.kind) for each in mutation.mutants("a.py", source)] == [
        (4, 3, "operator"), (5, 3, "constant"), (7, 7, "return"), (1, 3, "constant"),
    ]  # fmt: skip


@pytest.mark.slow
def test_each_mutant_of_the_package_is_another_program() -> None:
    """Of one file of each room: it compiles, and differs from what it was made of."""
    root = TOOLS.parent
    for file in sorted({path.parent: path for path in sorted((root / "flsv").glob("*/*.py"))}.values()):
        source = file.read_text()
        same = ast.dump(ast.parse(source))
        for mutant in mutation.mutants(str(file), source)[::7]:
            tree = mutation.mutated(source, mutant.number)
            compile(tree, str(file), "exec")
            assert ast.dump(tree) != same, str(mutant)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "flsv").mkdir()
    (root / "tests").mkdir()
    (root / "flsv" / "__init__.py").write_text("")
    (root / "flsv" / "numbers.py").write_text(SOURCE)
    (root / "tests" / "test_numbers.py").write_text(TESTS)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--doctest-modules"\n')
    return root


def run(tool: str, project: Path, *options: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(project)}
    command = [sys.executable, str(TOOLS / tool), "--root", str(project), *options]
    done = subprocess.run(command, env=environment, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_gaps_of_a_small_package_are_found(project: Path) -> None:
    run("test_map.py", project)
    map_of_it = {"flsv/numbers.py": ["tests/test_numbers.py", "flsv/numbers.py"]}
    assert read_map(project / "tests/map.txt") == map_of_it
    data = CoverageData(str(project / "runs/coverage/coverage.db"))
    data.read()
    lines = reached(data, project / "flsv/numbers.py")
    source = SOURCE.splitlines()
    assert [source[line - 1].strip() for line in sorted(lines)][:3] == ["if a > b:", "return a", "return b"]
    assert source.index("    return x + 1") + 1 not in lines
    times = seconds(project / "runs/coverage/tests.xml")
    assert set(times) == {
        "flsv/numbers.py::flsv.numbers.larger",
        "tests/test_numbers.py::test_first",
        "tests/test_numbers.py::test_larger",
    }

    told = run("mutants.py", project, "--count", "99")
    answers = [json.loads(line) for line in (project / "runs/mutants/seed_0.jsonl").read_text().splitlines()]
    fates = {answer["mutant"].partition(" ")[2]: answer["fate"] for answer in answers}
    unseen = {mutant for mutant, fate in fates.items() if fate == "survived"}
    # Of equal numbers both are the larger.
    assert unseen == {"comparison: a > b -> a >= b"}
    assert {mutant for mutant, fate in fates.items() if fate == "no test"} == {
        "return: x + 1 -> None", "operator: x + 1 -> x - 1", "constant: 1 -> 2",
    } - {mutant for mutant, fate in fates.items() if fate != "no test"}  # fmt: skip
    assert fates["operator: n - 1 -> n + 1"] == "endless"
    assert fates["condition: n > 0 -> not n > 0"] == "killed"
    assert "1 survived" in told
    assert "1 endless" in told
    assert "TRUSTED" not in told
    run("mutants.py", project, "--count", "99")
    again = [json.loads(line) for line in (project / "runs/mutants/seed_0.jsonl").read_text().splitlines()]
    assert {each["fate"] for each in again[len(answers) :]} == {
        "survived",
        "no test",
    }  # what was seen is not asked again


@pytest.mark.slow
def test_a_new_module_is_added_to_the_map_by_its_tests_alone(tmp_path: Path) -> None:
    for folder in ("flsv", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "flsv/__init__.py").write_text("")
    for name in ("old", "new"):
        (tmp_path / f"flsv/{name}.py").write_text("def f():\n    return 1\n")
        test = f"from flsv.{name} import f\n\n\ndef test_f():\n    assert f() == 1\n"
        (tmp_path / f"tests/test_{name}.py").write_text(test)
    (tmp_path / "tests/map.txt").write_text(
        "# Words.\nflsv/old.py: tests/by_hand.py\nflsv/gone.py: tests/test_gone.py\n"
    )
    run("test_map.py", tmp_path, "tests/test_new.py")
    assert read_map(tmp_path / "tests/map.txt") == {
        "flsv/new.py": ["tests/test_new.py"],
        "flsv/old.py": ["tests/by_hand.py"],
    }
