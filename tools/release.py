"""What has to be done before this checkout is a release: RELEASING.md.

    python tools/release.py             of the version in flsv/__about__.py
    python tools/release.py v1.0.0      of this tag

prints a sentence for each thing, and changes nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEAD = re.compile(
    r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?[ \t]*$", flags=re.MULTILINE
)


def sections(changelog: str) -> dict[str, tuple[str | None, str]]:
    """Return each section's date and text by its version, newest first.

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
    """Return what git says; None where it does not know, or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def changed_sections(root: Path) -> list[str]:
    """Return versions whose section is not what it was when they were tagged."""
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
    """Return what has to be done before this is a release, each a sentence.

    Args:
        root: the checkout.
        tag: that is released; None: none yet.
    """
    init = (root / "flsv" / "__about__.py").read_text()
    version = re.findall(r'^__version__ = "(.+)"$', init, flags=re.MULTILINE)[0]
    told = sections((root / "CHANGELOG.md").read_text())
    date = told.get(version, (None, ""))[0]
    citation = (root / "CITATION.cff").read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text()).get("project", {})
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
    if f"\nversion: {version}\n" not in citation or f'date-released: "{date}"' not in citation:
        found.append(f"CITATION.cff: version and date-released: expected {version} and {date}.")
    if "Repository" not in project.get("urls", {}):
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tag", nargs="?", help="that is released")
    todo = problems(ROOT, parser.parse_args().tag)
    print(*todo, sep="\n", file=sys.stderr)
    sys.exit(f"{len(todo)} things to do before a release." if todo else 0)
