"""Kill -9 at random moments: does what goes on afterwards end as if nothing had been?

    python tools/kill_trials.py                    # seven trials of each kind
    python tools/kill_trials.py --trials 2 --only retrain ranks

Every kind is a command as a user types it. It runs once undisturbed; then, in every trial, it is started, killed after
a random share of the time that the undisturbed run took, and started again (``--ckpt_path last`` for a fit that has
saved one, the same command otherwise) until it ends, with at most three kills. What it leaves is compared to the bit:
the last checkpoint without paths and batch counters, ``contributions.csv`` as it is read back, and the tables of
retrain, repeat, compare and bench without their seconds. Of a run on two ranks either may be the one that is killed. A
process that is alive ten seconds after the run was killed counts as a difference.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/engines")]

from common import grid  # noqa: E402
from same_runs import differences  # noqa: E402

from flsv.cli import main  # noqa: E402
from flsv.report import open_run  # noqa: E402

# The process that the others are forked from has no other way to learn where to import from.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
os.environ["OMP_NUM_THREADS"] = "1"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["flsv.cli.parser", "flsv.cli.retrain", "flsv.cli.compare", "flsv.cli.bench"])

FIT = ("fit", "--config", "quickstart", "--trainer.max_epochs", "6", "--federation.reporting.table", "false")
BATCHES = ("--trainer.limit_train_batches", "8", "--trainer.enable_progress_bar", "false")
SHORT = (*FIT[1:3], "--trainer.max_epochs", "2", *BATCHES)
MOST_KILLS = 3
PATIENCE = 10.0  # seconds until a killed run's other processes have to be gone


def root_of(folder: Path) -> tuple[str, ...]:
    return ("--trainer.default_root_dir", str(folder))


def fit(*more: str) -> Callable[[Path], list[str]]:
    """A fit that goes on from its last checkpoint, where it has one."""

    def command(folder: Path) -> list[str]:
        last = ("--ckpt_path", "last") if list(folder.rglob("last.ckpt")) else ()
        return [*FIT, *more, *BATCHES, *root_of(folder), *last]

    return command


def fits_differ(whole: Path, again: Path) -> list[str]:
    """The newest run of both folders."""
    mine, theirs = (max(f.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns).parent for f in (again, whole))
    rows, others = (sorted(map(str, open_run(folder.parent).table.rows())) for folder in (theirs, mine))
    return differences(theirs, mine) + (["contributions.csv"] if rows != others else [])


def tables_differ(*names: str) -> Callable[[Path, Path], list[str]]:
    """CSV files of these names anywhere below, without columns of seconds."""

    def read(folder: Path) -> dict[str, list[list[str]]]:
        found = {}
        for path in sorted(path for name in names for path in folder.rglob(name)):
            with path.open(newline="") as file:
                rows = list(csv.reader(file))
            kept = [i for i, name in enumerate(rows[0]) if "second" not in name and "time" not in name]
            found[str(path.relative_to(folder))] = [[row[i] for i in kept] for row in rows]
        return found

    def differ(whole: Path, again: Path) -> list[str]:
        one, other = read(whole), read(again)
        assert one, f"no {names} below {whole}"
        return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]

    return differ


@dataclass(frozen=True)
class Kind:
    """A command, by the folder that it writes to, and how two such folders differ. ``before``: what is run once first,
    undisturbed, in every folder."""

    command: Callable[[Path], list[str]]
    differ: Callable[[Path, Path], list[str]]
    before: Callable[[Path], list[str]] | None = None


def run_of(folder: Path) -> str:
    return str(next(folder.rglob("run.json")).parent)


KINDS = {
    "one process": Kind(fit(), fits_differ),
    "two ranks": Kind(fit("--trainer.strategy", "federated", "--trainer.devices", "2"), fits_differ),
    "vmap": Kind(fit("--federation.engine", "vmap"), fits_differ),
    "in-run values": Kind(fit("--config", "in_run_shapley"), fits_differ),
    "SCAFFOLD, optimizers kept": Kind(
        fit("--config", "scaffold", "--federation.client_optimizer", "keep"), fits_differ
    ),
    "retrain": Kind(
        lambda folder: ["retrain", run_of(folder), "--rounds", "2", "--trainings", "singles"],
        tables_differ("retrained*.csv"),
        lambda folder: ["fit", *SHORT, *root_of(folder)],
    ),
    "repeat": Kind(
        lambda folder: ["repeat", "3", *SHORT, "--data.splits.seed", "0", "--out", str(folder / "repeat")],
        tables_differ("repeat.csv"),
    ),
    "compare": Kind(
        lambda folder: [
            *("compare", "--base", "quickstart", "--config", "fedavg", "--config", "fedprox"),
            *(*SHORT[2:], "--out", str(folder)),
        ],
        tables_differ("compare.csv"),
    ),
    "bench": Kind(
        lambda folder: [
            *("bench", "--metric", "cgsv", "--federations", "digits_dirichlet", "--seeds", "3"),
            *("--out", str(folder)),
        ],
        tables_differ("values.csv"),  # costs.csv has seconds
    ),
}


class Process:
    """``flsv`` with these arguments, as the leader of its own session."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self._process: Any
        if "federated" in arguments:  # further ranks are started by the command that this one was started by
            command = [sys.executable, "-m", "flsv", *arguments]
            with output.open("ab") as file:
                self._process = subprocess.Popen(
                    command, stdout=file, stderr=file, cwd=output.parent, start_new_session=True
                )
        else:
            self._process = _context.Process(target=_flsv, args=(list(arguments), str(output)))
            self._process.start()
        self.begun = time.monotonic()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status; None if it has not ended by then."""
        if isinstance(self._process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(seconds)
            return None
        self._process.join(seconds)
        return self._process.exitcode

    def alive(self) -> list[int]:
        """The processes of its session, also where it is gone itself."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._process.pid and state != "Z":
                    found.append(int(path.name))
        return sorted(found)

    def kill(self, draw: random.Random) -> bool:
        """One of its processes; whether all are gone soon after."""
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(draw.choice(self.alive()), signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while self.wait(0) is None or self.alive():
            if time.monotonic() > end:
                for number in self.alive():
                    os.kill(number, signal.SIGKILL)
                self.wait()
                return False
            time.sleep(0.1)
        return True


def _flsv(arguments: list[str], output: str) -> None:
    """In a process that was forked from one in which everything is imported."""
    os.setsid()
    number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.chdir(Path(output).parent)
    sys.argv = ["flsv", *arguments]
    sys.exit(main(arguments))


def end(arguments: Sequence[str], output: Path) -> float:
    """Run it to its end; its seconds."""
    process = Process(arguments, output)
    if process.wait() != 0:
        raise RuntimeError(f"flsv {' '.join(arguments)}: {output.read_text()[-2000:]}")
    return time.monotonic() - process.begun


def trial(kind: Kind, folder: Path, prepared: Path | None, seconds: float, draw: random.Random) -> tuple[int, str]:
    """How often it was killed, and the first fault that was found."""
    if prepared is not None:
        shutil.copytree(prepared, folder)
    folder.mkdir(exist_ok=True)
    output = folder.parent / f"{folder.name}.txt"
    kills = 0
    while True:
        process = Process(kind.command(folder), output)
        status = process.wait(draw.uniform(0.05, 1) * seconds) if kills < MOST_KILLS else process.wait()
        if status is None:
            kills += 1
            if not process.kill(draw):
                return kills, "a process stays alive"
        elif status != 0:
            return kills, f"ends with status {status}: {output.read_text()[-1000:]}"
        else:
            return kills, ""


def trials() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=7, help="of every kind")
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows = [["kind", "trials", "kills", "that differ"]]
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only:
            kind, below = KINDS[name], (options.folder or Path(temporary)) / name.replace(" ", "_").replace(",", "")
            whole, prepared = below / "whole", None
            whole.mkdir(parents=True)
            if kind.before is not None:
                end(kind.before(whole), below / "before.txt")
                prepared = below / "prepared"
                shutil.copytree(whole, prepared)
            seconds = end(kind.command(whole), below / "whole.txt")
            count, mine = 0, []
            for index in range(options.trials):
                folder = below / str(index)
                kills, fault = 0, ""
                while not (kills or fault):  # one that ended before it could be killed is none
                    shutil.rmtree(folder, ignore_errors=True)
                    kills, fault = trial(kind, folder, prepared, seconds, draw)
                found = [fault] if fault else kind.differ(whole, folder)
                count += kills
                mine += [f"{name}, trial {index}: {'; '.join(found)[:1000]}"] if found else []
                print(f"{name}, trial {index}: {kills} kills, {'differs' if found else 'equal'}", file=sys.stderr)
            faults += mine
            rows.append([name, str(options.trials), str(count), str(len(mine))])
    print(grid(rows))
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(trials())
