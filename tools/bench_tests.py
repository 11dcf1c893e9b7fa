"""Both tiers of the tests in seconds and in quickstarts, which are timed before and after them: the README's command,
and ``make slow``; and the forty slowest tests of each. Takes some twenty minutes on two cores without other work."""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

REPOSITORY = Path(__file__).resolve().parents[1]
README_COMMAND = re.compile(r"^pip install .* && (pytest .*)$", re.MULTILINE)
#: Of ``make slow``, in which ``$(SLOW)`` is the marker of slow tests.
SLOW_COMMAND = re.compile(r"^\t\$\(PYTHON\) -m (pytest .*) -m \"\$\(SLOW\)\"$", re.MULTILINE)
DURATION = re.compile(r"^([\d.]+)s (setup|call|teardown) +(.+)$", re.MULTILINE)
NUM_SLOWEST = 40
QUICKSTART = ["flsv", "fit", "--config", "quickstart"]


def run_module(arguments: list[str], folder: Path) -> tuple[float, str]:
    """Wall-clock seconds of ``python -m ...`` in a folder, and what it prints."""
    command = [sys.executable, "-m", *arguments]
    begun = time.perf_counter()
    ended = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begun

    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)
    return seconds, ended.stdout


def time_quickstart() -> float:
    with tempfile.TemporaryDirectory() as folder:
        seconds, _ = run_module(QUICKSTART, Path(folder))
    return seconds


def time_tests(pytest_command: str) -> list[tuple[str, float]]:
    """Rows of a tier: its command with its seconds, and its slowest tests with theirs."""
    seconds, output = run_module(
        [*shlex.split(pytest_command), f"--durations={NUM_SLOWEST}"], REPOSITORY
    )
    *_, summary = output.splitlines()
    print(summary)

    rows = [(pytest_command, seconds)]
    for test_seconds, phase, test in DURATION.findall(output):
        rows.append((f"{test}, {phase}", float(test_seconds)))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="write the table there")
    arguments = parser.parse_args()

    (readme_command,) = README_COMMAND.findall((REPOSITORY / "README.md").read_text())
    (slow_command,) = SLOW_COMMAND.findall((REPOSITORY / "Makefile").read_text())

    quickstart_before = time_quickstart()
    rows_of_fast_tests = time_tests(readme_command)
    rows_of_slow_tests = time_tests(f"{slow_command} -m slow")
    quickstart_after = time_quickstart()

    rows = [
        ("quickstart, before", quickstart_before),
        ("quickstart, after", quickstart_after),
        *rows_of_fast_tests,
        *rows_of_slow_tests,
    ]
    table = pd.DataFrame(rows, columns=["what", "seconds"])
    mean_quickstart = (quickstart_before + quickstart_after) / 2
    table["quickstarts"] = table["seconds"] / mean_quickstart
    rounded = table.round(2)

    print(rounded.to_string(index=False))
    if arguments.csv:
        rounded.to_csv(arguments.csv, index=False)


if __name__ == "__main__":
    main()
