"""The lines by which pages install flsv bring a torch that fits what is built against it."""

import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower()


def is_built_against_torch(package: str) -> bool:
    """Return whether an installed package is torch, or needs torch and has compiled files."""
    if package == "torch":
        return True
    distribution = importlib.metadata.distribution(package)
    required_packages = set()
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            required_packages.add(name_of(requirement))
    suffixes = {file.suffix for file in distribution.files or []}
    has_compiled_files = bool(suffixes & {".so", ".pyd"})
    return has_compiled_files and "torch" in required_packages


def installing_lines(page: Path) -> list[list[str]]:
    """Return the arguments of ``pip install`` in a page's first block of commands."""
    text = page.read_text()
    _, _, after_heading = text.partition("```bash\n")
    first_block, _, _ = after_heading.partition("```")
    lines = []
    for line in first_block.splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["pip", "install"]:
            lines.append(words[2:])
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_built_against_torch_comes_from_the_index_of_torch(page):
    """Of two indexes come builds for two kinds of devices, and the second does not load with the first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dependencies = set(map(name_of, settings["project"]["dependencies"]))
    built_against_torch = set(filter(is_built_against_torch, dependencies))
    assert {"torch", "torchvision"} <= built_against_torch

    first_line, *other_lines = installing_lines(page)
    index_option = first_line.index("--index-url")
    packages = set(first_line[:index_option])

    assert built_against_torch <= packages
    assert other_lines == [["-e", "."]]
