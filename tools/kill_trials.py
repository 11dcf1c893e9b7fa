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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas

from flsv import read_run
from flsv.cli import main as run_flsv

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from helpers.forked import Forked, processes  # noqa: E402
from helpers.runs import find_differences  # noqa: E402

STOPS = ROOT / "docs" / "results" / "stops.csv"
MOST_KILLS = 3
MAX_SECONDS_TO_END = 10.0
#: Until a killed run's other processes have to be gone. A run one of whose coalitions is killed goes on with the
#: others, so a whole run's seconds are added.
PATIENCE_S = 30.0

BATCHES = ["--trainer.limit_train_batches=8", "--trainer.enable_progress_bar=false"]
RANKS = ["--trainer.strategy=federated", "--trainer.devices=2"]
#: The arguments of flsv, by the folder that it writes to.
Command = Callable[[Path], list[str]]


def fit(config: str, *options: str) -> Command:
    """Return the command of a fit that goes on from its last checkpoint, where it has one."""

    def command(folder: Path) -> list[str]:
        arguments = ["fit", "--config", config, *options, *BATCHES]
        arguments.append(f"--trainer.default_root_dir={folder}")
        if any(folder.rglob("last.ckpt")):
            arguments.append("--ckpt_path=last")
        return arguments

    return command


def six_rounds(*options: str) -> Command:
    return fit("digits", "--trainer.max_epochs=6", *options)


def retrain(folder: Path) -> list[str]:
    return ["retrain", str(first_run(folder)), "--rounds=2", "--trainings=singles"]


def repeat(folder: Path) -> list[str]:
    options = ["--trainer.max_epochs=2", "--data.splits.seed=0", *BATCHES]
    return ["repeat", "3", "--config=digits", f"--out={folder / 'repeat'}", *options]


def report(folder: Path) -> list[str]:
    return ["report", str(first_run(folder))]


def first_run(folder: Path) -> Path:
    """Return the folder of the run whose folder has the others."""
    return next(folder.rglob("run.json")).parent


def newest(folder: Path, name: str) -> Path:
    return max(folder.rglob(name), key=lambda path: path.stat().st_mtime_ns)


def differences_of_fits(whole: Path, resumed: Path) -> list[str]:
    """Compare the newest checkpoint and run of both folders: a fit without a round left saves no checkpoint."""
    checkpoints = newest(whole, "last.ckpt").parent
    resumed_checkpoints = newest(resumed, "last.ckpt").parent
    differences = find_differences(checkpoints, resumed_checkpoints)

    values = read_run(newest(whole, "run.json").parent)
    if not values.equals(read_run(newest(resumed, "run.json").parent)):
        differences.append("values")
    for path in checkpoints.parent.rglob("in_run_values.csv"):
        resumed_path = resumed_checkpoints.parent / path.relative_to(checkpoints.parent)
        if path.read_bytes() != resumed_path.read_bytes():
            differences.append(path.name)
    return differences


def differences_of_tables(whole: Path, resumed: Path) -> list[str]:
    """Compare repeat.csv, which is there, without columns of seconds."""
    (path,) = whole.rglob("repeat.csv")
    resumed_path = resumed / path.relative_to(whole)
    if resumed_path.is_file() and _without_seconds(path).equals(_without_seconds(resumed_path)):
        return []
    return [path.name]


def _without_seconds(path: Path) -> pandas.DataFrame:
    return pandas.read_csv(path, usecols=lambda column: "second" not in column)


class Kind(NamedTuple):
    """A command, what differs between two folders that it has written, and what runs before, undisturbed, in each."""

    command: Command
    differences: Callable[[Path, Path], list[str]] = differences_of_fits
    preparation: Command | None = None


KINDS = {
    "one process": Kind(six_rounds()),
    "two ranks": Kind(six_rounds(*RANKS)),
    "in-run values": Kind(six_rounds("--config=in_run_shapley")),
    "shadow coalitions": Kind(six_rounds("--config=shadow")),
    "shadow, two ranks": Kind(six_rounds("--config=shadow", *RANKS)),
    "vmap": Kind(six_rounds("--federation.engine=vmap")),
    "retrain": Kind(retrain, differences_of_tables, six_rounds()),
    "repeat": Kind(repeat, differences_of_tables),
}


# ---- kills


def try_kills(name: str, kind: Kind, trials: int, draw: random.Random, below: Path) -> int:
    """Run a command undisturbed, then kill it in each trial. Return how many trials ended with a difference."""
    prepared = below / name / "prepared"
    prepared.mkdir(parents=True)
    output = below / name / "output.txt"
    temporary_files = Path(tempfile.mkdtemp(dir=below))
    if kind.preparation is not None:
        run_undisturbed(kind.preparation(prepared), output, temporary_files)
    whole = below / name / "whole"
    shutil.copytree(prepared, whole)
    seconds = run_undisturbed(kind.command(whole), output, temporary_files)

    num_differing = 0
    for index in range(trials):
        folder = below / name / str(index)
        kills = 0
        fault = ""
        while not kills and not fault:  # a command that ended before it could be killed is no trial
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(prepared, folder)
            kills, fault = trial(kind.command, folder, output, temporary_files, seconds, draw)
        if not fault:
            left_behind = [*temporary_files.iterdir(), *folder.rglob(".coalitions*")]
            differences = [*kind.differences(whole, folder), *map(str, left_behind)]
            fault = "; ".join(differences)[:1000]
        num_differing += bool(fault)
        print(f"{name}, trial {index}: {kills} kills, {fault or 'equal'}", flush=True)
    return num_differing


def trial(
    command: Command,
    folder: Path,
    output: Path,
    temporary_files: Path,
    seconds: float,
    draw: random.Random,
) -> tuple[int, str]:
    """Return how often a command was killed until it ended, and the first fault that was found."""
    for kills in range(MOST_KILLS + 1):
        process = start(command(folder), output, temporary_files)
        printed_before = output.stat().st_size
        limit = draw.uniform(0.05, 1) * seconds if kills < MOST_KILLS else None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            if not kill(process, draw, seconds):
                return kills + 1, f"a process stays alive: {output.read_text('utf-8')[-3000:]}"
            printed = output.read_bytes()[printed_before:]
            has_lost_values = b"there are no values" in printed  # killed while coalitions trained
            if process.returncode == 0 and not has_lost_values:
                return kills + 1, ""
        else:
            if status == 0:
                return kills, ""
            return kills, f"ends with status {status}: {output.read_text('utf-8')[-1000:]}"
    raise AssertionError("the last start has no limit")


def start(arguments: list[str], output: Path, temporary_files: Path) -> subprocess.Popen[bytes]:
    """Start flsv with these arguments, as the leader of its own session."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(temporary_files),
    }
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "flsv", *arguments],
            stdout=file,
            stderr=file,
            cwd=output.parent,
            env=environment,
            start_new_session=True,
        )


def run_undisturbed(arguments: list[str], output: Path, temporary_files: Path) -> float:
    """Return the seconds of a command that must succeed."""
    begin = time.monotonic()
    if start(arguments, output, temporary_files).wait():
        raise SystemExit(output.read_text(encoding="utf-8"))
    return time.monotonic() - begin


def kill(process: subprocess.Popen[bytes], draw: random.Random, seconds: float) -> bool:
    """Kill one process of a session. Return whether all are gone soon after."""
    number = draw.choice([signal.SIGKILL, signal.SIGTERM])
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(sorted(processes(process.pid)) or [process.pid]), number)

    end = time.monotonic() + PATIENCE_S + seconds
    while process.poll() is None or processes(process.pid):
        if time.monotonic() > end:
            os.killpg(process.pid, signal.SIGABRT)  # says where it is
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
        time.sleep(0.1)
    return True


# ---- one signal


def quickstart(*options: str) -> Command:
    """Fit with TensorBoard, whose writer gets values in every step, as its trials found it waiting."""
    logging = ["--trainer.log_every_n_steps=1", "--trainer.callbacks+", "LearningRateMonitor"]
    return fit("quickstart", *logging, *options)


#: A command that one signal has to end, and what runs before it, undisturbed.
STOPPED: dict[str, tuple[Command, Command | None]] = {
    "fit, then coalitions at once": (quickstart("--trainer.max_epochs=4"), None),
    "coalitions one by one": (
        quickstart("--federation.metrics.value.coalitions=singles", "--trainer.max_epochs=1"),
        None,
    ),
    "report": (report, quickstart("--trainer.max_epochs=2")),
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
    for _ in range(os.cpu_count() or 1):
        multiprocessing.Process(target=spin, daemon=True).start()

    rows = []
    for name, (command, preparation) in STOPPED.items():
        prepared = below / name / "prepared"
        prepared.mkdir(parents=True)
        if preparation is not None:
            Forked(prepared, run_flsv, preparation(prepared)).wait()
        whole = below / name / "whole"
        shutil.copytree(prepared, whole)
        begin = time.monotonic()
        status, output = Forked(whole, run_flsv, command(whole)).wait()
        if status != 0:
            raise SystemExit(output)
        seconds = time.monotonic() - begin
        last_line = output.splitlines()[-1]

        for number in [signal.SIGTERM, signal.SIGINT] * trials:
            took, fault = None, ""
            while took is None:  # a command that ended before its signal is no trial
                folder = below / name / "trial"
                shutil.copytree(prepared, folder)
                process = Forked(folder, run_flsv, command(folder))
                took, fault = stop(process, number, draw.uniform(0.05, 1) * seconds, last_line)
                shutil.rmtree(folder)
            rows.append([name, number.name, f"{took:.1f}", fault.partition(":")[0]])
            print(f"{name}, {number.name}: {took:.1f} s {fault}", flush=True)
    table = pandas.DataFrame(rows, columns=["command", "signal", "seconds until it ended", "fault"])
    table.to_csv(STOPS, index=False)
    return int(table["fault"].ne("").sum())


def stop(
    process: Forked, number: signal.Signals, moment: float, last_line: str
) -> tuple[float | None, str]:
    """Return how long after its signal a process ended, None if it was done before, and the fault that was found."""
    status, _ = process.wait(moment)
    if status is not None:
        return None, ""
    begin = time.monotonic()
    os.kill(process.pid, number)
    status, printed = process.wait(MAX_SECONDS_TO_END)
    took = time.monotonic() - begin
    if status is None:
        os.kill(process.pid, signal.SIGABRT)
        _, printed = process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return took, f"stays alive: {printed[-6000:]}"
    if status == 0 and printed.splitlines()[-1:] == [last_line]:
        return None, ""
    was_interrupted = status == 0 and "interrupted" in printed
    if status == 128 + number or was_interrupted:
        return took, ""
    return took, f"ends with status {status}: {printed[-2000:]}"


def spin() -> None:
    os.nice(19)  # beside other work that keeps the machine busy, these add little
    while True:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5, help="of every kind")
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=KINDS, metavar="KIND")
    parser.add_argument(
        "--stop", type=int, metavar="N", help="N SIGTERMs and N Ctrl-Cs to each command instead"
    )
    options = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        if options.stop:
            num_faults = stop_all(options.stop, draw, Path(folder))
            num_trials = 2 * len(STOPPED) * options.stop
        else:
            num_faults = 0
            for name in options.only:
                num_faults += try_kills(name, KINDS[name], options.trials, draw, Path(folder))
            num_trials = len(options.only) * options.trials
    print(f"{num_faults} of {num_trials} did not end as they should")
    sys.exit(bool(num_faults))
