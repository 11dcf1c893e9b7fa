"""How the site shows code: lessons, which are Python files with cells, as notebooks and pages; and metrics' pictures.

    python tools/docs_render.py

A cell begins with ``# %%``, one of text with ``# %% [markdown]``, as editors and jupytext know them. The command runs
each lesson and writes what its cells print and draw into the notebook beside it, from which the site makes a page.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import doctest
import importlib
import inspect
import io
import json
import logging
import os
import posixpath
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
_TEXT = "[markdown]"


@dataclass
class Cell:
    """A cell, and what came of it: printed text, what its last line gives, pictures (PNG)."""

    text: str
    is_code: bool
    printed: str = ""
    html: str = ""
    pictures: list[bytes] = field(default_factory=list)


def cells(source: str) -> list[Cell]:
    """The cells of a file.

    Example:
        >>> [(cell.is_code, cell.text) for cell in cells("# %% [markdown]\\n# One.\\n# %%\\nx = 1\\n")]
        [(False, 'One.'), (True, 'x = 1')]
    """
    found = []
    for part in ("\n" + source).split("\n# %%")[1:]:
        kind, _, text = part.partition("\n")
        is_code = kind.strip() != _TEXT
        lines = [
            line if is_code else line.removeprefix("#").removeprefix(" ")
            for line in text.strip().splitlines()
        ]
        found.append(Cell("\n".join(lines), is_code))
    return found


def run(path: Path) -> list[Cell]:
    """A file's cells, run one after the other in a folder of their own; raises what a cell raises."""
    import matplotlib

    matplotlib.use("Agg")
    found, scope = cells(path.read_text(encoding="utf-8")), {"__name__": "__notebook__"}
    with _elsewhere():
        for number, cell in enumerate(found):
            if cell.is_code:
                _run_cell(cell, f"<{path.name}, cell {number}>", scope)
    return found


def _run_cell(cell: Cell, name: str, scope: dict[str, Any]) -> None:
    from matplotlib import pyplot

    lines, said = ast.parse(cell.text).body, io.StringIO()
    last = (
        lines.pop()
        if lines and isinstance(lines[-1], ast.Expr) and not cell.text.endswith(";")
        else None
    )
    with contextlib.redirect_stdout(said):
        exec(compile(ast.Module(lines, []), name, "exec"), scope)
        value = (
            None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), scope)
        )
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    of = value[0] if isinstance(value, tuple) and value else value
    if hasattr(of, "savefig"):
        figures, value = [*(each for each in figures if each is not of), of], None
    for figure in figures:
        held = io.BytesIO()
        figure.savefig(held, format="png", dpi=80, bbox_inches="tight")
        cell.pictures.append(held.getvalue())
    pyplot.close("all")
    cell.printed = said.getvalue()
    if hasattr(value, "_repr_html_"):
        cell.html = value._repr_html_()
    elif value is not None:
        cell.printed += f"{value!r}\n"


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """In an empty folder, without warnings and what Lightning says of devices and seeds."""
    logging.disable(logging.WARNING)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            mock.patch.dict(os.environ),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            os.environ.pop("COLUMNS", None)  # no line is broken
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


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
                out.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    out.append(f"[As a notebook]({path.stem}.ipynb) for Jupyter, [as a script]({path.name}).")
    return "\n\n".join(out) + "\n"


def notebook(ran: list[Cell]) -> str:
    """Return a lesson as a Jupyter notebook (format 4.5), with its outputs."""
    made = []
    for number, cell in enumerate(ran):
        told: dict[str, Any] = {
            "id": f"cell-{number}",
            "metadata": {},
            "source": cell.text.splitlines(keepends=True),
        }
        if not cell.is_code:
            made.append({"cell_type": "markdown", **told})
            continue
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            outputs.append(
                {
                    "output_type": "stream",
                    "name": "stdout",
                    "text": cell.printed.splitlines(keepends=True),
                }
            )
        shown = [{"text/html": cell.html.splitlines(keepends=True)}] if cell.html else []
        shown += [{"image/png": _base64(each)} for each in cell.pictures]
        outputs += [{"output_type": "display_data", "metadata": {}, "data": each} for each in shown]
        made.append({"cell_type": "code", "execution_count": None, "outputs": outputs, **told})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps(
        {"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": made},
        indent=1,
        ensure_ascii=False,
    )


def _base64(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


# ---- metrics and links


def example_of(of: type) -> Any:
    """The metric at the end of its class's example, which is run as the doctest is."""
    scope = vars(importlib.import_module(of.__module__)) | {"__name__": "__page__"}
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(of) or ""):
        exec(compile(example.source, f"<{of.__name__}>", "exec"), scope)
    found = [each for each in scope.values() if isinstance(each, of)]
    return found[0]


def picture(of: type) -> bytes:
    """What :func:`example_of` draws, SVG."""
    import matplotlib

    matplotlib.use("Agg")
    figure, _ = example_of(of).plot()
    held = io.BytesIO()
    figure.savefig(held, format="svg", bbox_inches="tight", metadata={"Date": None})
    return held.getvalue()


def inside_docs(markdown: str, source: str) -> str:
    """A page whose links into the rest of the repository, which is not on the site, are names only.

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
    for lesson in LESSONS:
        lesson.with_suffix(".ipynb").write_text(notebook(run(lesson)) + "\n", encoding="utf-8")
