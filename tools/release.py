"""A release: what stands between this checkout and it, and what the package index would get: RELEASING.md.

    python tools/release.py check [v1.0.0]      # of the version in flsv/__about__.py; or of this tag; changes nothing
    python tools/release.py wheel [--python python3.12] [--dist dist] [--wheel WHEEL]

``wheel`` builds the sdist, and the wheel from the sdist, checks both (twine, check-wheel-contents), installs the wheel
with its hard dependencies alone into a fresh environment, and runs there, outside of the checkout: ``pip check``, a
fit, its report, its retraining, a valuation before training, and values of a loop of one's own. Needs build, twine and
check-wheel-contents.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEAD = re.compile(
    r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?[ \t]*$", flags=re.MULTILINE
)


def sections(changelog: str) -> dict[str, tuple[str | None, str]]:
    """Every section's date and text by its version, newest first.

    Example:
        >>> sections("# Changelog\\n\\n## [Unreleased]\\n\\n## [1.0] - 2026-01-02\\n\\n- New.\\n")
        {'Unreleased': (None, ''), '1.0': ('2026-01-02', '- New.')}
    """
    heads = [*_HEAD.finditer(changelog)]
    ends = [*(head.start() for head in heads[1:]), len(changelog)]
    return {
        head["version"]: (head["date"], changelog[head.end() : end].strip())
        for head, end in zip(heads, ends)
    }


def git(root: Path, *command: str) -> str | None:
    """What git says; None where it does not know, or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def changed_sections(root: Path) -> list[str]:
    """Versions whose section is not what it was when they were tagged."""
    present = sections((root / "CHANGELOG.md").read_text())
    tags = git(root, "tag", "--list", "v*") or ""
    changed = []
    for tag in tags.split():
        version = tag[1:]
        tagged = sections(git(root, "show", f"{tag}:CHANGELOG.md") or "")
        if version in tagged and tagged[version] != present.get(version):
            changed.append(version)
    return changed


def problems(root: Path, tag: str | None = None) -> list[str]:
    """What has to be done before this is a release; each a sentence.

    Args:
        root: the checkout.
        tag: that is released; None: none yet.
    """
    init = (root / "flsv" / "__about__.py").read_text()
    version = re.findall(r'^__version__ = "(.+)"$', init, flags=re.MULTILINE)[0]
    told = sections((root / "CHANGELOG.md").read_text())
    date = told.get(version, (None, ""))[0]
    citation = dict(
        re.findall(
            r'^(version|date-released): "?([^"\n]+)"?$', (root / "CITATION.cff").read_text(), re.M
        )
    )
    found = []
    if tag is not None and tag != f"v{version}":
        found.append(
            f"The tag {tag} is not that of flsv/__about__.py, which says {version}: tag v{version}."
        )
    if date is None:
        found.append(
            f"CHANGELOG.md has no section with a date for {version}: write ## [{version}] - YYYY-MM-DD."
        )
    if told.get("Unreleased") != (None, ""):
        found.append(
            "CHANGELOG.md: [Unreleased] is missing or not empty: move what it has into the version's section."
        )
    if citation.get("version") != version or citation.get("date-released") != date:
        found.append(
            f"CITATION.cff has version and date {citation}; expected {version} and {date}."
        )
    if not re.search(
        r'^Repository = "https://', (root / "pyproject.toml").read_text(), flags=re.MULTILINE
    ):
        found.append(
            'pyproject.toml has no [project.urls] Repository = "https://...", where links of README.md lead.'
        )
    if git(root, "status", "--porcelain") != "":
        found.append("Not everything is committed (git status).")
    if tag is None and git(root, "rev-parse", "--verify", f"v{version}") is not None:
        found.append(f"v{version} is tagged already: raise __version__ in flsv/__about__.py.")
    found += [
        f"CHANGELOG.md: the section of {each} is not that of its tag: restore it."
        for each in changed_sections(root)
    ]
    return found


# ---- the wheel, installed as a stranger does

#: Of the extras: none of them may be there, or the test would not see that flsv needs it.
EXTRAS = ("peft", "pyarrow", "flwr", "dp_accounting", "pytest", "hypothesis")
FIT = "fit --config quickstart --data.partitioner.init_args.num_clients 3 --trainer.max_epochs 2"
VALUE = "value --config quickstart --out values"
OWN_LOOP = """
import importlib.util, pathlib, sys
import torch, flsv, flsv.models

assert pathlib.Path(flsv.__file__).is_relative_to(sys.prefix), flsv.__file__
print("flsv", flsv.__version__, "on Python", sys.version.split()[0], "with torch", torch.__version__)
there = [name for name in %r if importlib.util.find_spec(name)]
assert not there, f"installed beside the hard dependencies: {there}"
start = {"weight": torch.zeros(1, 1)}
sent = [{"weight": torch.full((1, 1), value)} for value in (1.0, 3.0)]
loader = [(torch.ones(4, 1), torch.ones(4, 1))]
net, loss = torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss
values = flsv.value_round(net, start, sent, loader, loss=loss)
assert flsv.models.build_network("timm:resnet10t", 3, (3, 32, 32)).fc.out_features == 3
# v: -1 of nobody (0), 0 of client 0 (1), -4 of client 1 (3), -1 of both (2).
assert values["PartialFederatedShapley"].tolist() == [2.0, -2.0], values
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run it with nothing of the checkout in its way; its output is shown where it fails."""
    started = time.perf_counter()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
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
        raise SystemExit(
            f"{dist} has {len(wheel)} wheels and {len(sdist)} sdists. One of each is expected: empty it."
        )
    run(sys.executable, "-m", "twine", "check", "--strict", *wheel, *sdist)
    run(Path(sys.executable).parent / "check-wheel-contents", wheel[0])
    print(
        *(
            f"          {path.name}: {path.stat().st_size / 1e6:.2f} MB"
            for path in (*wheel, *sdist)
        ),
        sep="\n",
    )
    return wheel[0]


def use(wheel: Path, python: str, folder: Path) -> None:
    """Install it into an environment of its own in ``folder``, and run it there."""
    run(python, "-m", "venv", folder / "venv")
    binaries = folder / "venv" / "bin"
    venv_python = binaries / "python"
    flsv = binaries / "flsv"
    run(venv_python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    run(venv_python, "-m", "pip", "check", "--disable-pip-version-check")
    outside = folder / "elsewhere"
    outside.mkdir()
    run(venv_python, "-c", OWN_LOOP.strip() % (EXTRAS,), cwd=outside)
    run(flsv, *FIT.split(), "--trainer.default_root_dir", "runs", cwd=outside)
    (run_folder,) = (outside / "runs" / "lightning_logs").iterdir()
    run(flsv, "retrain", run_folder, cwd=outside)
    run(flsv, "report", run_folder, cwd=outside)
    run(flsv, *VALUE.split(), cwd=outside)
    expected_files = (
        run_folder / "contributions.csv",
        run_folder / "retrained/repeat.csv",
        run_folder / "report.html",
        outside / "values/valuation.csv",
    )
    if missing := [str(path.relative_to(outside)) for path in expected_files if not path.is_file()]:
        raise SystemExit(f"missing after these commands: {missing}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("check", "wheel"))
    parser.add_argument("tag", nargs="?", help="that is released")
    parser.add_argument("--python", default=sys.executable, help="of the fresh environment")
    parser.add_argument("--dist", type=Path, help="where wheel and sdist stay; by default nowhere")
    parser.add_argument("--wheel", type=Path, help="test this one, build none")
    asked = parser.parse_args()
    if asked.what == "check":
        found = problems(ROOT, asked.tag)
        print(*found, sep="\n", file=sys.stderr)
        raise SystemExit(f"{len(found)} things to do before a release." if found else 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = (asked.wheel or build(asked.dist or folder / "dist")).absolute()
        use(wheel, asked.python, folder)
    print("the wheel works")


if __name__ == "__main__":
    main()
