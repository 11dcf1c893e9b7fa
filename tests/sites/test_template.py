"""The files by which an operator runs a federation: their own linters accept them, and Flower knows what they say."""

import io
import json
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "flsv" / "sites" / "templates" / "flower"
DEPLOY = TEMPLATE / "deploy"
SCRIPTS = {"superlink.sh": "flower-superlink", "supernode.sh": "flower-supernode"}


#: Another ``flwr``, that keeps a book of its runs; EVENTS is what happens in a run while its log is read.
FLWR = """
import json
import pathlib
import sys

folder = pathlib.Path(__file__).parent
book = folder / "book.json"
runs = []
if book.is_file():
    runs = json.loads(book.read_text())


def write_status(word):
    status = {"status": word, "why": None, "run": runs[-1]["run-id"]}
    (folder / "app" / "runs" / "status.json").write_text(json.dumps(status))


def end_run(word):
    runs[-1]["status"] = f"finished:{word}"


command = sys.argv[1]
if command == "log":
    EVENTS
else:
    answer = {"success": True}
    if command == "run":
        runs.append({"run-id": str(len(runs)), "status": "running"})
        answer["run-id"] = runs[-1]["run-id"]
    if command == "list":
        answer["runs"] = runs
    if command == "stop":
        end_run("stopped")
    print("Working ...")
    print(json.dumps(answer))
book.write_text(json.dumps(runs))
"""
#: Runs a script with its arguments. It does not sleep, and whatever address it opens is there.
LAUNCHER = """
import runpy
import ssl
import sys
import time
import urllib.request

time.sleep = lambda seconds: None
ssl.create_default_context = lambda **options: None
urllib.request.urlopen = lambda *arguments, **options: open("/dev/null")

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_deployment(folder, events, *arguments, status_before=""):
    """Run deploy/run.py with another ``flwr``. ``status_before`` is the status of a run 0 that has begun before."""
    app = folder / "app"
    shutil.copytree(TEMPLATE, app)
    flwr = folder / "flwr"
    events_in_branch = textwrap.indent(events, "    ").strip()
    flwr.write_text(f"#!{sys.executable}\n{FLWR.replace('EVENTS', events_in_branch)}")
    flwr.chmod(0o755)

    if status_before:
        (folder / "book.json").write_text(json.dumps([{"run-id": "0", "status": status_before}]))
        (app / "runs").mkdir()
        (app / "runs" / "status.json").write_text('{"status": "running", "why": null, "run": "0"}')

    return subprocess.run(
        [sys.executable, "-c", LAUNCHER, app / "deploy" / "run.py", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        timeout=900,
    )


def read_statuses(folder):
    """Return how all runs stand."""
    runs = json.loads((folder / "book.json").read_text())
    return [run["status"] for run in runs]


#: The server's process fails three times, and the fourth run finishes.
THREE_FAILURES = """
if len(runs) < 4:
    write_status("running")
    end_run("failed")
else:
    write_status("finished")
    end_run("completed")
"""


@pytest.mark.slow
def test_killed_flower_app_is_started_again_until_the_run_finishes(tmp_path):
    process = run_deployment(tmp_path, THREE_FAILURES)

    assert process.returncode == 0, process.stderr
    assert process.stdout.count("started again") == 3
    assert "the run has finished" in process.stdout
    assert read_statuses(tmp_path) == [*["finished:failed"] * 3, "finished:completed"]


@pytest.mark.slow
def test_flower_app_that_fails_to_begin_three_times_is_given_up(tmp_path):
    events = "print('ModuleNotFoundError', flush=True)\nend_run('failed')"

    process = run_deployment(tmp_path, events)

    assert process.returncode == 1, process.stderr
    assert process.stdout.count("ModuleNotFoundError") == 3
    assert process.stdout.count("started again") == 2
    assert "has not begun, three times" in process.stdout
    assert json.loads((tmp_path / "app/runs/status.json").read_text())["status"] == "starting"


def test_running_flower_app_is_watched_and_not_started_again(tmp_path):
    events = "write_status('finished')\nend_run('completed')"

    process = run_deployment(tmp_path, events, status_before="running")

    assert process.returncode == 0, process.stderr
    assert "run 0 is at work: it is watched" in process.stdout
    assert read_statuses(tmp_path) == ["finished:completed"]


@pytest.mark.slow
def test_run_py_ends_if_the_superlink_starts_no_app(tmp_path):
    process = run_deployment(tmp_path, "time.sleep(1000)", status_before="pending")

    assert process.returncode == 1
    assert "run 0: waiting for the SuperLink to start the server's app (60 s)" in process.stdout
    assert "has not started the server's app of run 0 within 300 s" in process.stderr
    assert "flower-superexec, which starts apps, has probably ended" in process.stderr
    assert read_statuses(tmp_path) == ["pending"]


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "events", ["end_run('stopped')", "write_status('failed')\nend_run('stopped')"]
)
def test_stopped_run_is_not_started_again(events, tmp_path):
    process = run_deployment(tmp_path, events, status_before="running")

    assert process.returncode == 1, process.stderr
    assert "the run was stopped" in process.stdout, process.stderr
    assert read_statuses(tmp_path) == ["finished:stopped"]
    assert json.loads((tmp_path / "app/runs/status.json").read_text())["status"] == "stopped"


def test_run_py_stop_ends_a_run_at_work(tmp_path):
    process = run_deployment(tmp_path, "pass", "stop", status_before="running")

    assert process.returncode == 0, process.stderr
    assert read_statuses(tmp_path) == ["finished:stopped"]
    assert json.loads((tmp_path / "app/runs/status.json").read_text())["status"] == "stopped"
    assert "no run is at work here" not in process.stdout


@pytest.mark.flower
def test_flower_bundle_contains_only_the_app(tmp_path):
    """What ``flwr run`` sends to all sites, of a folder in which a run has been."""
    build = pytest.importorskip("flwr.cli.build", reason="needs flwr: make flower")
    folder = tmp_path / "app"
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))

    for name in (
        "runs/run.json",
        "runs/hparams.yaml",
        "sites/Boston/privacy.json",
        "keys/notes.md",
        "costs.yaml",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")

    with zipfile.ZipFile(io.BytesIO(build.build_fab_from_disk(folder))) as bundle:
        names = sorted(bundle.namelist())

    app = [f"fedapp/{name}.py" for name in ("__init__", "federation", "site")]
    assert names == [".info/CONTENT", *app, "pyproject.toml"]


def test_supernode_script_refuses_an_unknown_site_name(tmp_path):
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    process = subprocess.run(
        ["sh", "deploy/supernode.sh"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "SITE": "Bostn"},
        capture_output=True,
        text=True,
    )

    assert process.returncode == 1
    message = "there is no key keys/Bostn: SITE=Bostn must name a site that has one\n"
    assert process.stderr == message


#: Runs deploy/clock.py beside a SuperLink whose clock differs by the first argument.
CLOCK_LAUNCHER = """
import runpy
import ssl
import sys
import time
import urllib.request
from contextlib import nullcontext
from email.utils import formatdate
from types import SimpleNamespace

seconds = float(sys.argv.pop(1))
date = formatdate(time.time() + seconds, usegmt=True)
reply = SimpleNamespace(headers={"Date": date})
ssl.create_default_context = lambda **options: None
urllib.request.urlopen = lambda *arguments, **options: nullcontext(reply)

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def compare_clocks(seconds):
    script = DEPLOY / "clock.py"
    command = [sys.executable, "-c", CLOCK_LAUNCHER, str(seconds), script, "link:443", "ca.pem"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-8, r"clock is [89] s ahead of that of the SuperLink link:443"),
        (3600, "s behind that of"),
    ],
)
def test_clock_that_flower_refuses_is_named_before_the_supernode_starts(seconds, words):
    process = compare_clocks(seconds)

    assert process.returncode == 1
    assert re.search(words, process.stderr)


def test_clock_within_what_flower_accepts_is_no_error():
    process = compare_clocks(0.5)

    assert process.returncode == 0
    assert process.stderr == ""


@pytest.mark.flower
@pytest.mark.parametrize("name", SCRIPTS)
def test_deployment_scripts_use_only_options_that_flower_has(name):
    pytest.importorskip("flwr", reason="needs flwr: make flower")
    process = subprocess.run(
        [Path(sys.executable).parent / SCRIPTS[name], "--help"],
        capture_output=True,
        text=True,
    )
    script = (DEPLOY / name).read_text()
    after_space = r"(?<!\S)--[a-z-]+"
    in_expansion = r"(?<=:\+)--[a-z-]+"  # ${NAME:+--option}
    options = set(re.findall(f"{after_space}|{in_expansion}", script))

    assert len(options) >= 7
    words_of_help = re.findall(r"[\w-]+", process.stdout)
    for option in options:
        assert option in words_of_help


@pytest.mark.flower
def test_nginx_lets_sites_reach_fleet_routes_of_the_superlink_only():
    pytest.importorskip("flwr", reason="needs flwr: make flower")
    from flwr.superlink.main import create_app, iter_route_contexts

    paths = {context.route.path for context in iter_route_contexts(create_app().routes)}
    (let_through,) = re.findall(r"location ~ (\S+) \{", (DEPLOY / "nginx.conf").read_text())
    open_to_all = {path for path in paths if re.search(let_through, path)}
    fleet = {path for path in paths if path.startswith("/v1/fleet/")}

    assert fleet - open_to_all == {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
    assert open_to_all <= fleet
    assert {
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
    } <= paths


#: Another ``nvflare``: its jobs end as ENDS says, one after the other.
NVFLARE = """
import pathlib, sys
book = pathlib.Path(__file__).parent / "submitted"
count = len(book.read_text()) if book.is_file() else 0
if sys.argv[1:] == ["system", "status"]:
    print("CLIENT FQCN\\nBoston Boston\\nLyon   Lyon")
elif sys.argv[1:3] == ["job", "submit"]:
    book.write_text("x" * (count + 1))
    print("Connecting to FLARE ...\\njob_id: 7-a")
else:
    assert sys.argv[1:] == ["job", "monitor", "7-a"]
    print(f"status: RUNNING elapsed_s: 3\\nJob 7-a status: ({ENDS[count - 1]})", file=sys.stderr)
"""


#: The number of times that the script submits a job.
MAX_JOBS = 10


@pytest.mark.fast_rows("outcomes1-stopped-1")
@pytest.mark.parametrize(
    ("outcomes", "status", "expected_code"),
    [
        (["FINISHED:EXECUTION_EXCEPTION", "FINISHED:COMPLETED"], "running", 0),
        (["FINISHED:ABORTED"], "stopped", 1),
        (["FINISHED:EXECUTION_EXCEPTION"], "failed", 1),
        (["FINISHED:EXECUTION_EXCEPTION"] * MAX_JOBS, "running", 1),
    ],
)
def test_job_of_nvflare_is_submitted_again_unless_its_run_has_ended(
    tmp_path, outcomes, status, expected_code
):
    programs = {"nvflare": NVFLARE.replace("ENDS", repr(outcomes)), "sleep": ""}
    for name, code in programs.items():
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\n{code}")
        program.chmod(0o755)
    status_file = tmp_path / "status.json"
    status_file.write_text(json.dumps({"status": status}))
    script = TEMPLATE.with_name("nvflare") / "run.sh"

    log = tmp_path / "log"
    process = subprocess.run(
        ["sh", "-c", f"echo begins; sh {script} Boston Lyon"],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "STATUS": str(status_file)},
    )

    assert process.returncode == expected_code, log.read_text()
    assert (tmp_path / "submitted").read_text() == "x" * len(outcomes)
    expected_lines = ["begins"]
    for outcome in outcomes:
        expected_lines.append("status: RUNNING elapsed_s: 3")
        expected_lines.append(f"Job 7-a status: ({outcome})")
        expected_lines.append(status_file.read_text())
    assert log.read_text().splitlines() == expected_lines
