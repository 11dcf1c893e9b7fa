"""The README's command for the tests in seconds and in quickstarts, which are timed before and after it, and its twenty
slowest tests. Further arguments are pytest's, as in ``python tools/bench_tests.py -m slow``."""

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
COMMAND = re.compile(r"^pip install .* && (pytest .*)$", re.MULTILINE)
DURATION = re.compile(r"^([\d.]+)s (setup|call|teardown) +(.+)$", re.MULTILINE)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="write the table there")
    arguments, options = parser.parse_known_args()

    readme = (REPOSITORY / "README.md").read_text()
    (readme_command,) = COMMAND.findall(readme)
    pytest_command = [*shlex.split(readme_command), *options]
    timed_command = [*pytest_command, "--durations=20"]

    quickstart_before = time_quickstart()
    seconds, output = run_module(timed_command, REPOSITORY)
    quickstart_after = time_quickstart()

    mean_quickstart = (quickstart_before + quickstart_after) / 2
    rows = [
        ("quickstart, before", quickstart_before),
        ("quickstart, after", quickstart_after),
        (shlex.join(pytest_command), seconds),
    ]
    for test_seconds, phase, test in DURATION.findall(output):
        rows.append((f"{test}, {phase}", float(test_seconds)))

    table = pd.DataFrame(rows, columns=["what", "seconds"])
    table["quickstarts"] = table["seconds"] / mean_quickstart
    rounded = table.round(2)

    *_, summary = output.splitlines()
    print(summary)
    print(rounded.to_string(index=False))
    if arguments.csv:
        rounded.to_csv(arguments.csv, index=False)


if __name__ == "__main__":
    main()
