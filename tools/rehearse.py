"""A rehearsal of an upgrade: a run is begun with the last version of flsv, stopped, and goes on with this one.

    python tools/rehearse.py [--python python3.12] [--folder FOLDER] [--last 20b14bc8] [--earlier 4db0c7e6]

Builds wheels of the last version's commit and of the tree's last commit, and installs the first with its hard
dependencies into a fresh environment. A run of it is stopped in the middle, and goes on with the second wheel. It must
end as an uninterrupted run of the first does, bit by bit. The second wheel also reports the first one's run and one of
version 1.2.0, which it does not retrain, since its hashes of samples are others. Needs build.
"""

from __future__ import annotations

import argparse
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


def rehearse(
    python: str,
    folder: Path,
    *,
    last_commit: str,
    earlier_commit: str,
) -> None:
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
    tables = [(run_folder / "contributions.csv").read_bytes() for run_folder in folders]
    if tables[0] != tables[1]:
        raise SystemExit("contributions.csv is not that of the uninterrupted run")
    print("          weights and contributions are the uninterrupted run's, bit by bit", flush=True)
    installation.answer(f"report whole/{VERSION_0}")

    report_earlier(installation, copy_of(earlier_commit, folder / "source-earlier"))


def report_earlier(installation: Installation, source: Path) -> None:
    """Run an earlier version from its sources, and report the run with the version that is installed."""
    libraries = source.with_name("rich")
    installation.install("--target", libraries, "rich")  # a dependency of 1.2.0
    environment = dict(installation.environment)
    environment["PYTHONPATH"] = os.pathsep.join([str(source), str(libraries)])
    command = [str(installation.python), "-m", "flsv", *FIT.split(), "earlier"]
    finished = subprocess.run(
        command, cwd=installation.runs, env=environment, capture_output=True, text=True
    )
    if finished.returncode != 0:
        raise SystemExit(f"the earlier version does not run here:\n{finished.stderr}")
    print(f"  exit 0  {FIT} earlier, by flsv {version_of(source)}", flush=True)
    installation.answer(f"report earlier/{VERSION_0}")
    refusal = installation.answer(f"retrain earlier/{VERSION_0}", expected_status=2)
    check_in(refusal, "the data are not those of")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="of the fresh environment")
    parser.add_argument("--folder", type=Path, help="where all of it stays; by default nowhere")
    parser.add_argument("--last", default="7baa0f6b", help="the commit of version 2.1.0")
    parser.add_argument("--earlier", default="4db0c7e6", help="the commit of version 1.2.0")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        rehearse(
            options.python,
            folder.absolute(),
            last_commit=options.last,
            earlier_commit=options.earlier,
        )
    print("the upgrade works")


if __name__ == "__main__":
    main()
