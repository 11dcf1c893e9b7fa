"""Runs the rounds to their end, on the server's machine: python deploy/run.py

Waits until the SuperLink is there, registers the public keys of all sites (keys/Boston.pub as Boston), and starts the
server's app: that of this folder, or APP, such as one that Flower Hub has signed.
If the app is killed, alone or with the SuperLink, this script starts it again, and the run continues from its last
checkpoint. If the app is running already, because only this script had ended, the script watches it. Exit status: 0
after the run has finished, else 1: it has failed (runs/status.json gives the reason), was stopped, did not begin in
three attempts, or the SuperLink did not start the app within five minutes.

    python deploy/run.py stop        # end the run, which python deploy/run.py continues
    python deploy/run.py register    # only: wait for the SuperLink, and register the keys
"""

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
KEYS = Path(os.environ.get("KEYS", HOME / "keys"))
STATUS = Path(os.environ.get("STATUS", HOME / "runs" / "status.json"))
SUPERLINK = os.environ.get("SUPERLINK", "127.0.0.1:8000")
FLOWER = Path(os.environ.setdefault("FLWR_HOME", str(HOME / ".flwr")))
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
NAME = "federation"  # of the SuperLink, in Flower's own file
ALIVE = ("pending", "starting", "running")  # Flower's words
WAITING_SECONDS = (1, 2, 4, 8, 15, 30, 60, 60, 60, 60)  # between looks whether the app has started
MAX_FAILED_STARTS = 3


def configure() -> None:
    """Tell `flwr` where the SuperLink is."""
    FLOWER.mkdir(exist_ok=True)
    settings = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{SUPERLINK}"\n'
    (FLOWER / "config.toml").write_text(
        f'{settings}root-certificates = "{KEYS.resolve() / "ca.pem"}"\n'
    )


def is_ready() -> bool:
    """Return whether the SuperLink answers."""
    try:
        context = ssl.create_default_context(cafile=KEYS / "ca.pem")
        urllib.request.urlopen(f"https://{SUPERLINK}/health", timeout=5, context=context).close()
    except OSError as error:
        print(f"the SuperLink at {SUPERLINK} is not there: {error}", flush=True)
        return False
    return True


def register() -> None:
    """Wait for the SuperLink, and register the sites' public keys."""
    while not is_ready():
        time.sleep(2)
    configure()
    keys = sorted(KEYS.glob("*.pub"))
    for key in keys:
        process = subprocess.run(
            ["flwr", "supernode", "register", key, NAME, "--name", key.stem],
            capture_output=True,
            text=True,
            check=False,
        )
        output = " ".join((process.stdout + process.stderr).split())
        if process.returncode and "already in use" not in output:
            sys.exit(f"{key} could not be registered: {output}")
    names = ", ".join(key.stem for key in keys) or f"none, since there is no {KEYS}/*.pub"
    print(f"registered: {names}", flush=True)


def read_status() -> dict[str, str]:
    """Return the run's status, which the server's app writes. It is empty before the first run."""
    return json.loads(STATUS.read_text(encoding="utf-8")) if STATUS.is_file() else {}


def write_status(word: str, run: str) -> None:
    """Write the run's status in place of the server's app, which is not running."""
    STATUS.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    status = {"status": word, "since": now, "why": None, "run": run}
    new_file = STATUS.with_suffix(".new")
    new_file.write_text(json.dumps(status, indent=1))
    new_file.replace(STATUS)  # whoever reads finds the one or the other, never a half


def flwr(*words: str | Path) -> dict:
    """Run a command of Flower and return its answer, empty if there is none. Print the output of a failed command."""
    process = subprocess.run(
        ["flwr", *words, "--format", "json"], capture_output=True, text=True, check=False
    )
    first_brace = process.stdout.find("{")  # Flower may print lines before it
    reply = {}
    if first_brace >= 0:
        reply = json.loads(process.stdout[first_brace:])
    if not reply.get("success"):
        print(process.stdout + process.stderr, flush=True)
    return reply


def state_of(run: str) -> str:
    """Return Flower's status of a run, such as running or finished:stopped, or "" if the SuperLink does not know it."""
    for known_run in flwr("list", NAME).get("runs", []):
        if known_run["run-id"] == run:
            return known_run["status"]
    return ""


def start() -> str:
    """Start the server's app, and return the run's id, or "" if Flower refuses it."""
    app = os.environ.get("APP", HOME)
    run = flwr("run", app, NAME).get("run-id", "")
    has_begun = read_status().get("run", "") == run
    if not has_begun:
        write_status("starting", run)
    return run


def wait_for_start(run: str) -> None:
    """Wait until the SuperLink has started the run's app, and end this script if it never does."""
    num_seconds = 0
    for seconds in WAITING_SECONDS:
        if state_of(run) != "pending":
            return
        print(
            f"run {run}: waiting for the SuperLink to start the server's app ({num_seconds} s)",
            flush=True,
        )
        time.sleep(seconds)
        num_seconds += seconds
    if state_of(run) == "pending":
        sys.exit(
            f"the SuperLink has not started the server's app of run {run} within {num_seconds} s. Its process "
            "flower-superexec, which starts apps, has probably ended: start deploy/superlink.sh again, and this script "
            "again, which goes on with the run"
        )


def run_to_the_end() -> int:
    """Start the run, or watch it, until it has ended. Return the exit status."""
    register()
    run = read_status().get("run", "")
    num_failed_starts = 0
    is_first_attempt = True
    while num_failed_starts < MAX_FAILED_STARTS:
        if state_of(run) in ALIVE:
            print(f"run {run} is at work: it is watched", flush=True)
        else:
            if not is_first_attempt:
                print("the run has been ended from outside: it is started again", flush=True)
            run = start()
        is_first_attempt = False
        watch(run)
        state = state_of(run)
        if state in ALIVE:  # its log was cut off
            continue
        exit_status = report_end(run, state)
        if exit_status is not None:
            return exit_status
        if read_status()["status"] == "starting":
            num_failed_starts += 1
        else:
            num_failed_starts = 0
    print("the server's app has not begun, three times: what it prints above says why", flush=True)
    return 1


def watch(run: str) -> None:
    """Print the run's log until it ends, and wait until the SuperLink is there."""
    if run:
        wait_for_start(run)
        subprocess.run(["flwr", "log", run, NAME, "--stream"], check=False)
    time.sleep(5)
    register()


def report_end(run: str, state: str) -> int | None:
    """Print how the run has ended, and return the exit status, or None if the run is to be started again."""
    if state == "finished:stopped":
        write_status("stopped", run)
        print("the run was stopped: python deploy/run.py goes on with it", flush=True)
        return 1
    status = read_status()
    if status["status"] not in ("finished", "failed"):
        return None
    print(f"the run has {status['status']}: {status['why'] or STATUS}", flush=True)
    return 0 if status["status"] == "finished" else 1


def stop() -> int:
    """Stop the run that is at work. Return the exit status."""
    configure()
    run = read_status().get("run", "")
    is_alive = state_of(run) in ALIVE
    if not is_alive or not flwr("stop", run, NAME).get("success"):
        print("no run is at work here", flush=True)
        return 1
    write_status("stopped", run)
    return 0


if __name__ == "__main__":
    commands = {"register": register, "stop": stop}
    command = commands.get("".join(sys.argv[1:]), run_to_the_end)
    sys.exit(command())
