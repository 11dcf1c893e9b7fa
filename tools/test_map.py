"""Which tests reach which module, whatever they are called: `make test-map` runs the fast tests under coverage.

    python tools/test_map.py --of flsv/games/coalition.py    # from what was measured last

For each module the smallest set of test files (by greedy cover) that together reach every line within its functions
that any fast test reaches: those to run after a change of it. The map is made when it is asked for and kept nowhere but
in runs/coverage/, so none in the repository can be out of date; tools/mutants.py reads what was measured there, too.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
#: What runs other processes, or pages: they reach much and tell little.
LEFT_OUT = ("tests/docs", "tests/tools", "tests/device", "tests/cuda", "tests/release", "tests/typing")
#: test -> whether the line was reached in the test itself, or when something was set up for it and others.
Tests = dict[str, bool]


def measure(root: Path, kept: Path) -> None:
    """Run the fast tests; ``kept`` then has coverage.db and seconds.json."""
    kept.mkdir(parents=True, exist_ok=True)
    for old in kept.glob("coverage.db*"):
        old.unlink()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += ["--cov=flsv", "--cov-context=test", "--cov-report=", f"--junitxml={kept / 'tests.xml'}"]
    command += ["-o", "junit_family=xunit1", *(f"--ignore={folder}" for folder in LEFT_OUT)]
    done = subprocess.run(["env", f"COVERAGE_FILE={kept / 'coverage.db'}", *command], cwd=root)
    if done.returncode not in (0, 1):  # a failing test reaches lines, too
        raise SystemExit(done.returncode)
    (kept / "seconds.json").write_text(json.dumps(seconds(kept / "tests.xml"), indent=0))


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


def smallest_cover(lines: Mapping[int, set[str]]) -> list[str]:
    """Files that together reach all lines; the one that reaches most of what is left comes first.

    Example:
        >>> smallest_cover({1: {"a", "b"}, 2: {"b"}, 3: {"b", "c"}, 4: {"c"}})
        ['b', 'c']
    """
    left, chosen = dict(lines), []
    while left:
        reach: dict[str, int] = defaultdict(int)
        for files in left.values():
            for file in files:
                reach[file] += 1
        best = min(reach, key=lambda file: (-reach[file], file))
        chosen.append(best)
        left = {line: files for line, files in left.items() if best not in files}
    return chosen


def module_map(root: Path, kept: Path) -> dict[str, list[str]]:
    """Module -> its test files, for every module that has functions; doctests are not told, they are in the module."""
    data = CoverageData(str(kept / "coverage.db"))
    data.read()
    found = {}
    for path in modules(root):
        lines = {
            line: {test.partition("::")[0] for test in tests if test.startswith("tests/")}
            for line, tests in reached(data, path).items()
        }
        cover = smallest_cover({line: files for line, files in lines.items() if files})
        found[path.relative_to(root).as_posix()] = cover
    return found


def modules(root: Path) -> list[Path]:
    """Those with functions, in the order of their names."""
    paths = sorted(path for path in (root / "flsv").rglob("*.py") if "template" not in str(path.relative_to(root)))
    return [path for path in paths if lines_within_functions(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--of", action="append", metavar="MODULE", help="do not measure again; the files of this module"
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    asked = parser.parse_args()
    root = asked.root.absolute()
    kept = root / "runs" / "coverage"
    if asked.of is None:
        measure(root, kept)
        (kept / "map.json").write_text(json.dumps(module_map(root, kept), indent=1) + "\n")
        print(f"{kept / 'map.json'} is written.")
        return
    if not (kept / "map.json").is_file():
        raise SystemExit(f"{kept / 'map.json'} is missing: run `make test-map` first, some 15 minutes on two cores.")
    known = json.loads((kept / "map.json").read_text())
    for module in asked.of:
        if module not in known:
            raise SystemExit(f"{module} was not there when it was measured, or has no functions: run `make test-map`.")
        print(*known[module], sep="\n")


if __name__ == "__main__":
    main()
