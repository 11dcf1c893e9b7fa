"""A rehearsal of an upgrade: a run is begun with the last version of flsv, stopped, and goes on with this one.

    python tools/rehearse.py [--python python3.12] [--folder FOLDER] [--last 7baa0f6b]

Builds wheels of the last version's commit and of the tree's last commit, and installs the first with its hard
dependencies into a fresh environment. A run of it is stopped in the middle, and goes on with the second wheel. It must
end as an uninterrupted run of the first does, bit by bit, but for values by coalitions. These train after the run, by
the second wheel, and are equal up to float32's rounding. The second wheel also reports and retrains the first's run.
Needs build.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from release import ROOT, run

ROUNDS = 20
#: Rounds in the file of contributions after which the run is stopped.
STOPPED_AFTER = 5
FIT = f"fit --config quickstart --trainer.max_epochs {ROUNDS} --trainer.default_root_dir"
#: A run's folder below the one where its trainer writes.
VERSION_0 = Path("lightning_logs") / "version_0"
#: The metric whose values are computed after the run, from trained coalitions.
METRIC_OF_COALITIONS = "value"
#: Values are of float32.
ROUNDING = 1e-6
COMPARE = """
import sys, torch
models = [torch.load(path, weights_only=True)["state_dict"] for path in sys.argv[1:]]
assert models[0].keys() == models[1].keys()
assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
"""


def version_of(root: Path) -> str:
    """Return the version in a folder's sources, without what marks it as in development."""
    text = (root / "flsv" / "__about__.py").read_text()
    match = re.search(r'^__version__ = "([\d.]+\d)', text, flags=re.MULTILINE)
    assert match is not None
    return match[1]


def copy_of(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder."""
    command = ["git", "-C", str(ROOT), "archive", commit]
    archive = subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def wheel_of(commit: str, folder: Path) -> Path:
    """Build a wheel of a commit."""
    source = copy_of(commit, folder / f"source-{commit}")
    dist = folder / f"dist-{commit}"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", dist, source)
    (wheel,) = dist.glob("*.whl")
    return wheel


class Installation:
    """An environment of its own, in which commands run outside of the checkout."""

    def __init__(self, python: str, folder: Path) -> None:
        run(python, "-m", "venv", folder / "venv")
        self.programs = folder / "venv" / "bin"
        self.python = self.programs / "python"
        self.flsv = self.programs / "flsv"
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }

    def install(self, *packages: str | Path) -> None:
        """Install packages by pip."""
        run(self.python, "-m", "pip", "install", "--disable-pip-version-check", *packages)

    def answer(self, command: str, expected_status: int = 0) -> str:
        """Return all that a command of flsv prints."""
        finished = subprocess.run(
            [str(self.flsv), *command.split()],
            cwd=self.runs,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        text = finished.stdout + finished.stderr
        if finished.returncode != expected_status:
            raise SystemExit(f"{command} ends with {finished.returncode}:\n{text}")
        print(f"  exit {finished.returncode}  flsv {command}", flush=True)
        return text

    def begin_and_stop(self, name: str) -> None:
        """Begin a run, and stop it as a scheduler does once some of its rounds are done."""
        process = subprocess.Popen(
            [str(self.flsv), *FIT.split(), name],
            cwd=self.runs,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and rounds_in(self.runs / name) < STOPPED_AFTER:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.wait()

        num_rounds = rounds_in(self.runs / name)
        if not 0 < num_rounds < ROUNDS:
            raise SystemExit(f"the run was stopped after {num_rounds} rounds, not in the middle")
        print(f"          stopped by SIGTERM after {num_rounds} of {ROUNDS} rounds", flush=True)


def rounds_in(root: Path) -> int:
    """Return how many rounds are in a run's file of contributions."""
    path = root / VERSION_0 / "contributions.csv"
    if not path.is_file():
        return 0
    rows = path.read_text().splitlines()[1:]
    return len({row.partition(",")[0] for row in rows})


def check_in(text: str, expected: str) -> str:
    """Print and return the line of a text that has what is expected."""
    for line in text.splitlines():
        if expected in line:
            print(f"          {line}", flush=True)
            return line
    raise SystemExit(f"expected {expected!r} in:\n{text}")


def rehearse(python: str, folder: Path, last_commit: str) -> None:
    """Upgrade flsv in the middle of a run."""
    last_wheel = wheel_of(last_commit, folder)
    wheel = wheel_of("HEAD", folder)
    last_version = version_of(folder / f"source-{last_commit}")
    version = version_of(folder / "source-HEAD")

    installation = Installation(python, folder)
    installation.install(last_wheel)
    installation.answer(f"{FIT} whole")
    installation.begin_and_stop("stopped")

    installation.install("--no-deps", "--force-reinstall", wheel)
    resume = f"{FIT} stopped --ckpt_path last"
    change = f"flsv is {version} and was {last_version}"
    check_in(installation.answer(f"{resume} --strict", expected_status=2), change)
    check_in(installation.answer(resume), change)
    # What is resumed is a new version in the logger's folder, with all that was before.
    whole = installation.runs / "whole" / VERSION_0
    resumed = installation.runs / "stopped" / VERSION_0.with_name("version_1")
    folders = [whole, resumed]
    checkpoints = [run_folder / "checkpoints" / "last.ckpt" for run_folder in folders]
    run(installation.python, "-c", COMPARE.strip(), *checkpoints)
    print("          the weights are the uninterrupted run's, bit by bit", flush=True)
    compare_tables(*(run_folder / "contributions.csv" for run_folder in folders))
    installation.answer(f"report whole/{VERSION_0}")
    installation.answer(f"retrain whole/{VERSION_0} --seeds 1")
    installation.answer(f"report whole/{VERSION_0}")


def compare_tables(whole: Path, resumed: Path) -> None:
    """Compare two files of contributions, row by row."""
    largest_difference = 0.0
    rows_by_file = [list(csv.reader(path.open())) for path in (whole, resumed)]
    for row, expected_row in zip(*rows_by_file, strict=True):
        if row == expected_row:
            continue
        metric = row[1]
        if metric != METRIC_OF_COALITIONS:
            raise SystemExit(f"contributions.csv has {row}, and not {expected_row}")
        for cell, expected_cell in zip(row, expected_row, strict=True):
            if cell != expected_cell:
                difference = abs(float(cell) - float(expected_cell))
                largest_difference = max(largest_difference, difference)
    if largest_difference > ROUNDING:
        raise SystemExit(f"values by coalitions differ by {largest_difference:.1g}")
    print(
        f"          so are contributions, those by coalitions up to {largest_difference:.1g}",
        flush=True,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="of the fresh environment")
    parser.add_argument("--folder", type=Path, help="where all of it stays; by default nowhere")
    parser.add_argument("--last", default="7baa0f6b", help="the commit of version 2.1.0")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rehearse(options.python, folder.absolute(), options.last)
    print("the upgrade works")


if __name__ == "__main__":
    main()
