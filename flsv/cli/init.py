"""``flsv init --flower DIR``: a project to start from."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from flsv.errors import ConfigurationError

_TEMPLATE = Path(__file__).parent.parent / "engines" / "flower" / "template"


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Copy a template into a new folder.

    Args:
        args: the command line, without ``init`` itself.
        quiet: do not say what to do next.

    Raises:
        ConfigurationError: there is something in the folder.
    """
    parser = argparse.ArgumentParser("flsv init", description="A project to start from.")
    parser.add_argument("--flower", metavar="DIR", type=Path, required=True, help="a federation that `flwr run` starts")
    folder = parser.parse_args(args).flower
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty: name a new folder.")
    shutil.copytree(_TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    if not quiet:
        own = f"{folder}/fedapp/federation.py"
        print(f"{folder}/README.md says how to run it; {own} is where your own module and data go.")
