"""Pictures that cannot stop a run, whatever is in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 24


@contextmanager
def drawing(picture: str) -> Iterator[None]:
    """What raises inside becomes a warning that names the picture: nobody loses a run for it.

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


def label_text(name: object) -> str:
    """A name as matplotlib shall show it: as it is written, on one line, of 24 characters at most.

    Between two dollars matplotlib sees a formula and fails where it is none; what begins with an underscore it leaves
    out of legends.

    Example:
        >>> print(label_text("$x^{$"), label_text("_background"))
        \\$x^{\\$  _background
    """
    text = " ".join(str(name).split())
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
