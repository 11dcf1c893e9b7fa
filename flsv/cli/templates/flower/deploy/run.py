"""Runs the rounds to their end, on the server's machine: python deploy/run.py

Waits until the SuperLink is there, registers the public keys of all sites (keys/Boston.pub as Boston), and starts the
server's app: that of this folder, or APP, such as one that Flower Hub has signed.
If the app is killed, alone or with the SuperLink, this script starts it again, and the run continues from its last
checkpoint. If the app is running already, because only this script had ended, the script watches it. Exit status: 0
after the run has finished, else 1: it has failed (runs/status.json gives the reason), was stopped, or did not begin in
three attempts.

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


def configure() -> None:
    """Tell `flwr` where the SuperLink is."""
    FLOWER.mkdir(exist_ok=True)
    settings = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{SUPERLINK}"\n'
    (FLOWER / "config.toml").write_text(
        f'{settings}root-certificates = "{KEYS.resolve() / "ca.pem"}"\n'
    )


def ready() -> bool:
    try:
        context = ssl.create_default_context(cafile=KEYS / "ca.pem")
        urllib.request.urlopen(f"https://{SUPERLINK}/health", timeout=5, context=context).close()
    except OSError as error:
        print(f"the SuperLink at {SUPERLINK} is not there: {error}", flush=True)
        return False
    return True


def register() -> None:
    while not ready():
        time.sleep(2)
    configure()
    keys = sorted(KEYS.glob("*.pub"))
    for key in keys:
        process = subprocess.run(
            ["flwr", "supernode", "register", key, NAME, "--name", key.stem],
            capture_output=True,
            text=True,
        )
        output = " ".join((process.stdout + process.stderr).split())
        if process.returncode and "already in use" not in output:
            sys.exit(f"{key} could not be registered: {output}")
    names = ", ".join(key.stem for key in keys) or f"nobody, there is no {KEYS}/*.pub"
    print(f"registered: {names}", flush=True)


def status() -> dict[str, str]:
    return json.loads(STATUS.read_text()) if STATUS.is_file() else {}


def say(word: str, run: str) -> None:
    """Write the run's status into the file in place of the server's app, which is not running."""
    STATUS.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    whole = STATUS.with_suffix(".new")  # whoever reads finds the one or the other
    whole.write_text(json.dumps({"status": word, "since": now, "why": None, "run": run}, indent=1))
    whole.replace(STATUS)


def flwr(*words: str | Path) -> dict:
    """Run a command of Flower and return its answer, empty if there is none. Print the output of a failed command."""
    done = subprocess.run(["flwr", *words, "--format", "json"], capture_output=True, text=True)
    _, _, content = done.stdout.partition("{")
    reply = json.loads(f"{{{content or '}'}")
    if not reply.get("success"):
        print(done.stdout + done.stderr, flush=True)
    return reply


def state(run: str) -> str:
    """Return Flower's status of a run, such as running or finished:stopped, or "" if the SuperLink does not know it."""
    runs = flwr("list", NAME).get("runs", [])
    return next((each["status"] for each in runs if each["run-id"] == run), "")


def start() -> str:
    run = flwr("run", os.environ.get("APP", HOME), NAME).get("run-id", "")
    if status().get("run", "") != run:  # its app has not begun yet
        say("starting", run)
    return run


def run() -> int:
    register()
    run, not_begun, again = status().get("run", ""), 0, False
    while not_begun < 3:
        if state(run) in ALIVE:
            print(f"run {run} is at work: it is watched", flush=True)
        else:
            if again:
                print("the run has been ended from outside: it is started again", flush=True)
            run = start()
        again = True
        if run:
            subprocess.run(["flwr", "log", run, NAME, "--stream"], check=False)
        time.sleep(5)
        register()
        found, now = state(run), status()
        if found in ALIVE:  # its log was cut off
            continue
        if found == "finished:stopped":
            say("stopped", run)
            print("the run was stopped: python deploy/run.py goes on with it", flush=True)
            return 1
        if now["status"] in ("finished", "failed"):
            print(f"the run has {now['status']}: {now['why'] or STATUS}", flush=True)
            return 0 if now["status"] == "finished" else 1
        not_begun = not_begun + 1 if now["status"] == "starting" else 0
    print("the server's app has not begun, three times: what it prints above says why", flush=True)
    return 1


def stop() -> int:
    configure()
    run = status().get("run", "")
    is_alive = state(run) in ALIVE
    if not is_alive or not flwr("stop", run, NAME).get("success"):
        print("no run is at work here", flush=True)
        return 1
    say("stopped", run)
    return 0


if __name__ == "__main__":
    sys.exit({"register": register, "stop": stop}.get("".join(sys.argv[1:]), run)())
