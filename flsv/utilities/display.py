"""Functions that show paths, names and tables, and what all charts share."""

from __future__ import annotations

import io
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Confidence level of the intervals in the reports.
INTERVAL_LEVEL = 0.9
#: Beginning of a performance's title if the clients score the models.
CLIENTS_PREFIX = "clients' "
#: Largest number of characters of a name in a chart.
MAX_NAME_LENGTH = 24

#: Ten colors that people with any of the common kinds of color blindness can tell apart: M. A. Petroff, "Accessible
#: Color Sequences for Data Visualization", 2021 (matplotlib's "petroff10", from version 3.10 on).
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)


def display_path(path: Path) -> str:
    """Return a path relative to the working folder if possible, quoted for a shell.

    Example:
        >>> display_path(Path("runs/my run"))
        "'runs/my run'"
    """
    shown_path = path.resolve()
    if shown_path.is_relative_to(Path.cwd()):
        shown_path = shown_path.relative_to(Path.cwd())
    return shlex.quote(str(shown_path))


def plain(text: str) -> str:
    """Remove Sphinx roles and double backticks from a docstring.

    Example:
        >>> plain("``--tests``: see :func:`~flsv.functional.wasserstein`")
        '--tests: see flsv.functional.wasserstein'
    """
    without_roles = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    return without_roles.replace("``", "")


@contextmanager
def drawing(picture: str) -> Iterator[None]:
    """Turn an error while drawing ``picture`` into a warning.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     with drawing("data/partition"):
        ...         raise ValueError("no room")
        >>> str(caught[0].message)
        'The picture data/partition could not be drawn (ValueError: no room). The run goes on without it.'
    """
    try:
        yield  # the context also saves the figure: matplotlib finds most errors when it renders one
    except Exception as error:
        description = f"{type(error).__name__}: {error}".strip()
        reason, *_further_lines = description.split("\n")
        warnings.warn(
            f"The picture {picture} could not be drawn ({reason}). The run goes on without it.",
            UserWarning,
            stacklevel=3,  # the frames of this function, of contextlib, and of the with statement
        )


def shortened_name(name: object) -> str:
    """Return the name on one line, with at most 24 characters of its two ends.

    Example:
        >>> shortened_name("Centre hospitalier universitaire de Lyon")
        'Centre hospi…ire de Lyon'
    """
    text = " ".join(str(name).split())
    if len(text) <= MAX_NAME_LENGTH:
        return text
    num_characters = MAX_NAME_LENGTH // 2
    return f"{text[:num_characters]}…{text[1 - num_characters :]}"


def label_text(name: object) -> str:
    """Return a name as text that matplotlib shows unchanged, on one line of at most 24 characters.

    Example:
        >>> print(label_text("$x^{$"), label_text("_background"))
        \\$x^{\\$  _background
    """
    # matplotlib reads text between dollar signs as a formula, and leaves labels that begin with "_" out of legends.
    text = shortened_name(name).replace("$", r"\$")
    if text.startswith("_"):
        return f" {text}"
    return text


def client_label(client: int, names: Sequence[str] | None = None) -> str:
    """Return a client's name, or "client" and its id if it has none.

    Example:
        >>> client_label(0, ["Boston", "1"]), client_label(1, ["Boston", "1"]), client_label(2)
        ('Boston', 'client 1', 'client 2')
    """
    name = str(client if names is None else names[client])
    if name.isdigit():
        return f"client {name}"
    return name


def client_labels(count: int, names: Sequence[str] | None = None) -> list[str]:
    """Return the labels of the clients 0 to ``count - 1``, see :func:`client_label`."""
    return [client_label(client, names) for client in range(count)]


class Shown(tuple[Any, ...]):
    r"""A pair ``(figure, axis)`` that a notebook shows once as a picture.

    Example:
        >>> from matplotlib.figure import Figure
        >>> figure = Figure()
        >>> Shown([figure, figure.add_subplot()])._repr_png_()[:4]
        b'\x89PNG'
    """

    def _repr_png_(self) -> bytes | None:
        figure = self[0]  # of (figure, axis)
        if figure.canvas.manager is not None:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()
