"""Changes one thing of flsv at a time and asks whether a test sees it: `make mutants`.

    python tools/mutants.py --count 200 --seed 0     # needs what `make test-map` has measured

A mutant (tools/mutation.py) is drawn from all functions of the package. A process that has imported torch, Lightning
and the rest, but not flsv, is forked for each; the child imports flsv with this one change and runs the tests that
reach the changed line, quickest first, until one fails. What was killed is kept in runs/mutants/: a stopped run goes
on, and after tests were added only the others are asked again.

Of well-kept tools, mutmut calls functions by way of a trampoline, while flsv, LightningCLI and torchmetrics read their
signatures and of what module they are; cosmic-ray starts an interpreter for each mutant, and importing torch and
Lightning takes longer than the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.machinery
import json
import os
import platform
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from coverage import CoverageData
from mutation import Mutant, mutated, of_package
from test_map import ROOT, reached

#: What flsv imports, and takes seconds; each child has them already.
HEAVY = (
    "torch", "torch.func", "torch.utils.tensorboard", "lightning.pytorch.cli", "torchmetrics", "torchvision", "ot",
    "scipy.stats", "scipy.optimize", "scipy.special", "sklearn.datasets", "sklearn.linear_model", "sklearn.compose",
    "pandas", "matplotlib.figure", "jinja2", "rich.table", "jsonargparse",
    "tensorboard.backend.event_processing.event_accumulator",
)  # fmt: skip
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "-o")
PYTEST += ("addopts=--doctest-modules --import-mode=importlib",)


@dataclass(frozen=True)
class Answer:
    """What became of a mutant: killed (by a test, or because it did not end), survived, reached by no fast test; or
    unclear, where its tests do not pass without it, or do not import it."""

    mutant: str
    fate: str
    by: str = ""
    tests: int = 0
    of: int = 0
    seconds: float = 0.0


class Loader(importlib.machinery.SourceFileLoader):
    """Loads the one module changed."""

    number = 0

    def get_code(self, fullname: str) -> Any:
        return compile(mutated(Path(self.path).read_text(), self.number), self.path, "exec")


class Finder:
    """Finds the one module before anybody else does."""

    def __init__(self, file: Path, number: int, root: Path) -> None:
        parts = file.relative_to(root).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.file, self.number, self.asked = file, number, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        self.asked = True
        loader = Loader(name, str(self.file))
        loader.number = self.number
        return importlib.util.spec_from_file_location(name, self.file, loader=loader)


class FirstFailure:
    """Notes the test that failed, or where collecting did; and keeps the finder before pytest's own, which takes files
    that are named on the command line (doctests) for tests, and rewrites their assertions."""

    def __init__(self, note: Path, finder: Finder | None) -> None:
        self.note, self.finder = note, finder

    def pytest_configure(self) -> None:
        if self.finder is not None:
            sys.meta_path.insert(0, self.finder)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.finder is not None and not self.finder.asked and exitstatus == 0:
            self.note.write_text(f"{self.finder.name} was never imported")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.note.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.note.write_text(f"collecting {report.nodeid}")


def run_tests(root: Path, tests: Sequence[str], cpu: float, mutant: Mutant | None) -> tuple[str, str]:
    """In a fork of this process: ("passed" | "failed" | "endless" | "unclear", the test)."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "failed"
        child = os.fork()
        if child == 0:
            status = 70
            with contextlib.suppress(BaseException):  # this copy of the process must end here, whatever a test does
                status = _in_child(root, tests, cpu, mutant, note, folder)
            os._exit(status)
        try:
            status = _waited(child, wall=10 * cpu)
        finally:
            _end_group(child)
        by = note.read_text() if note.exists() else ""
        if status is None:
            return "endless", ""
        if status == 0 and by:
            return "unclear", by
        return ("passed", "") if status == 0 else ("failed", by or f"status {status}")


def _in_child(root: Path, tests: Sequence[str], cpu: float, mutant: Mutant | None, note: Path, folder: str) -> int:
    os.setsid()  # so that what a test starts ends with it
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))
    signal.signal(signal.SIGXCPU, lambda *_: os._exit(71))
    os.chdir(root)
    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    finder = None if mutant is None else Finder(root / mutant.file, mutant.number, root)
    sys.meta_path[:0] = [] if finder is None else [finder]
    arguments = [*PYTEST, f"--basetemp={folder}/tmp", *tests]
    return int(pytest.main(arguments, plugins=[FirstFailure(note, finder)]))


def _waited(child: int, wall: float) -> int | None:
    """The child's exit status; None where it ran out of time."""
    end = time.monotonic() + wall
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code in (71, -signal.SIGXCPU, -signal.SIGKILL) else code
        time.sleep(0.02)
    _end_group(child)
    os.waitpid(child, 0)
    return None


def _end_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


class Judge:
    """Knows which tests reach a line, and how long they take.

    Args:
        root: the checkout.
        kept: what tools/test_map.py has measured of it.
        budget: seconds of tests for a mutant, by what they took unchanged.
    """

    def __init__(self, root: Path, kept: Path, budget: float) -> None:
        self.root, self.budget = root, budget
        self.data = CoverageData(str(kept / "coverage.db"))
        self.data.read()
        self.seconds: dict[str, float] = json.loads((kept / "seconds.json").read_text())
        self.by_file: dict[str, list[str]] = {}
        for test in self.seconds:
            self.by_file.setdefault(test.partition("::")[0], []).append(test)

    def tests(self, mutant: Mutant) -> list[str]:
        """Quickest first. Where a line is reached while something is set up for a file's tests, all of that file's."""
        found: set[str] = set()
        lines = reached(self.data, self.root / mutant.file)
        for test, itself in (lines.get(mutant.line, {}) | lines.get(mutant.reach, {})).items():
            found.update([test] if itself else self.by_file.get(test.partition("::")[0], [test]))
        return sorted(found & self.seconds.keys(), key=lambda test: (self.seconds[test], test))

    def judge(self, mutant: Mutant) -> Answer:
        started, all_ = time.monotonic(), self.tests(mutant)
        chosen, spent = [], 0.0
        for test in all_:
            spent += self.seconds[test]
            if chosen and spent > self.budget:
                break
            chosen.append(test)
        if not chosen:
            return Answer(str(mutant), "no test")
        fate, by = run_tests(self.root, chosen, 15 + 4 * min(spent, 2 * self.budget), mutant)
        if fate == "failed" and "::" not in by and run_tests(self.root, chosen, 8 * self.budget, None)[0] != "passed":
            fate = "unclear"  # its tests do not pass without it either
        words = {"passed": "survived", "failed": "killed", "endless": "endless", "unclear": "unclear"}
        return Answer(str(mutant), words[fate], by, len(chosen), len(all_), round(time.monotonic() - started, 1))


def report(answers: Sequence[Answer], seed: int) -> str:
    """When and where, counts, and who was not seen, in Markdown."""
    count = Counter(answer.fate for answer in answers)
    decided = count["killed"] + count["endless"]
    reached_ = len(answers) - count["no test"]
    lines = [
        f"Seed {seed}: {datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {sys.modules['torch'].__version__}.",
        f"{len(answers)} mutants: {count['killed']} killed, {count['endless']} endless, {count['survived']} survived, "
        f"{count['unclear']} unclear, {count['no test']} on lines that no fast test reaches.",
        f"Seen: {decided} of {reached_} reached ({decided / max(reached_, 1):.0%}), {decided} of {len(answers)} in all "
        f"({decided / max(len(answers), 1):.0%}); {sum(a.seconds for a in answers) / max(reached_, 1):.1f} s a mutant.",
        "",
    ]
    for fate in ("survived", "unclear", "no test"):
        unseen = [answer for answer in answers if answer.fate == fate]
        lines += [f"- {fate}: `{answer.mutant}` ({answer.tests} of {answer.of} tests)" for answer in unseen]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose text has this")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests a mutant")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--again", action="store_true", help="ask anew what is kept")
    asked = parser.parse_args()
    root = asked.root.absolute()
    kept, out = root / "runs" / "coverage", root / "runs" / "mutants"
    if not (kept / "coverage.db").is_file():
        raise SystemExit(f"{kept} has no coverage.db: run `make test-map` first.")
    out.mkdir(parents=True, exist_ok=True)
    everything = [mutant for mutant in of_package(root) if asked.only in str(mutant)]
    drawn = random.Random(asked.seed).sample(everything, min(asked.count, len(everything)))
    for name in HEAVY:
        importlib.import_module(name)
    file, judge = out / f"seed_{asked.seed}.jsonl", Judge(root, kept, asked.budget)
    known = {} if asked.again or not file.is_file() else _known(file)
    answers = []
    for place, mutant in enumerate(drawn, start=1):
        if str(mutant) not in known:
            known[str(mutant)] = judge.judge(mutant)
            with file.open("a") as lines:
                lines.write(json.dumps(vars(known[str(mutant)])) + "\n")
        answers.append(known[str(mutant)])
        print(f"{place}/{len(drawn)} {answers[-1].fate}: {mutant} {answers[-1].by}", flush=True)
    killers = sorted({answer.by for answer in answers if "::" in answer.by and " " not in answer.by.partition("[")[0]})
    fate, by = run_tests(root, killers, 600, None) if killers else ("passed", "")
    text = report(answers, asked.seed) + (
        f"\nNOT TO BE TRUSTED: {by} fails without a change." if fate != "passed" else ""
    )
    (out / f"seed_{asked.seed}.md").write_text(text + "\n")
    print(text)


def _known(file: Path) -> dict[str, Answer]:
    found = [Answer(**json.loads(line)) for line in file.read_text().splitlines()]
    return {answer.mutant: answer for answer in found if answer.fate in ("killed", "endless")}


if __name__ == "__main__":
    main()
