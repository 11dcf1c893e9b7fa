"""What `make release` asks before it builds, on a small repository; and that released sections stay as they were."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from release import ROOT, changed_sections, problems, sections

OLD = "- The first.\n"


def write(root: Path, version: str = "1.1", date: str = "2026-02-01", unreleased: str = "", old: str = OLD) -> None:
    (root / "flsv").mkdir(exist_ok=True)
    (root / "flsv" / "__init__.py").write_text(f'"""Federated."""\n\n__version__ = "{version}"\n')
    (root / "pyproject.toml").write_text('[project.urls]\nRepository = "https://example.org/flsv"\n')
    (root / "CITATION.cff").write_text(f'title: x\nversion: {version}\ndate-released: "{date}"\n')
    (root / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [Unreleased]\n\n{unreleased}\n## [{version}] - {date}\n\n- More.\n\n"
        f"## [1.0] - 2026-01-01\n\n{old}"
    )


def git(root: Path, *command: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(root), *name, *command], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Version 1.0 is tagged, 1.1 is ready."""
    git(tmp_path, "init", "-q")
    write(tmp_path, version="1.0", date="2026-01-01")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n## [1.0] - 2026-01-01\n\n{OLD}")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "1.0")
    git(tmp_path, "tag", "v1.0")
    write(tmp_path)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "1.1")
    return tmp_path


def test_what_is_ready_has_no_problem(repository: Path) -> None:
    assert problems(repository) == []
    git(repository, "tag", "v1.1")
    assert problems(repository, "v1.1") == []
    assert [problem.split(" ")[0] for problem in problems(repository)] == ["v1.1"]  # tagged already


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"unreleased": "- A thing.\n"}, "[Unreleased] is missing or not empty"),
        ({"old": "- The first, and something that was not in it.\n"}, "the section of 1.0 is not that of its tag"),
        ({"old": ""}, "the section of 1.0 is not that of its tag"),
    ],
)
def test_a_changelog_that_is_not_ready(repository: Path, change: dict[str, str], said: str) -> None:
    write(repository, **change)
    git(repository, "commit", "-qam", "more")
    (problem,) = problems(repository)
    assert said in problem


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("CHANGELOG.md", "[1.1] - 2026-02-01", "[1.1]", "no section with a date for 1.1"),
        ("CITATION.cff", "2026-02-01", "2026-02-02", "expected 1.1 and 2026-02-01"),
        ("CITATION.cff", "version: 1.1", "version: 1.0", "expected 1.1 and"),
        ("pyproject.toml", "Repository", "Homepage", "no [project.urls] Repository"),
    ],
)
def test_files_that_do_not_agree(repository: Path, file: str, old: str, new: str, said: str) -> None:
    path = repository / file
    path.write_text(path.read_text().replace(old, new))
    assert any("Not everything is committed" in problem for problem in problems(repository))
    git(repository, "commit", "-qam", "more")
    assert any(said in problem for problem in problems(repository))
    assert not any("committed" in problem for problem in problems(repository))


def test_a_tag_of_another_version(repository: Path) -> None:
    assert "tag v1.1" in problems(repository, "v1.2")[0]


def test_released_sections_of_this_changelog_are_those_of_their_tags() -> None:
    """Vacuous in a copy without tags; the hosted workflows fetch them."""
    assert changed_sections(ROOT) == []


def test_this_changelog_is_in_order() -> None:
    told = sections((ROOT / "CHANGELOG.md").read_text())
    (first, (date, _)), *others = told.items()
    assert (first, date) == ("Unreleased", None)
    dates = [date for _, (date, _) in others]
    assert None not in dates
    assert dates == sorted(dates, reverse=True)
    # The rest, such as a repository and what is not released yet, is for the release.
    found = [problem for problem in problems(ROOT) if problem.startswith(("CITATION", "CHANGELOG"))]
    assert [problem for problem in found if "[Unreleased]" not in problem] == []
