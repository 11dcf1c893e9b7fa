"""The lines by which pages install flsv bring a torch that fits what is built against it."""

import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]


def installing_lines(page):
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
    first_line, *other_lines = installing_lines(page)
    index_option = first_line.index("--index-url")

    assert {"torch", "torchvision"} <= set(first_line[:index_option])
    assert other_lines == [["-e", "."]]
