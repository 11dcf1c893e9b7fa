"""The version, which is read before anything is imported."""

import os
import subprocess
from functools import cache
from pathlib import Path

__version__ = "3.0.0"
_PACKAGE = Path(__file__).parent
#: The file with the commit in a package that was built from a checkout: hatch_build.py.
COMMIT_FILE = _PACKAGE / "commit.txt"


@cache
def code_version() -> str:
    """Return the version of this code: of a release ``3.0.0``, of another commit ``3.0.0+g1e773190``.

    With changes that are not committed it ends in ``.dirty``.
    """
    commit = commit_of_code()
    return f"{__version__}+{commit}" if commit else __version__


def commit_of_code() -> str:
    """Return the commit of this code as ``g1e773190``, or an empty text if it is a release."""
    checkout = _PACKAGE.parent
    if (checkout / ".git").exists():
        return _commit_of(checkout)
    if COMMIT_FILE.is_file():
        return COMMIT_FILE.read_text(encoding="utf-8").strip()
    return ""


def _commit_of(checkout: Path) -> str:
    tag = f"v{__version__}"
    command = ["git", "describe", "--always", "--tags", f"--match={tag}"]
    command += ["--abbrev=8", "--dirty=.dirty"]
    # Variables of a hook of git may name another repository.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # git would wait for, or block, another of its commands
    try:
        process = subprocess.run(
            command,
            check=False,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"  # there is no git
    if process.returncode:
        return "unknown"

    # 1e773190 without the tag, v3.0.0-2-g1e773190 after it, v3.0.0 at it.
    described = process.stdout.strip()
    if described == tag:
        return ""
    if described == f"{tag}.dirty":
        return "dirty"
    return f"g{described.rpartition('-g')[2]}"
