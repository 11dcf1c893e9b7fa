"""What stands between this checkout and a release: `make release` asks it first, and the hosted workflow with the tag.

    python tools/release.py          # of the version in flsv/__init__.py, before it is tagged
    python tools/release.py v1.0.0   # of this tag

It changes nothing. RELEASING.md has the steps.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEAD = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?[ \t]*$", flags=re.MULTILINE)


def sections(changelog: str) -> dict[str, tuple[str | None, str]]:
    """Every section's date and text by its version, newest first.

    Example:
        >>> sections("# Changelog\\n\\n## [Unreleased]\\n\\n## [1.0] - 2026-01-02\\n\\n- New.\\n")
        {'Unreleased': (None, ''), '1.0': ('2026-01-02', '- New.')}
    """
    heads = [*_HEAD.finditer(changelog)]
    ends = [*(head.start() for head in heads[1:]), len(changelog)]
    return {head["version"]: (head["date"], changelog[head.end() : end].strip()) for head, end in zip(heads, ends)}


def git(root: Path, *command: str) -> str | None:
    """What git says; None where it does not know, or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def changed_sections(root: Path) -> list[str]:
    """Versions whose section is not what it was when they were tagged."""
    now = sections((root / "CHANGELOG.md").read_text())
    found = []
    for tag in (git(root, "tag", "--list", "v*") or "").split():
        then = sections(git(root, "show", f"{tag}:CHANGELOG.md") or "")
        if tag[1:] in then and then[tag[1:]] != now.get(tag[1:]):
            found.append(tag[1:])
    return found


def problems(root: Path, tag: str | None = None) -> list[str]:
    """What has to be done before this is a release; each a sentence.

    Args:
        root: the checkout.
        tag: that is released; None: none yet.
    """
    init = (root / "flsv" / "__init__.py").read_text()
    version = re.findall(r'^__version__ = "(.+)"$', init, flags=re.MULTILINE)[0]
    told = sections((root / "CHANGELOG.md").read_text())
    date = told.get(version, (None, ""))[0]
    citation = dict(re.findall(r'^(version|date-released): "?([^"\n]+)"?$', (root / "CITATION.cff").read_text(), re.M))
    found = []
    if tag is not None and tag != f"v{version}":
        found.append(f"The tag {tag} is not that of flsv/__init__.py, which says {version}: tag v{version}.")
    if date is None:
        found.append(f"CHANGELOG.md has no section with a date for {version}: write ## [{version}] - YYYY-MM-DD.")
    if told.get("Unreleased") != (None, ""):
        found.append("CHANGELOG.md: [Unreleased] is missing or not empty: move what it has into the version's section.")
    if citation.get("version") != version or citation.get("date-released") != date:
        found.append(f"CITATION.cff has version and date {citation}; expected {version} and {date}.")
    if not re.search(r'^Repository = "https://', (root / "pyproject.toml").read_text(), flags=re.MULTILINE):
        found.append('pyproject.toml has no [project.urls] Repository = "https://...", where links of README.md lead.')
    if git(root, "status", "--porcelain") != "":
        found.append("Not everything is committed (git status).")
    if tag is None and git(root, "rev-parse", "--verify", f"v{version}") is not None:
        found.append(f"v{version} is tagged already: raise __version__ in flsv/__init__.py.")
    found += [
        f"CHANGELOG.md: the section of {each} is not that of its tag: restore it." for each in changed_sections(root)
    ]
    return found


def main() -> None:
    found = problems(ROOT, sys.argv[1] if len(sys.argv) > 1 else None)
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        raise SystemExit(f"{len(found)} things to do before a release.")


if __name__ == "__main__":
    main()
