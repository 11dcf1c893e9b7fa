"""``metric.plot()`` as the last line of a notebook's cell is seen.

Our figures belong to nobody: pyplot does not know them, so that a thousand rounds leave nothing open. A notebook shows
what pyplot knows, and what can turn itself into a picture: so our pairs of figure and axis can.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from functools import partial
from typing import Any


class Shown(tuple[Any, ...]):
    """``(figure, axis)``, which a notebook shows as the picture."""

    def _repr_png_(self) -> bytes | None:
        return picture_of(self[0])


def picture_of(figure: Any) -> bytes | None:
    """The picture as PNG; None for one of pyplot's, which the notebook shows itself.

    Example:
        >>> from matplotlib.figure import Figure
        >>> picture_of(Figure())[:4]
        b'\\x89PNG'
    """
    if figure.canvas.manager is not None:
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def shows(plot: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what a ``plot`` method gives visible in notebooks: the pair, and the figure alone."""

    @functools.wraps(plot)
    def with_picture(*args: Any, **kwargs: Any) -> Any:
        drawn = plot(*args, **kwargs)
        if not isinstance(drawn, tuple) or isinstance(drawn, Shown):
            return drawn
        figure = drawn[0]
        if hasattr(figure, "savefig") and not hasattr(figure, "_repr_png_"):
            figure._repr_png_ = partial(picture_of, figure)
        return Shown(drawn)

    return with_picture
