"""What the package index would get, installed as a stranger does: `make wheel-test`.

    python tools/wheel_test.py [--python python3.12] [--dist dist] [--wheel WHEEL]

Builds the sdist, and the wheel from the sdist, checks both (twine, check-wheel-contents), installs the wheel with its
hard dependencies alone into a fresh environment, and runs there, outside of the checkout: ``pip check``, a fit, its
report, its retraining, a valuation before training, and values of a loop of one's own. Needs build, twine and
check-wheel-contents.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Of the extras: none of them may be there, or the test would not see that flsv needs it.
EXTRAS = ("timm", "peft", "pyarrow", "flwr", "dp_accounting", "pytest", "hypothesis")
FIT = "fit --config quickstart --data.partitioner.init_args.num_clients 3 --trainer.max_epochs 2"
VALUE = "value --config quickstart --out values"
OWN_LOOP = """
import importlib.util, pathlib, sys
import torch, flsv

assert pathlib.Path(flsv.__file__).is_relative_to(sys.prefix), flsv.__file__
print("flsv", flsv.__version__, "on Python", sys.version.split()[0], "with torch", torch.__version__)
there = [name for name in %r if importlib.util.find_spec(name)]
assert not there, f"installed beside the hard dependencies: {there}"
start = {"weight": torch.zeros(1, 1)}
sent = [{"weight": torch.full((1, 1), value)} for value in (1.0, 3.0)]
loader = [(torch.ones(4, 1), torch.ones(4, 1))]
net, loss = torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss
values = flsv.value_round(net, start, sent, loader, loss=loss)
# v: -1 of nobody (0), 0 of client 0 (1), -4 of client 1 (3), -1 of both (2).
assert values["PartialFederatedShapley"].tolist() == [2.0, -2.0], values
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run it with nothing of the checkout in its way; its output is shown where it fails."""
    started = time.perf_counter()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    shown = " ".join(Path(part).name if isinstance(part, Path) else part for part in command)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"failed ({done.returncode}): {shown}")
    print(f"{time.perf_counter() - started:6.1f} s  {shown.splitlines()[0]}", flush=True)


def build(dist: Path) -> Path:
    """Build and check both; the wheel's path."""
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
    wheel, sdist = [*dist.glob("*.whl")], [*dist.glob("*.tar.gz")]
    if len(wheel) != 1 or len(sdist) != 1:
        raise SystemExit(f"{dist} has {len(wheel)} wheels and {len(sdist)} sdists. One of each is expected: empty it.")
    run(sys.executable, "-m", "twine", "check", "--strict", *wheel, *sdist)
    run(Path(sys.executable).parent / "check-wheel-contents", wheel[0])
    print(*(f"          {path.name}: {path.stat().st_size / 1e6:.2f} MB" for path in (*wheel, *sdist)), sep="\n")
    return wheel[0]


def use(wheel: Path, python: str, folder: Path) -> None:
    """Install it into an environment of its own in ``folder``, and run it there."""
    run(python, "-m", "venv", folder / "venv")
    own = folder / "venv" / "bin"
    run(own / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    run(own / "python", "-m", "pip", "check", "--disable-pip-version-check")
    place = folder / "elsewhere"
    place.mkdir()
    run(own / "python", "-c", OWN_LOOP.strip() % (EXTRAS,), cwd=place)
    run(own / "flsv", *FIT.split(), "--trainer.default_root_dir", "runs", cwd=place)
    (fitted,) = (place / "runs" / "lightning_logs").iterdir()
    run(own / "flsv", "retrain", fitted, cwd=place)
    run(own / "flsv", "report", fitted, cwd=place)
    run(own / "flsv", *VALUE.split(), cwd=place)
    made = (
        fitted / "contributions.csv",
        fitted / "retrained.csv",
        fitted / "report.html",
        place / "values/valuation.csv",
    )
    if missing := [str(path.relative_to(place)) for path in made if not path.is_file()]:
        raise SystemExit(f"missing after these commands: {missing}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of the fresh environment")
    parser.add_argument("--dist", type=Path, help="where wheel and sdist stay; by default nowhere")
    parser.add_argument("--wheel", type=Path, help="test this one, build none")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = (asked.wheel or build(asked.dist or folder / "dist")).absolute()
        use(wheel, asked.python, folder)
    print("the wheel works")


if __name__ == "__main__":
    main()
