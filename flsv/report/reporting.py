"""Reporting: what a run shows and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flsv.arguments import check_number
from flsv.errors import ConfigurationError


@dataclass(frozen=True)
class Reporting:
    """What a run shows and writes; none of it changes a number.

    Args:
        per_class: log per-class contributions to the loggers too (the CSV always has them).
        figures: rounds between two figures of a metric in TensorBoard (and after the last round); 0: none; None: ten in
            the run.
        client_runs: whether every client has a run of its own in TensorBoard, ``<run>/clients/<name>``, so that a chart
            holds all of them, in colours, by name (and every class, ``<run>/classes/<name>``, so that another holds all
            of a client's classes). Else all curves are the run's, a tag each. ``"auto"``: for up to 30 clients.
        table: print a table of the clients at the end.
        files: write ``contributions.csv``, ``run.json`` and the clients' pictures, and keep the run's folder to this
            run. A trainer with neither a logger nor a ``default_root_dir`` has no folder for them.

    Raises:
        ConfigurationError: a number out of range, an unknown word.

    Example:
        >>> Reporting(figures=0).table
        True
    """

    per_class: bool = True
    figures: int | None = None
    client_runs: Literal["auto", True, False] = "auto"
    table: bool = True
    files: bool = True

    def __post_init__(self) -> None:
        if self.figures is not None:
            check_number(self, "figures", self.figures, least=0, whole=True)
        if self.client_runs not in ("auto", True, False):
            raise ConfigurationError(f'Reporting(client_runs={self.client_runs!r}): expected "auto", True or False.')
