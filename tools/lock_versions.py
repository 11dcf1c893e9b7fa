"""The versions that pip would install for flsv[dev,docs] today, as constraints: `make constraints`.

    python tools/lock_versions.py > constraints.txt

Nothing is installed. The versions are those of this Python and this system; another Python may need others.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ASKED = ".[dev,docs]"
_PIP = (sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", ASKED)


def constraints(report: dict[str, Any]) -> list[str]:
    """``name==version`` of all but flsv itself, sorted, from pip's report.

    Example:
        >>> packages = [{"name": "Torch", "version": "2.4.0+cpu"}, {"name": "flsv", "version": "1.0"}]
        >>> constraints({"install": [{"metadata": package} for package in packages]})
        ['torch==2.4.0']
    """
    found = {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in report["install"]}
    # A local version (+cpu) is of one index only.
    return [f"{name}=={version.partition('+')[0]}" for name, version in sorted(found.items()) if name != "flsv"]


def main() -> None:
    report = json.loads(subprocess.run(_PIP, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)
    version = ".".join(platform.python_version_tuple()[:2])
    place = f"Python {version}, {platform.system()} {platform.machine()}"
    print(f"# flsv{ASKED[1:]} on {place}. `make constraints` makes it; to have the same versions:")
    print("#   PIP_CONSTRAINT=$PWD/constraints.txt make install")
    print(*constraints(report), sep="\n")


if __name__ == "__main__":
    main()
