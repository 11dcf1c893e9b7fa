"""A page per contribution metric: its docstring, with what it draws of its own example, and an index by question.

The questions are those of ``flsv.metrics``' docstring, formulas, shapes and when not to use it those of the classes'.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "flsv.metrics"
_QUESTION = re.compile(r"^- (.+?) \((\w+)\): (.+?)\.$", flags=re.MULTILINE | re.DOTALL)


def questions() -> dict[str, list[str]]:
    """Question to the names of the metrics that answer it, as the package's docstring has them."""
    text = ast.get_docstring(ast.parse((ROOT / "flsv" / "metrics" / "__init__.py").read_text())) or ""
    return {
        question: re.findall(r"\b[A-Z][a-zA-Z]+[a-z][A-Z]\w+\b", names)
        for question, _, names in _QUESTION.findall(text)
    }


def page_of(name: str) -> str:
    """Its address on the site."""
    return f"reference/metrics/{name}.md"


def metric_page(name: str) -> str:
    """One metric."""
    asked = next(question for question, names in questions().items() if name in names)
    return (
        f"# {name}\n\n*{asked}? The other metrics are in [the index](../{PACKAGE}.md).*\n\n"
        f"::: {PACKAGE}.{name}\n    options: {{show_root_heading: true, heading_level: 2}}\n\n"
        f"## What its example draws\n\n{drawn(name)}\n"
    )


def drawn(name: str, folder: str = "") -> str:
    """The picture of a metric's example, as Markdown, from a page that sees the metrics' pages in a folder."""
    return f"![metric.plot() after the example of {name}]({folder}{name}.svg)"


def index_page(names: list[str]) -> str:
    """All metrics by question, and whatever else the package exports."""
    asked = questions()
    lines = [f"# `{PACKAGE}`\n", "Contribution metrics, by the question that they answer. Which to take is in"]
    lines += ["[what each metric means](../explanation/metrics.md).\n", "| question | metrics |\n|---|---|"]
    for question, answers in asked.items():
        links = ", ".join(f"[{name}](metrics/{name}.md)" for name in answers)
        lines.append(f"| {question}? | {links} |")
    rest = [name for name in names if name not in {name for answers in asked.values() for name in answers}]
    return "\n".join(lines) + "\n\n" + "\n\n".join(f"::: {PACKAGE}.{name}" for name in rest) + "\n"


def example_of(name: str) -> Any:
    """The metric at the end of its class's example, which is run as the doctest is."""
    of = getattr(importlib.import_module(PACKAGE), name)
    scope = vars(importlib.import_module(of.__module__)) | {"__name__": "__page__"}
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(of) or ""):
        exec(compile(example.source, f"<{name}>", "exec"), scope)
    found = [each for each in scope.values() if isinstance(each, of)]
    return found[0]


def picture(name: str) -> bytes:
    """What :func:`example_of` draws, SVG."""
    import matplotlib

    matplotlib.use("Agg")
    figure, _ = example_of(name).plot()
    held = io.BytesIO()
    figure.savefig(held, format="svg", bbox_inches="tight", metadata={"Date": None})
    return held.getvalue()
