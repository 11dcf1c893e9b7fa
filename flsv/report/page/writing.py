"""``report.html`` and ``report.md`` of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flsv._lightning.durable import replacing
from flsv.errors import ConfigurationError
from flsv.report.page.for_all import page_for_all
from flsv.report.page.for_one import page_for_one
from flsv.report.page.html import to_html
from flsv.report.page.markdown import to_markdown
from flsv.report.reading import Run, open_run
from flsv.report.record_schema import write_record

WRITERS = {".html": to_html, ".md": to_markdown}


def write_report(
    path: str | Path,
    client: int | str | None = None,
    out: str | Path | None = None,
    valuation: str | Path | None = None,
) -> list[Path]:
    """Write a run's report: of all clients, or the page that one of them may see.

    Args:
        path: the run's folder; of a killed run, too.
        client: number or name of the client whose page it is; None: for whoever runs the federation.
        out: the file, ``.html`` or ``.md``; None: both, ``report.html`` and ``report.md`` in the run's folder, or
            ``clients/<name>/report.html`` and ``.md``.
        valuation: folder of ``flsv value`` on the same data, whose findings are added.

    Returns:
        The files.

    Raises:
        ConfigurationError: no run there, no such client, another ending.
    """
    run = open_run(path, valuation)
    number = None if client is None else find_client(run, client)
    page = page_for_all(run) if number is None else page_for_one(run, number)
    if out is None:
        folder = run.folder if number is None else run.folder / "clients" / run.folders[number]
        files = [folder / f"report{ending}" for ending in WRITERS]
    else:
        files = [Path(out)]
        if files[0].suffix not in WRITERS:
            raise ConfigurationError(f"out={str(out)!r}: expected a file that ends with one of {list(WRITERS)}.")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as draft:
            draft.write(WRITERS[file.suffix](page).encode())
    return files


def pay(path: str | Path, clients: Sequence[int | str]) -> Run:
    """Record that clients whose payment was held back are to be paid, for all who read the run's record.

    Args:
        path: the run's folder.
        clients: numbers or names.

    Returns:
        The run as it is now.

    Raises:
        ConfigurationError: no run there, no such client, or one whose payment is not held back.
    """
    run = open_run(path)
    numbers = [find_client(run, client) for client in clients]
    for number, client in zip(numbers, clients):
        if number not in run.held:
            held = ", ".join(run.client_names[each] for each in run.held) or "nobody"
            raise ConfigurationError(f"client={client!r}: its payment is not held back. Held: {held}.")
    write_record(run.folder, {**run.record, "paid": sorted({*run.record.get("paid", ()), *numbers})})
    return open_run(path)


def find_client(run: Run, client: int | str) -> int:
    """The number of the client with this name or number.

    Raises:
        ConfigurationError: there is none, or more than one.
    """
    named = [i for i, name in enumerate(run.client_names) if name == str(client)]
    if len(named) == 1:
        return named[0]
    if len(named) > 1:
        raise ConfigurationError(f"client={client!r}: clients {named} have this name. Say the number.")
    text = str(client)
    if text.isdigit() and int(text) < run.num_clients:
        return int(text)
    names = ", ".join(run.client_names[:10]) + (", ..." if run.num_clients > 10 else "")
    raise ConfigurationError(f"client={client!r}: the run has no such client. It has {names}.")
