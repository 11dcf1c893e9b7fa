"""Trains modules of public packages in a federation and by hand, and says which come to the same.

    python tools/public_projects.py [NAME ...] [--folder runs/public] [--out TABLE.md]

The projects stand in ``public_projects.yaml``, their modules in ``public_kinds.py``. What a project needs beside
flsv's own environment is installed, without its dependencies, into a folder of its own below ``--folder``. Each is
trained twice, in a process of its own, by two clients for two rounds: by flsv, and by the loop of
``tests/compat/by_hand.py``, a Lightning Trainer per client and round and a mean of state dicts. Equal: the clients'
models of the first round are the same to the bit, and the global model of the last round to the tolerance of the
kind. Takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from common import grid

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE)]
FILE = HERE / "public_projects.yaml"
FIELDS = {"kind", "about", "install", "not_run"}
#: Distributions whose versions the page names where a project installs nothing.
THERE = {"torchvision": "torchvision", "timm": "timm", "transformers": "transformers", "peft": "peft"}
THERE |= {"torchmetrics": "torchmetrics", "Lightning": "lightning"}


def projects() -> dict[str, dict[str, Any]]:
    """By name.

    Raises:
        ValueError: the file says something that a project does not have.
    """
    found = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for name, each in found.items():
        if each.keys() - FIELDS or ("kind" in each) == ("not_run" in each):
            raise ValueError(f"{FILE}: {name} has {sorted(each)}: expected kind or not_run, and about and install.")
    return found


def one(name: str) -> dict[str, Any]:
    """Train a project twice, in this process: ``outcome`` is "equal", "refused" or "not equal", ``why`` in words."""
    import public_kinds
    from compat.runs import both

    from flsv import ConfigurationError

    try:
        kind = getattr(public_kinds, projects()[name]["kind"])()
    except ImportError as error:
        return {"outcome": "not run", "why": f"cannot be imported here: {error}"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            pair = both(kind, Path(folder))
        except ConfigurationError as error:
            return {"outcome": "refused", "why": str(error)}
        try:
            pair.check()
        except AssertionError as error:
            return {"outcome": "not equal", "why": str(error).splitlines()[0]}
    found, expected = pair.module.state_dict(), pair.expected.state_dict()
    apart = max(
        float((found[n].double() - value.double()).abs().max()) for n, value in expected.items() if len(value.shape)
    )
    return {"outcome": "equal", "why": "to the bit" if apart == 0 else f"to {apart:.0e}"}


def run(name: str, project: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What comes of a project, in a process and with an installation of its own."""
    if "not_run" in project:
        return {"outcome": "not run", "why": project["not_run"]}
    place = folder.resolve() / project["kind"]
    if project.get("install") and not place.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
        done = subprocess.run([*command, *project["install"]], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"outcome": "not run", "why": f"cannot be installed here: {done.stderr.strip().splitlines()[-1]}"}
    path = os.pathsep.join([str(HERE.parent), str(place), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, "--one", name],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"outcome": "failed", "why": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def versions(name: str, project: Mapping[str, Any]) -> str:
    """What was run, by version."""
    if project.get("install"):
        return ", ".join(pin.replace("==", " ") for pin in project["install"])
    try:
        distribution = THERE[name.partition(",")[0]]
        return f"{distribution} {version(distribution)}"
    except (KeyError, PackageNotFoundError):
        return ""


ORDER = ("equal", "refused", "not equal", "failed", "not run")


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """What came of each, by outcome, and how many there are of each outcome."""
    known, rows = projects(), [["project", "what is trained", "version", "result"]]
    for name, each in sorted(results.items(), key=lambda item: ORDER.index(item[1]["outcome"])):
        cells = [name, known[name].get("about", ""), versions(name, known[name]), f"{each['outcome']}: {each['why']}"]
        rows.append([" ".join(cell.split()).replace("|", "\\|") for cell in cells])
    count = {outcome: sum(each["outcome"] == outcome for each in results.values()) for outcome in ORDER}
    return f"{grid(rows)}\n\n{', '.join(f'{number} {outcome}' for outcome, number in count.items() if number)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 where a project is not equal, or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="projects; default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/public"), help="of what is installed for them")
    parser.add_argument("--out", type=Path, help="write the table there, too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    known = projects()
    if strange := [name for name in options.names if name not in known]:
        parser.error(f"there is no project {', '.join(strange)}: expected some of {', '.join(known)}")
    results = {}
    for name in options.names or known:
        results[name] = run(name, known[name], options.folder)
        print(f"{name}: {results[name]['outcome']}, {results[name]['why']}", file=sys.stderr, flush=True)
    text = table(results)
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return int(any(each["outcome"] in ("not equal", "failed") for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
