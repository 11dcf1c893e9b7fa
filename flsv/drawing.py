"""Draws figures without ever stopping a run, and defines the names and colours that all figures share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LONGEST = 24

#: Ten colours that people with any of the common kinds of colour blindness can tell apart: M. A. Petroff, "Accessible
#: Color Sequences for Data Visualization", 2021 (matplotlib's "petroff10", from version 3.10 on).
PALETTE = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)


@contextmanager
def drawing(picture: str) -> Iterator[None]:
    """Turn errors within into a warning that names the picture, so that no run fails because of one.

    Drawing and writing belong inside: matplotlib finds most faults when a figure is rendered.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     with drawing("data/partition"):
        ...         raise ValueError("no room")
        >>> str(caught[0].message)
        'The picture data/partition could not be drawn (ValueError: no room). The run goes on without it.'
    """
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        # The caller's caller: this function's frame, then contextlib's, then the with statement.
        warnings.warn(
            f"The picture {picture} could not be drawn ({why}). The run goes on without it.", UserWarning, stacklevel=3
        )


def shortened(name: object) -> str:
    """A name on one line, of 24 characters at most."""
    text = " ".join(str(name).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def label_text(name: object) -> str:
    """A name as matplotlib shall show it: as it is written, on one line, of 24 characters at most.

    Between two dollars matplotlib sees a formula and fails where it is none; what begins with an underscore it leaves
    out of legends.

    Example:
        >>> print(label_text("$x^{$"), label_text("_background"))
        \\$x^{\\$  _background
    """
    text = shortened(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def client_label(client: int, names: Sequence[str] | None = None) -> str:
    """A client's name for readers; "client 3" if the name is a number.

    Example:
        >>> client_label(0, ["Boston", "1"]), client_label(1, ["Boston", "1"]), client_label(2)
        ('Boston', 'client 1', 'client 2')
    """
    name = str(client if names is None else names[client])
    return f"client {name}" if name.isdigit() else name


def client_labels(count: int, names: Sequence[str] | None = None) -> list[str]:
    """:func:`client_label` of so many clients."""
    return [client_label(client, names) for client in range(count)]
