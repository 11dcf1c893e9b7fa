"""Kill -9, or SIGTERM, at random moments: does the resumed run end as if nothing had been?

    python tools/kill_trials.py                    # five trials of each kind
    python tools/kill_trials.py --trials 2 --only retrain "two ranks"
    python tools/kill_trials.py --stop 30          # SIGTERM and Ctrl-C: does the command end soon?

Every kind is a command as a user types it, which runs once undisturbed. In every trial one of its processes is killed
or terminated one to three times after a random share of that time, and the command is started again until it ends.
Last checkpoints, ``contributions.csv`` and tables must be bitwise identical, but for paths, batch counters and
seconds. A process that lives on for half a minute is a difference, and so are status 0 of a command that has not done
all, and a temporary file or folder that is left.

With ``--stop`` every command of `STOPPED` runs in forks of a process that has imported flsv already, so that a trial is
short. Each gets one signal at a random moment of its time, and has to end within ten seconds with the signal's status,
or with that of a run whose coalitions were interrupted. As many further processes as there are cores keep the machine
busy. The seconds of every trial are written to docs/results/stops.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import faulthandler
import importlib
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
from pathlib import Path
from typing import Any

import pandas

from flsv import read_run
from flsv.cli import main as run_flsv

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from helpers.forked import Forked  # noqa: E402
from helpers.runs import find_differences  # noqa: E402

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
BATCHES = ("--trainer.limit_train_batches", "8", "--trainer.enable_progress_bar", "false")
SHORT = ("--config", "digits", "--trainer.max_epochs", "2", *BATCHES)
KEPT: dict[str, Any] = {"usecols": lambda name: "second" not in name}
Command = Callable[[Path], list[str]]
STOPS = ROOT / "docs" / "results" / "stops.csv"
MAX_SECONDS_TO_END = 10.0
MOST_KILLS, PATIENCE = 3, 30.0  # seconds until a killed run's other processes have to be gone
# A run one of whose coalitions is killed goes on with the others, so a whole run's seconds are added.


def fit(*more: str) -> Command:
    """Return the command of a fit of six rounds that goes on from its last checkpoint, where it has one."""
    given = (
        "--config",
        "digits",
        "--trainer.max_epochs",
        "6",
        *more,
        *BATCHES,
        "--trainer.default_root_dir",
    )
    return lambda f: [
        "fit",
        *given,
        str(f),
        *(("--ckpt_path", "last") if list(f.rglob("last.ckpt")) else ()),
    ]


def fits_differ(whole: Path, again: Path) -> list[str]:
    """Compare the newest checkpoint and run of both folders: a fit without a round left saves no checkpoint."""
    mine, theirs = (newest(f, "last.ckpt").parent for f in (again, whole))
    same = read_run(newest(again, "run.json").parent).equals(
        read_run(newest(whole, "run.json").parent)
    )
    samples = [path.relative_to(theirs.parent) for path in theirs.parent.rglob("in_run_values.csv")]
    same &= all(
        (mine.parent / path).read_bytes() == (theirs.parent / path).read_bytes() for path in samples
    )
    return find_differences(theirs, mine) + ([] if same else ["values"])


def newest(folder: Path, name: str) -> Path:
    return max(folder.rglob(name), key=lambda path: path.stat().st_mtime_ns)


def tables_differ(whole: Path, again: Path) -> list[str]:
    """Compare tables anywhere below, without columns of seconds."""
    found = [path for path in whole.rglob("*.csv") if path.stem in ("retrained", "repeat")]
    pairs = [(path, again / path.relative_to(whole)) for path in found]
    same = [
        o.is_file() and pandas.read_csv(path, **KEPT).equals(pandas.read_csv(o, **KEPT))
        for path, o in pairs
    ]
    return [] if same and all(same) else ["tables"]


RANKS, DEALT = (
    ("--trainer.strategy", "federated", "--trainer.devices", "2"),
    ("--data.splits.seed", "0"),
)
RETRAIN = ("--rounds", "2", "--trainings", "singles")
#: A command, by the folder that it writes to; how two such folders differ; what runs first, undisturbed, in each.
KINDS: dict[str, tuple[Command, Callable[[Path, Path], list[str]], Command | None]] = {
    "one process": (fit(), fits_differ, None),
    "two ranks": (fit(*RANKS), fits_differ, None),
    "in-run values": (fit("--config", "in_run_shapley"), fits_differ, None),
    "shadow coalitions": (fit("--config", "shadow"), fits_differ, None),
    "shadow, two ranks": (fit("--config", "shadow", *RANKS), fits_differ, None),
    "vmap": (fit("--federation.engine", "vmap"), fits_differ, None),
    "retrain": (
        lambda f: ["retrain", str(next(f.rglob("run.json")).parent), *RETRAIN],
        tables_differ,
        fit(),
    ),
    "repeat": (
        lambda f: ["repeat", "3", *SHORT, *DEALT, "--out", str(f / "repeat")],
        tables_differ,
        None,
    ),
}


#: A fit with TensorBoard, whose writer gets values in every step, as its trials found it waiting.
LOGGING = ("--trainer.log_every_n_steps", "1", "--trainer.callbacks+", "LearningRateMonitor")
ONE_BY_ONE = ("--federation.metrics.value.coalitions", "singles", "--trainer.max_epochs", "1")


def quickstart(*more: str) -> Command:
    given = ("--config", "quickstart", *LOGGING, *BATCHES, *more, "--trainer.default_root_dir")
    return lambda f: ["fit", *given, str(f)]


#: A command that one signal has to end, by the folder that it writes to, and what runs before it, undisturbed.
STOPPED: dict[str, tuple[Command, Command | None]] = {
    "fit, then coalitions at once": (quickstart("--trainer.max_epochs", "4"), None),
    "coalitions one by one": (quickstart(*ONE_BY_ONE), None),
    "report": (
        lambda f: ["report", str(next(f.rglob("run.json")).parent)],
        quickstart("--trainer.max_epochs", "2"),
    ),
}
#: What these commands import, once for all trials.
IMPORTED = (
    "flsv.cli.parser",
    "flsv.payment.command",
    "flsv.retraining.coalitions",
    "flsv.vmap.coalition_rows",
    "torch.utils.tensorboard",
)


def stop_all(trials: int, draw: random.Random, below: Path) -> int:
    """Send signals to every command of STOPPED. Return how many did not end it as they should."""
    faulthandler.enable()  # a process that stays alive says where it is
    for module in IMPORTED:
        importlib.import_module(module)
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in busy:
        process.start()
    faults = 0
    rows = [("command", "signal", "seconds until it ended", "fault")]
    for name, (command, before) in STOPPED.items():
        whole, prepared = below / name / "whole", below / name / "prepared"
        prepared.mkdir(parents=True)
        if before is not None:
            Forked(prepared, run_flsv, before(prepared)).wait()
        shutil.copytree(prepared, whole)
        begun = time.monotonic()
        status, output = Forked(whole, run_flsv, command(whole)).wait()
        if status != 0:
            raise SystemExit(output)
        seconds = time.monotonic() - begun
        for number in (signal.SIGTERM, signal.SIGINT):
            for index in range(trials):
                took, fault = None, ""
                while took is None:  # a command that ended before its signal is no trial
                    folder = below / name / f"{number.name}{index}"
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.copytree(prepared, folder)
                    process = Forked(folder, run_flsv, command(folder))
                    moment = draw.uniform(0.05, 1) * seconds
                    took, fault = stop(process, number, moment, last_line=output.splitlines()[-1])
                shutil.rmtree(folder)
                faults += bool(fault)
                rows.append((name, number.name, f"{took:.1f}", fault.partition(":")[0]))
                print(f"{name}, {number.name} {index}: {took:.1f} s {fault}", flush=True)
    with STOPS.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return faults


def stop(
    process: Forked, number: signal.Signals, moment: float, last_line: str
) -> tuple[float | None, str]:
    """Return how long after its signal a process ended, None if it was done before, and the fault that was found."""
    status, _ = process.wait(moment)
    if status is not None:
        return None, ""
    begun = time.monotonic()
    os.kill(process.pid, number)
    status, printed = process.wait(MAX_SECONDS_TO_END)
    took = time.monotonic() - begun
    if status is None:
        os.kill(process.pid, signal.SIGABRT)
        _, printed = process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return took, f"stays alive: {printed[-6000:]}"
    if status == 0 and printed.splitlines()[-1:] == [last_line]:
        return None, ""
    was_stopped = status == 128 + number or (status == 0 and "interrupted" in printed)
    return took, "" if was_stopped else f"ends with status {status}: {printed[-2000:]}"


def spin() -> None:
    os.nice(19)  # beside other work that keeps the machine busy, these add little
    while True:
        pass


def start(arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """Start ``flsv`` with these arguments, as the leader of its own session."""
    command = [sys.executable, "-m", "flsv", *arguments]
    with output.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, cwd=output.parent, env=ENV, start_new_session=True
        )


def alive(session: int) -> list[int]:
    """Return the processes of a session, also where its leader is gone."""
    found = map(
        str.split, subprocess.check_output(["ps", "-eo", "pid=,sid=,stat="], text=True).splitlines()
    )
    return sorted(int(pid) for pid, own, state in found if int(own) == session and state[0] != "Z")


def kill(process: subprocess.Popen[bytes], draw: random.Random, seconds: float) -> bool:
    """Kill one of its processes. Return whether all are gone soon after."""
    with contextlib.suppress(ProcessLookupError):
        number = draw.choice((signal.SIGKILL, signal.SIGTERM))
        os.kill(draw.choice(alive(process.pid) or [process.pid]), number)
    end = time.monotonic() + PATIENCE + seconds
    while process.poll() is None or alive(process.pid):
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGABRT)  # says where it is
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
        time.sleep(0.1)
    return True


def trial(
    command: Command, folder: Path, output: Path, seconds: float, draw: random.Random
) -> tuple[int, str]:
    """Return how often it was killed until it ended, and the first fault that was found."""
    kills = 0
    while True:
        process, before = start(command(folder), output), output.stat().st_size
        try:
            status = process.wait(draw.uniform(0.05, 1) * seconds if kills < MOST_KILLS else None)
            printed = output.read_text(encoding="utf-8")[-1000:]
            return kills, "" if status == 0 else f"ends with status {status}: {printed}"
        except subprocess.TimeoutExpired:
            kills += 1
            if not kill(process, draw, seconds):
                printed = output.read_text(encoding="utf-8")[-3000:]
                return kills, f"a process stays alive: {printed}"
            lost = (
                b"there are no values" in output.read_bytes()[before:]
            )  # ended while coalitions were trained
            if process.returncode == 0 and not lost:  # it was done, or says so
                return kills, ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5, help="of every kind")
    parser.add_argument(
        "--only", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND"
    )
    parser.add_argument(
        "--stop", type=int, metavar="N", help="N SIGTERMs and N Ctrl-Cs to each command instead"
    )
    options = parser.parse_args()
    draw, differing = random.Random(0), 0
    with tempfile.TemporaryDirectory() as below:
        if options.stop:
            faults = stop_all(options.stop, draw, Path(below))
            print(f"{faults} of {2 * len(STOPPED) * options.stop} did not end as they should")
            raise SystemExit(bool(faults))
        for name in options.only:
            command, differ, before = KINDS[name]
            whole, prepared, output = (
                Path(below, name, each) for each in ("whole", "prepared", "output.txt")
            )
            whole.mkdir(parents=True)
            ENV["TMPDIR"] = tempfile.mkdtemp(dir=below)
            failed = before and start(before(whole), output).wait()
            shutil.copytree(whole, prepared)
            begun = time.monotonic()
            if failed or start(command(whole), output).wait():
                raise SystemExit(output.read_text(encoding="utf-8"))
            seconds = time.monotonic() - begun
            for index in range(options.trials):
                kills, fault, folder = 0, "", whole.with_name(str(index))
                while not (kills or fault):  # one that ended before it could be killed is none
                    shutil.rmtree(folder, ignore_errors=True)
                    kills, fault = trial(
                        command, shutil.copytree(prepared, folder), output, seconds, draw
                    )
                left = [
                    str(path)
                    for path in [*Path(ENV["TMPDIR"]).iterdir(), *folder.rglob(".coalitions*")]
                ]
                found = fault or "; ".join(differ(whole, folder) + left)[:1000]
                differing += bool(found)
                print(f"{name}, trial {index}: {kills} kills, {found or 'equal'}", flush=True)
    print(f"{differing} of {len(options.only) * options.trials} differ")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
