"""The report of a run as a file: HTML without scripts, legible on paper, phones and dark screens.

:mod:`flsv.report.for_all` and :mod:`flsv.report.for_one` compute what the templates show.
"""

from __future__ import annotations

from pathlib import Path

from flsv.report.for_all import NUMBERS, page_for_all
from flsv.report.for_one import page_for_one
from flsv.report.reading import open_run, over_seeds
from flsv.report.shares import Budget, shares_file, shares_of
from flsv.utilities.arguments import client_number
from flsv.utilities.atomic_files import replacing
from flsv.utilities.csv_files import save_table
from flsv.utilities.errors import ConfigurationError


def write_report(
    path: str | Path,
    client: int | str | None = None,
    out: str | Path | None = None,
    budget: Budget | None = None,
) -> Path:
    """Write a run's report: on all clients, or the page that one of them may see.

    Args:
        path: the run's folder; the run need not have ended.
        client: the number or name of the client for whom the page is written; None for the page for the operator of the
            federation.
        out: the file to write, which ends with ``.html``; None: ``report.html`` in the run's folder or, for a client,
            in its folder ``clients/<name>``.
        budget: a budget to share out by the run's values; the page shows the amounts.

    Returns:
        The file. Beside the report on all clients, ``report.csv`` has each number of its first page, and ``shares.csv``
        the shares of the budget, if there is one. Beside ``out``, ``name.html``, they are ``name.csv`` and
        ``name_shares.csv``.

    Raises:
        ConfigurationError: there is no such run or client; ``out`` is not an ``.html`` file; a file that is no
            report's would be overwritten; or a budget cannot be shared out by the run's values, see
            :func:`flsv.report.shares.basis_of`. Nothing is written then.
    """
    run = over_seeds(open_run(path))
    who = None if client is None else client_number(client, run.client_names, "client")
    shares = None if budget is None else shares_of(run, budget)
    folder = run.folder if who is None else run.folder / "clients" / run.folders[who]
    file = folder / "report.html" if out is None else Path(out)
    if file.suffix != ".html":
        raise ConfigurationError(f"out={str(out)!r}: expected a file that ends with .html.")
    beside = file.with_suffix(".csv")
    if who is None and beside.is_file() and not beside.read_text().startswith(",".join(NUMBERS)):
        raise ConfigurationError(f"out={str(out)!r}: {beside.name} beside it is not a report's. Name another file.")
    page, numbers = page_for_all(run, shares) if who is None else (page_for_one(run, who, shares), None)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as draft:
        draft.write(page.encode())
    if numbers is not None:
        save_table(beside, numbers)
    if shares is not None and who is None:
        save_table(shares_file(file), shares.written())
    return file
