"""The commands by which pages install flsv work with any index of packages."""

import re
from pathlib import Path

import pytest

from helpers import pages

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_COMMANDS = [["pip", "install", "-e", "."], ["flsv", "fit", "--config", "quickstart"]]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_first_line_of_a_first_page_installs_flsv_and_runs_the_quickstart(name):
    block = pages.blocks_of_page((ROOT / name).read_text())[0]
    first_line, *_ = block.text.splitlines()

    assert pages.split_commands(first_line) == FIRST_COMMANDS


def test_no_command_of_a_page_needs_a_certain_index():
    """Where pip reaches a private index only, such a command ends in an error."""
    commands = []
    for page in PAGES:
        commands += pages.commands_of(pages.blocks_of_page(page.read_text()))

    assert FIRST_COMMANDS[0] in commands
    assert [command for command in commands if "--index-url" in command] == []


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_what_is_built_against_torch_comes_from_the_index_of_torch(name):
    """Of two indexes come builds for two kinds of devices, and the second does not load with the first."""
    (packages,) = re.findall(r"`pip install ([\w ]+) --index-url ", (ROOT / name).read_text())

    assert packages.split() == ["torch", "torchvision"]


def test_nothing_that_users_read_installs_flsv_from_the_package_index():
    """Nobody owns its name there, so that a stranger's package would be installed."""
    advice = re.compile(r"pip install(?: +-[-\w]+)* +['\"]?flsv(?![-\w/])[^\n]*")
    files = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "configs").rglob("*.*")]
    files += [path for path in (ROOT / "flsv").rglob("*.*") if path.suffix != ".pyc"]
    found = []
    for file in files:
        if file.is_file():
            found += advice.findall(file.read_text(encoding="utf-8", errors="ignore"))

    assert found == []
    assert advice.findall("pip install --force-reinstall flsv.\npip install 'flsv[flower]'")
