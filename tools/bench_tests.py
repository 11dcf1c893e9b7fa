"""The README's command for the tests in seconds and in quickstarts, which are timed before and after it, and its twenty
slowest tests. Further arguments are pytest's, as in ``python tools/bench_tests.py -m slow``."""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def main(options: list[str]):
    readme = (REPOSITORY / "README.md").read_text()
    (readme_command,) = COMMAND.findall(readme)
    pytest_command = [*shlex.split(readme_command), *options]
    timed_command = [*pytest_command, "--durations=20"]

    quickstart_before = time_quickstart()
    seconds, output = run_module(timed_command, REPOSITORY)
    quickstart_after = time_quickstart()

    *_, summary = output.splitlines()
    mean_quickstart = (quickstart_before + quickstart_after) / 2
    ratio = seconds / mean_quickstart

    print(summary)
    print("\n| command | seconds | in quickstarts |")
    print("| --- | --- | --- |")
    print(f"| quickstart before | {quickstart_before:.1f} | |")
    print(f"| quickstart after | {quickstart_after:.1f} | |")
    print(f"| `{shlex.join(pytest_command)}` | {seconds:.0f} | {ratio:.1f} |")

    print("\n| one of the twenty slowest tests | seconds |")
    print("| --- | --- |")
    for test_seconds, phase, test in DURATION.findall(output):
        print(f"| `{test}`, {phase} | {test_seconds} |")


if __name__ == "__main__":
    main(sys.argv[1:])
