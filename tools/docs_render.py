"""How the site shows code: lessons, which are Python files with cells, as notebooks and pages; and metrics' pictures.

    python tools/docs_render.py      # or make notebooks

runs each lesson and writes the notebook beside it, from which the site makes a page. jupytext reads the cells, and
nbclient runs them.
"""

from __future__ import annotations

import argparse
import doctest
import importlib
import inspect
import io
import json
import os
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def run(path: Path) -> Any:
    """Run a lesson in an empty folder, and return it as a notebook, without warnings and what Lightning says of
    devices and seeds; raises what a cell raises."""
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(path)
    # No line is broken.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, resources=resources, record_timing=False, coalesce_streams=True
        )
        client.execute(env=environment)
    # What differs from run to run is left out, such as a picture's address as text.
    notebook.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                del output.data["text/plain"]
    return notebook


def page(path: Path) -> str:
    """Return a lesson's notebook as Markdown."""
    out = []
    for cell in json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        out.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                out.append(
                    f'<img alt="what the cell draws" src="data:image/png;base64,{data["image/png"]}">'
                )
            elif "text/html" in data:
                out.append(f'<div markdown="0">{"".join(data["text/html"])}</div>')
            else:
                text = output.get("text") or data["text/plain"]
                out.append(f"```text\n{''.join(text).rstrip()}\n```")
    out.append(f"[As a notebook]({path.stem}.ipynb) for Jupyter, [as a script]({path.name}).")
    return "\n\n".join(out) + "\n"


# ---- metrics and links


def example_of(of: type) -> Any:
    """Return the metric at the end of its class's example, which is run as the doctest is."""
    scope = vars(importlib.import_module(of.__module__)) | {"__name__": "__page__"}
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(of) or ""):
        exec(compile(example.source, f"<{of.__name__}>", "exec"), scope)
    found = [each for each in scope.values() if isinstance(each, of)]
    return found[0]


def picture(of: type) -> bytes:
    """Draw the metric of :func:`example_of` as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    figure, _ = example_of(of).plot()
    held = io.BytesIO()
    figure.savefig(held, format="svg", bbox_inches="tight", metadata={"Date": None})
    return held.getvalue()


def inside_docs(markdown: str, source: str) -> str:
    """Turn a page's links into the rest of the repository, which is not on the site, into names.

    Example:
        >>> inside_docs("see [it](../../flsv/a.py) and [that](../gpu.md)", "results/retrain.md")
        'see it and [that](../gpu.md)'
    """

    def kept(match: re.Match[str]) -> str:
        target = posixpath.normpath(
            posixpath.join(posixpath.dirname(source), match[2].partition("#")[0])
        )
        return match[1] if target.startswith("../") else match[0]

    return re.sub(r"\[([^\]]*)\]\(((?!\w+:|#)[^)\s]+)\)", kept, markdown)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    import nbformat

    for lesson in LESSONS:
        nbformat.write(run(lesson), lesson.with_suffix(".ipynb"))
