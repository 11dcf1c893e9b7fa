"""Names and colors of charts, and a context for errors while drawing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LONGEST = 24

#: Ten colors that people with any of the common kinds of color blindness can tell apart: M. A. Petroff, "Accessible
#: Color Sequences for Data Visualization", 2021 (matplotlib's "petroff10", from version 3.10 on).
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)


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
        yield  # to saving, too: matplotlib finds most errors when a figure is rendered
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        # The caller's caller: this function's frame, then contextlib's, then the with statement.
        warnings.warn(
            f"The picture {picture} could not be drawn ({why}). The run goes on without it.",
            UserWarning,
            stacklevel=3,
        )


def shortened_name(name: object) -> str:
    """Return the name on one line, cut to at most 24 characters."""
    text = " ".join(str(name).split())
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 1] + "…"


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
    name = str(client)
    if names is not None:
        name = str(names[client])
    if name.isdigit():
        return f"client {name}"
    return name


def client_labels(count: int, names: Sequence[str] | None = None) -> list[str]:
    """Return the labels of the clients 0 to ``count - 1``, see :func:`client_label`."""
    return [client_label(client, names) for client in range(count)]
