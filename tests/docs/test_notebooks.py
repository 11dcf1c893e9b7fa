"""The lessons run, are short, and become pages and notebooks with what their cells print and draw."""

import json
import time
from pathlib import Path

import docs_render
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("path", docs_render.LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_and_shows_something(path: Path) -> None:
    start = time.process_time()
    ran = docs_render.run(path)
    assert time.process_time() - start < 20  # of the processor: a lesson is no benchmark
    code = [cell for cell in ran if cell.is_code]
    assert not ran[0].is_code
    assert ran[0].text.startswith("# ")
    assert len(code) < len(ran)
    assert any(cell.pictures for cell in code)
    assert any(cell.printed for cell in code)
    made = json.loads(docs_render.notebook(ran))
    assert [cell["cell_type"] for cell in made["cells"]] == ["code" if cell.is_code else "markdown" for cell in ran]
    assert docs_render.page(path, ran).count("data:image/png") == sum(len(cell.pictures) for cell in code)
