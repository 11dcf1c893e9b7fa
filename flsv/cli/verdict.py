"""One verdict in the terminal: all that is known of a run side by side, what contradicts each other, and the order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flsv.report.folder import CONTRIBUTIONS
from flsv.report.front import shares_in_words
from flsv.report.reading import Run, open_run
from flsv.report.repeated import repeated_runs
from flsv.report.terminal import make_console, print_table
from flsv.report.verdict import bases, chosen, contradictions, order_in_words


def say_verdict(run: Run, repeats: Sequence[Run] = ()) -> None:
    """Print it; nothing where nothing was measured.

    Args:
        run: of which.
        repeats: runs of the same federation with other seeds.
    """
    found = bases(run, repeats)
    basis = chosen(found)
    if basis is None:
        return
    if len(found) > 1:
        columns = {each.title: shares_in_words(each) for each in found}
        print_table(make_console(), "Shares by all that is known", run.client_names, columns)
    for line in contradictions(run, found):
        print(f"Contradiction: {line}")
    print(order_in_words(run, basis))


def say_verdict_of(folder: Path) -> None:
    """Likewise of the run in a folder, if it has written its values."""
    if (folder / CONTRIBUTIONS).is_file():
        run = open_run(folder)
        say_verdict(run, repeated_runs(run))
