"""The lessons run, are short, and are notebooks and pages with what their cells print and draw."""

import json
import re
from pathlib import Path
from typing import Any

import docs_render
import pytest

lessons = pytest.mark.parametrize("path", docs_render.LESSONS, ids=lambda path: path.stem)


def notebook_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]


def without_numbers(cell: dict[str, Any]) -> list[Any]:
    """Return what a cell says and which outputs it has: other machines may round and draw otherwise."""
    words = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        words.append(sorted(data))
        text = output.get("text", data.get("text/plain", ""))
        words.append(re.sub(r"[-\d.]+ *", "#", "".join(text)))

    return [cell["cell_type"], "".join(cell["source"]), words]


@lessons
def test_notebook_has_the_lessons_cells_and_is_below_200_kb(path):
    jupytext = pytest.importorskip("jupytext", reason="flsv[docs] is not installed")
    expected = [cell.source for cell in jupytext.read(path).cells]

    cells = notebook_of(path)

    texts = ["".join(cell["source"]) for cell in cells]
    assert texts == expected, "run make notebooks"
    assert path.with_suffix(".ipynb").stat().st_size < 200_000


@lessons
def test_page_of_a_notebook_shows_all_its_pictures(path):
    num_pictures = 0
    for cell in notebook_of(path):
        for output in cell.get("outputs", []):
            num_pictures += "image/png" in output.get("data", {})

    assert num_pictures > 0
    assert docs_render.page(path).count("data:image/png") == num_pictures


@pytest.mark.by_turn
@pytest.mark.slow
@lessons
def test_notebook_has_the_outputs_that_the_lesson_gives_now(path):
    nbformat = pytest.importorskip("nbformat", reason="flsv[docs] is not installed")
    ran = docs_render.run(path)

    assert ran.cells[0].source.startswith("# ")
    assert any(cell.get("outputs") for cell in ran.cells)

    cells = json.loads(nbformat.writes(ran))["cells"]
    expected = notebook_of(path)

    assert [*map(without_numbers, cells)] == [*map(without_numbers, expected)]
