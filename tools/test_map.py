"""Which tests reach which module, whatever they are called: tests/map.txt, from the fast tests under coverage.

    python tools/test_map.py                                   # all of them: `make test-map`
    python tools/test_map.py tests/games/test_new_module.py    # these: adds the modules that the map lacks

For each module the smallest set of test files (by greedy cover; the module itself stands for its doctests) that
together reach every line within its functions that any fast test reaches: those to run after a change of it. A module
that runs in other processes or needs another environment only has the test files that import it. What was measured
stays in runs/coverage/, which tools/mutants.py reads.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
#: What runs other processes, or pages: they reach much and tell little.
LEFT_OUT = ("tests/docs", "tests/tools", "tests/device", "tests/cuda", "tests/release", "tests/typing")
HEAD = "# Module: the test files that reach it. `make test-map` writes it; a new module: tools/test_map.py TEST_FILE."
#: test -> whether the line was reached in the test itself, or when something was set up for it and others.
Tests = dict[str, bool]


def measure(root: Path, kept: Path, tests: Sequence[str] = ()) -> None:
    """Run the fast tests, or these; ``kept`` then has coverage.db and seconds.json, in which these are added."""
    kept.mkdir(parents=True, exist_ok=True)
    whole, new = kept / "coverage.db", kept / "new.db"
    for old in (*kept.glob("new.db*"), *([] if tests else kept.glob("coverage.db*"))):
        old.unlink()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += ["--cov=flsv", "--cov-context=test", "--cov-report=", f"--junitxml={kept / 'tests.xml'}"]
    command += ["-o", "junit_family=xunit1", *(f"--ignore={folder}" for folder in LEFT_OUT), *tests]
    done = subprocess.run(["env", f"COVERAGE_FILE={new}", *command], cwd=root)
    if done.returncode not in (0, 1):  # a failing test reaches lines, too
        raise SystemExit(done.returncode)
    data, part = CoverageData(str(whole)), CoverageData(str(new))
    for each in (data, part):
        each.read()
    data.update(part)
    times = kept / "seconds.json"
    known = json.loads(times.read_text()) if tests and times.is_file() else {}
    times.write_text(json.dumps(known | seconds(kept / "tests.xml"), indent=0))


def seconds(xml: Path) -> dict[str, float]:
    """How long each test took, by its id."""
    found = {}
    for case in ET.parse(xml).iter("testcase"):
        file, name, within = case.get("file", ""), case.get("name", ""), case.get("classname", "")
        inner = within.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        parts = [file, inner, name] if inner and file.startswith("tests/") else [file, name]
        found["::".join(parts)] = float(case.get("time", 0))
    return found


def reached(data: CoverageData, file: Path) -> dict[int, Tests]:
    """Line -> the tests that reach it, within functions; what runs when the module is imported is nobody's."""
    inside = lines_within_functions(file.read_text())
    found: dict[int, Tests] = {}
    for line, contexts in data.contexts_by_lineno(str(file)).items():
        tests: Tests = {}
        for context in contexts:
            test, _, when = context.rpartition("|")
            if test:
                tests[test] = tests.get(test, False) or when == "run"
        if line in inside and tests:
            found[line] = tests
    return found


def lines_within_functions(source: str) -> set[int]:
    """Example:
    >>> sorted(lines_within_functions("import os\\n\\ndef f():\\n    return 1\\n"))
    [4]
    """
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def smallest_cover(lines: Mapping[int, set[str]], near: str = "") -> list[str]:
    """Files that together reach all lines; the one that reaches most of what is left comes first, of equals one that
    begins like ``near``.

    Example:
        >>> smallest_cover({1: {"a", "b"}, 2: {"b"}, 3: {"b", "c"}, 4: {"c", "d"}}, near="d")
        ['b', 'd']
    """
    left, chosen = dict(lines), []
    while left:
        reach: dict[str, int] = defaultdict(int)
        for files in left.values():
            for file in files:
                reach[file] += 1
        best = min(reach, key=lambda file: (-reach[file], not file.startswith(near), file))
        chosen.append(best)
        left = {line: files for line, files in left.items() if best not in files}
    return chosen


def module_map(root: Path, kept: Path, known: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Module -> its test files, for every module that has functions; what is ``known`` stays."""
    data = CoverageData(str(kept / "coverage.db"))
    data.read()
    found = {}
    for path in modules(root):
        name = path.relative_to(root).as_posix()
        if name in known:
            found[name] = known[name]
            continue
        lines = {
            line: {file for test in tests if (file := test.partition("::")[0]).startswith("tests/") or file == name}
            for line, tests in reached(data, path).items()
        }
        room = "/".join(["tests", *path.relative_to(root).parts[1:-1], ""])
        cover = smallest_cover({line: files for line, files in lines.items() if files}, room)
        found[name] = cover or importing(root, name)
    return found


def modules(root: Path) -> list[Path]:
    """Those with functions, in the order of their names."""
    paths = sorted(path for path in (root / "flsv").rglob("*.py") if "template" not in str(path.relative_to(root)))
    return [path for path in paths if lines_within_functions(path.read_text())]


def importing(root: Path, module: str) -> list[str]:
    """Test files that import it, or a helper beside the tests that does."""
    files = {path: _imports(path) for path in sorted((root / "tests").rglob("*.py"))}
    wanted, found = {module.removesuffix(".py").replace("/", ".")}, set[Path]()
    while new := {path for path, names in files.items() if names & wanted} - found:
        found |= new
        wanted |= {path.stem for path in new}
    return [path.relative_to(root).as_posix() for path in sorted(found) if path.name.startswith("test_")]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def read_map(file: Path) -> dict[str, list[str]]:
    """Module -> its test files, of tests/map.txt."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")] if file.is_file() else []
    return {module: tests.split() for module, _, tests in (line.partition(": ") for line in lines)}


def write_map(file: Path, found: Mapping[str, Sequence[str]]) -> None:
    lines = [f"{module}: {' '.join(tests)}" for module, tests in sorted(found.items())]
    file.write_text("\n".join([HEAD, *lines]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="of these; by default of all")
    parser.add_argument("--root", type=Path, default=ROOT)
    asked = parser.parse_args()
    root = asked.root.absolute()
    kept, file = root / "runs" / "coverage", root / "tests" / "map.txt"
    measure(root, kept, asked.tests)
    known = read_map(file) if asked.tests else {}
    found = module_map(root, kept, known)
    write_map(file, found)
    print(f"{file.relative_to(root)}: {len(found)} modules, {len(found.keys() - known.keys())} of them new")


if __name__ == "__main__":
    main()
