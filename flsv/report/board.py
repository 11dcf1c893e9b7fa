"""The board: runs on one page in a browser on this machine, while they train."""

from __future__ import annotations

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from flsv.errors import ConfigurationError
from flsv.report.blocks import NONE, Bars, Block, Bullets, Page, Section, Table, Text, Warning, percent
from flsv.report.facts import by_column, client_label, ends_of, logged, over_rounds, state_of
from flsv.report.folder import CONTRIBUTIONS, RECORD
from flsv.report.front import red_lines
from flsv.report.page import to_html
from flsv.report.payment import SHARES_ONLY, Payment, payment_by
from flsv.report.reading import Run, open_run
from flsv.report.verdict import bases, chosen
from flsv.showing import shown

#: Runs of a folder that are shown, the newest.
MOST = 8


def runs_in(folder: Path) -> list[Path]:
    """The folder itself, where it is a run's; else the runs right below it, the newest first; else the folder, in which
    a run may yet begin."""

    def is_run(path: Path) -> bool:
        return (path / CONTRIBUTIONS).is_file() or (path / RECORD).is_file()

    if is_run(folder):
        return [folder]
    below = sorted(filter(is_run, folder.iterdir()), key=lambda path: path.stat().st_mtime, reverse=True)
    return below[:MOST] or [folder]


def board_page(folders: Sequence[Path]) -> tuple[Page, bool]:
    """The board of some runs as they are now, and whether any of them goes on.

    Args:
        folders: of runs, or of several runs each.
    """
    found: dict[str, Run | str] = {}
    for path in dict.fromkeys(run for folder in folders for run in runs_in(folder)):
        try:
            found[shown(path)] = open_run(path)
        except ConfigurationError as error:  # before its first round, most of all
            found[shown(path)] = str(error)
    runs = {name: run for name, run in found.items() if isinstance(run, Run)}
    sections = _side_by_side(runs) if len(runs) > 1 else []
    for name, run in found.items():
        title = f"{name}: " if len(found) > 1 else ""  # of one run it stands above
        sections += _of_run(title, run) if isinstance(run, Run) else [Section(name, [Text(f"Nothing yet. {run}")])]
    goes_on = any(isinstance(run, str) or run.ended is False for run in found.values())
    title = f"{len(found)} runs" if len(found) > 1 else "A run"
    return Page(f"{title}, {'as it goes on' if goes_on else 'at the end'}", ", ".join(found), sections), goes_on


def _shares(run: Run) -> Payment | None:
    basis = chosen(bases(run))
    try:
        return None if basis is None else payment_by(basis, SHARES_ONLY)
    except ConfigurationError:  # nobody has a value above 0
        return None


def _side_by_side(runs: dict[str, Run]) -> list[Section]:
    """Shares of the same clients in several runs."""
    first = next(iter(runs.values()))
    same = {name: run for name, run in runs.items() if run.client_names == first.client_names}
    shares = {name: payment for name, run in same.items() if (payment := _shares(run)) is not None}
    if len(shares) < 2:
        return []
    rows = []
    for client in ends_of(range(first.num_clients)):
        cells = [payment.shares[client] for payment in shares.values()]
        rows.append([client_label(first, client), *(percent(cell) if cell == cell else NONE for cell in cells)])
    return [Section("Shares, side by side", [Table(["partner", *shares], rows)])]


def _of_run(title: str, run: Run) -> list[Section]:
    as_ended = Run(run.folder, {**run.record, "ended": True}, run.table)  # that it goes on is no warning here
    blocks: list[Block] = [Warning(line) for line in red_lines(as_ended, bases(run))]
    if said := [f"{name} {value}" for name, value in logged(run)]:
        blocks.append(Text(f"The model has logged last: {', '.join(said)}."))
    if told := [_incident(run, each) for each in run.record.get("incidents", ())]:
        blocks.append(Bullets(told))
    payment = _shares(run)
    order = ends_of(range(run.num_clients) if payment is None else _best_first(run, payment))
    names = [client_label(run, client) for client in order]
    if payment is not None:
        shares, low, high = (
            [100 * column[client] for client in order] for column in (payment.shares, payment.low, payment.high)
        )
        blocks.append(Bars(names, shares, low, high, f"Shares in %, by {payment.basis.title}", "%"))
    blocks += over_rounds(run, order, names, {metric: metric for metric in run.metrics})
    blocks += [block for metric in run.metrics for block in by_column(run, metric, order, names)]
    state = state_of(run)
    return [Section(f"{title}{state}" if title else state.capitalize(), blocks)]


def _best_first(run: Run, payment: Payment) -> list[int]:
    return [*payment.basis.order, *(client for client in range(run.num_clients) if client not in payment.basis.known)]


def _incident(run: Run, told: dict[str, Any]) -> str:
    first, last, times = (int(told[key]) for key in ("first", "last", "times"))
    when = f"round {first}" if first == last else f"rounds {first} to {last}, {times} times"
    return f"{client_label(run, int(told['client']))}: {told['what']} ({when})"


class Board(HTTPServer):
    """Serves the board to this machine. Its page renews itself until the runs have ended; it has no scripts, and asks
    for nothing else. A page is made when it is asked for, one after the other.

    Args:
        folders: see :func:`board_page`.
        port: 0: a free one.
        every: seconds between two looks.

    Raises:
        ConfigurationError: the port is taken.
    """

    def __init__(self, folders: Sequence[Path], port: int = 0, every: int = 5) -> None:
        self.folders, self.every = list(folders), every
        try:
            super().__init__(("127.0.0.1", port), _Answer)
        except OSError as error:
            raise ConfigurationError(f"port {port} cannot be used: {error.strerror}. Name another by port.") from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Board

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        page, goes_on = board_page(self.server.folders)
        content = to_html(page).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        if goes_on:
            self.send_header("Refresh", str(self.server.every))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every look would hide what is said."""
