"""Runs the rounds to their end, on the server's machine: python deploy/run.py

Waits until the SuperLink is there, registers the public keys of all sites (keys/Boston.pub as Boston), and starts the
server's app: that of this folder, or APP, such as one that Flower Hub has signed.
Where that is ended from outside (killed, stopped, with the SuperLink), it starts it again, and it goes on from its last
checkpoint. Ends with 0 when the run has finished, and with 1 when it has failed (runs/status.json says why) or its app
has three times not begun at all.

    python deploy/run.py register    # only: wait for the SuperLink, and register the keys
"""

import json
import os
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
KEYS = Path(os.environ.get("KEYS", HOME / "keys"))
STATUS = Path(os.environ.get("STATUS", HOME / "runs" / "status.json"))
SUPERLINK = os.environ.get("SUPERLINK", "127.0.0.1:8000")
FLOWER = Path(os.environ.setdefault("FLWR_HOME", str(HOME / ".flwr")))
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
NAME = "federation"  # of the SuperLink, in Flower's own file


def configure() -> None:
    """Tell `flwr` where the SuperLink is."""
    FLOWER.mkdir(exist_ok=True)
    told = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{SUPERLINK}"\n'
    (FLOWER / "config.toml").write_text(f'{told}root-certificates = "{KEYS.resolve() / "ca.pem"}"\n')


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
    for key in sorted(KEYS.glob("*.pub")):
        done = subprocess.run(
            ["flwr", "supernode", "register", key, NAME, "--name", key.stem], capture_output=True, text=True
        )
        said = " ".join((done.stdout + done.stderr).split())
        if done.returncode and "already in use" not in said:
            sys.exit(f"{key} could not be registered: {said}")


def status() -> dict[str, str]:
    return json.loads(STATUS.read_text()) if STATUS.is_file() else {}


def run() -> int:
    not_begun = 0
    while not_begun < 3:
        before = status()
        register()
        subprocess.run(["flwr", "run", os.environ.get("APP", HOME), NAME, "--stream"], check=False)
        now = status()
        if now != before and now["status"] in ("finished", "failed"):
            print(f"the run has {now['status']}: {now['why'] or STATUS}", flush=True)
            return 0 if now["status"] == "finished" else 1
        not_begun = not_begun + 1 if now == before else 0
        print("the run has been ended from outside: it is started again", flush=True)
        time.sleep(5)
    print("the server's app has not begun, three times: what it prints above says why", flush=True)
    return 1


if __name__ == "__main__":
    if sys.argv[1:] == ["register"]:
        register()
    else:
        sys.exit(run())
