"""The files by which an operator runs a federation: their own linters accept them, and Flower knows what they say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).parents[2] / "flsv" / "engines" / "flower_template"
DEPLOY = TEMPLATE / "deploy"
UNITS = sorted(path.name for path in DEPLOY.glob("*.service"))
SCRIPTS = {"superlink.sh": "flower-superlink", "supernode.sh": "flower-supernode"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for each in UNITS:
        here = (DEPLOY / each).read_text().replace("/srv/federation/.venv/bin/python", sys.executable)
        (tmp_path / each).write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / each for each in UNITS)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def flwr_of(folder: Path, script: str) -> subprocess.CompletedProcess:
    """deploy/run.py with another ``flwr``, and a SuperLink that is there."""
    shutil.copytree(TEMPLATE, folder / "app")
    flwr = folder / "flwr"
    flwr.write_text(f"#!{sys.executable}\nimport json, pathlib, sys\nif sys.argv[1] == 'run':\n{script}\n")
    flwr.chmod(0o755)
    code = "import runpy, sys, time; sys.argv = ['run.py']; time.sleep = lambda _: None; import urllib.request as u; "
    code += (
        "import ssl; ssl.create_default_context = lambda **_: None; u.urlopen = lambda *_, **__: open('/dev/null'); "
    )
    code += f"runpy.run_path({str(folder / 'app/deploy/run.py')!r}, run_name='__main__')"
    env = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)


def test_a_run_that_is_ended_goes_on_to_its_end(tmp_path: Path) -> None:
    done = flwr_of(tmp_path, """
    status = pathlib.Path(sys.argv[2]) / "runs" / "status.json"
    status.parent.mkdir(exist_ok=True)
    times = json.loads(status.read_text())["since"] + 1 if status.is_file() else 0
    said = {"status": "finished" if times == 5 else "running", "since": times, "why": None}
    status.write_text(json.dumps(said))""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("started again") == 5
    assert "the run has finished" in done.stdout


def test_an_app_that_never_begins_is_given_up(tmp_path: Path) -> None:
    done = flwr_of(tmp_path, "    print('ModuleNotFoundError', flush=True)")
    assert done.returncode == 1
    assert done.stdout.count("ModuleNotFoundError") == 3
    assert "has not begun, three times" in done.stdout


@pytest.mark.flower
@pytest.mark.parametrize("name", SCRIPTS)
def test_flower_knows_every_option(name: str) -> None:
    pytest.importorskip("flwr", reason="needs pip install 'flsv[flower]'")
    known = subprocess.run([Path(sys.executable).parent / SCRIPTS[name], "--help"], capture_output=True, text=True)
    options = set(re.findall(r"(?<!\S)--[a-z-]+|(?<=:\+)--[a-z-]+", (DEPLOY / name).read_text()))
    assert len(options) >= 7
    assert sorted(each for each in options if not re.search(rf"(?<![\w-]){each}(?![\w-])", known.stdout)) == []


@pytest.mark.flower
def test_sites_reach_what_they_need_of_the_superlink_and_nothing_else() -> None:
    pytest.importorskip("flwr", reason="needs pip install 'flsv[flower]'")
    from flwr.superlink.main import create_app, iter_route_contexts

    paths = {context.route.path for context in iter_route_contexts(create_app().routes)}
    (let_through,) = re.findall(r"location ~ (\S+) \{", (DEPLOY / "nginx.conf").read_text())
    open_to_all = {path for path in paths if re.search(let_through, path)}
    fleet = {path for path in paths if path.startswith("/v1/fleet/")}
    assert fleet - open_to_all == {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
    assert open_to_all <= fleet
    assert {"/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"} <= paths
