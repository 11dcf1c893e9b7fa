"""The hosted workflows ask for what there is. (Their schemas: `make workflows`.)"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["jobs"]


def commands(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]


def matrix(job: str, key: str) -> list[str]:
    found = jobs(ROOT / ".github" / "workflows" / "ci.yml")[job]["strategy"]["matrix"]
    return found[key] if key in found else [each[key] for each in found["include"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_and_tools_of_workflows_exist(path: Path) -> None:
    made = re.findall(r"^make (.*)$", "\n".join(commands(path)), flags=re.MULTILINE)
    asked = {word for line in made for word in line.split() if re.fullmatch(r"[a-z-]+", word)}
    tools = re.findall(r"tools/\w+\.py", "\n".join(commands(path)))
    assert asked or tools
    assert asked <= TARGETS
    assert all((ROOT / tool).is_file() for tool in tools)


def test_workflows_test_every_python_version_of_the_package() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert matrix("tests", "python") == named
    assert {*matrix("parts", "python"), *matrix("wheels", "python")} <= set(named)


def test_only_the_job_that_publishes_may_sign() -> None:
    """And whatever else asks for more than reading says so itself."""
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
        more = {name for name, job in jobs(path).items() if "permissions" in job}
        assert more <= {"publish"}
