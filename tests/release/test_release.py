"""What `make release` asks before it builds, on a small repository; and that released sections stay as they were."""

import subprocess

import pytest
import yaml
from release import ROOT, changed_sections, problems

FILES = {
    "flsv/__about__.py": '"""Federated."""\n\n__version__ = "{version}"\n',
    "pyproject.toml": '[project.urls]\nRepository = "https://example.org/flsv"\n',
    "CITATION.cff": 'title: x\nversion: {version}\ndate-released: "{date}"\n',
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n{new}## [1.0] - 2026-01-01\n\n- The first.\n",
}


def commit_versions(root, words, **versions):
    if versions:
        for name, text in FILES.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text.format(**versions))

    run_git(root, "add", "-A")
    run_git(root, "commit", "-qm", words)


def run_git(root, *command):
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(root), *name, *command], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """Version 1.0 is tagged, 1.1 is ready."""
    run_git(tmp_path, "init", "-q")
    commit_versions(tmp_path, "1.0", version="1.0", date="2026-01-01", new="")
    run_git(tmp_path, "tag", "v1.0")
    commit_versions(
        tmp_path,
        "1.1",
        version="1.1",
        date="2026-02-01",
        new="## [1.1] - 2026-02-01\n\n- More.\n\n",
    )

    return tmp_path


def test_repository_ready_for_release_has_no_problem(repository):
    assert problems(repository) == []
    assert "tag v1.1" in problems(repository, "v1.2")[0]
    run_git(repository, "tag", "v1.1")
    assert problems(repository, "v1.1") == []
    assert [problem.split(" ")[0] for problem in problems(repository)] == ["v1.1"]  # tagged already


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("CHANGELOG.md", "- The first.", "- The first, and more.", "is not that of its tag"),
        ("CHANGELOG.md", "[1.1] - 2026-02-01", "[1.1]", "no section with a date for 1.1"),
        ("CITATION.cff", "2026-02-01", "2026-02-02", "expected 1.1 and 2026-02-01"),
        ("pyproject.toml", "Repository", "Homepage", "no [project.urls] Repository"),
    ],
)
def test_release_with_an_unready_file_names_the_problem(repository, file, old, new, message):
    path = repository / file
    path.write_text(path.read_text().replace(old, new))

    assert any("Not everything is committed" in problem for problem in problems(repository))

    commit_versions(repository, "more")
    assert any(message in problem for problem in problems(repository))
    assert not any("committed" in problem for problem in problems(repository))


def test_released_changelog_sections_are_unchanged_since_their_tags():
    """Vacuous in a copy without tags; the hosted workflows fetch them."""
    assert changed_sections(ROOT) == []


def test_only_the_job_that_publishes_may_sign():
    """And whatever else asks for more than reading says so itself."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        signing_jobs = {name for name, job in workflow["jobs"].items() if "permissions" in job}
        assert signing_jobs <= {"publish"}
