"""Descriptions of contribution metrics and of the data that they need, in words."""

from __future__ import annotations

import inspect

from torchmetrics import Metric

from flsv.core.needs import requirements_of
from flsv.core.vocabulary import REQUIREMENTS


def needs_in_words(metric: Metric) -> str:
    """Describe the data that a metric needs, in words."""
    needs = [REQUIREMENTS[need] for need in requirements_of(metric)]
    return f"{'; '.join(needs)}." if needs else "only which clients take part."


def what_it_is(metric: object) -> str:
    """Return the first paragraph of the metric's docstring, on one line."""
    docstring = inspect.getdoc(type(metric)) or ""
    first_paragraph, _, _ = docstring.strip().partition("\n\n")
    return " ".join(first_paragraph.split())
