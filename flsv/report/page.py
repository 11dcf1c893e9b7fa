"""write_report: writes the report of a run, an HTML file without scripts.

The report for one participant has its own values, and nothing that reveals another participant's. Its content is
selected, not filtered: names, values, settings and hashes of other participants are never read for it. Numbers computed
from all participants (a mean, a share of a sum, the joint model's performance) appear only with at least :data:`FEWEST`
clients and in a run that has ended, because the difference between two rounds' means could be the value of a single
client. Means have two digits. A mean reveals the sum of the others' values, so participants who combine their pages
learn no single value as long as two others do not join. Spreads, ranks, extremes and means per class or round would
reveal more, and do not appear.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flsv.functional.intervals import BRACKETS
from flsv.report.basis import RETRAINED, Basis, basis_shown, ends_to_show
from flsv.report.certainty import other_scores, other_seeds
from flsv.report.html import Table, bars, heat, render
from flsv.report.reading import Run, open_run, over_seeds
from flsv.report.shares import Budget, Shares, findings, shares_file, shares_of
from flsv.results.text import (
    NONE,
    WORDS,
    by_value,
    change,
    ends_of,
    known_mean,
    number,
    numbers,
    titled,
    with_intervals,
)
from flsv.results.verdict import OF_ALL_VALUES, Verdict
from flsv.scores.class_scores import OWN_SCORES
from flsv.utilities.arguments import client_number
from flsv.utilities.atomic_files import replacing
from flsv.utilities.csv_files import NAN, save_table
from flsv.utilities.errors import ConfigurationError

#: Largest number of clients that are all shown. Of more, the ten highest and the ten lowest are shown.
MOST = 30
#: Largest number of rounds in a heatmap. Of more, so many are shown.
ROUNDS = 20
#: With fewer clients, no number computed from all of them is shown to one of them.
FEWEST = 5


def write_report(
    path: str | Path,
    client: int | str | None = None,
    out: str | Path | None = None,
    budget: Budget | None = None,
) -> Path:
    """Write a run's report as an HTML page, on all clients or for one of them.

    Args:
        path: the run's folder. The run need not have ended.
        client: the id or name of the client for whom the page is written. None: the page is for the operator of the
            federation, on all clients.
        out: the file to write, which ends with ``.html``. None: ``report.html`` in the run's folder or, for a client,
            in its folder ``clients/<name>``.
        budget: a budget to share out by the run's values. The page shows the amounts, unless the verdict on these
            values forbids a payment.

    Returns:
        The page's path. With a budget, the report on all clients also writes its shares to ``shares.csv`` in the same
        folder, or the verdict without shares. For ``out`` named ``name.html``, that file is ``name_shares.csv``.

    Raises:
        ConfigurationError: there is no such run or client, ``out`` is not an ``.html`` file, or it is not clear by
            which values to share the budget out. Nothing is written then.
    """
    run = over_seeds(open_run(path))
    client_id = None if client is None else client_number(client, run.client_names, "client")
    shares = None if budget is None else shares_of(run, budget)
    basis = basis_shown(run) if shares is None else shares.basis
    verdict = _verdict(basis, shares, to_one=client_id is not None)
    new_shares = shares
    if shares is not None and shares.verdict.forbids:
        shares = None
    folder = run.folder if client_id is None else run.folder / "clients" / run.folders[client_id]
    file = folder / "report.html" if out is None else Path(out)
    if file.suffix != ".html":
        raise ConfigurationError(f"out={str(out)!r}: expected a file that ends with .html.")
    content = (
        _for_all(run, basis, shares)
        if client_id is None
        else _for_one(run, client_id, basis, shares)
    )
    planned = f" of {run.record['rounds']}" if (run.record["rounds"] or -1) > 0 else ""
    state = f"{run.rounds} rounds" if run.ended else f"{run.rounds}{planned} rounds (not ended)"
    page = render(
        subtitle=f"{run.num_clients} partners, {state}, started {run.record['started'][:10]}",
        basis=basis,
        shares=shares,
        verdict=verdict,
        brackets=_brackets(basis, shares),
        **content,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as draft:
        draft.write(page.encode())
    if new_shares is not None and client_id is None:
        save_table(shares_file(file), new_shares.written())
    return file


def _verdict(basis: Basis | None, shares: Shares | None, to_one: bool) -> Verdict | None:
    """Return the verdict that a page shows. One client's page without shares has nothing that tells of others'
    values.
    """
    if basis is None:
        return None
    if shares is not None:
        return shares.verdict
    verdict = basis.verdict()
    return verdict.without(OF_ALL_VALUES) if to_one else verdict


def _for_all(run: Run, basis: Basis | None, shares: Shares | None) -> dict[str, Any]:
    """Return the content of the page for the federation's operator, on all clients by name."""
    values = [NAN] * run.num_clients if basis is None else basis.values
    clients = ends_of(by_value(values), MOST)
    names, found = [run.label(client) for client in clients], findings(run)
    return {
        "title": "Who contributed what",
        "heading": f"Shares of {shares.title}" if shares else "What each contributed",
        "values": None if basis is None else _values(basis, clients, names, shares, found),
        "source": "" if basis is None else f"{basis.title}; {basis.of}",
        "missing": any(value != value for value in values),
        "moved": {} if basis is None else _moved(run, basis, shares),
        "front": [
            f"The table shows {len(clients)} of {run.num_clients} partners."
            if len(clients) < run.num_clients
            else "",
            WORDS["findings"] if any(found) else "",
            *_learned(run, basis),
            "With other partners or other cases the values would be different.",
        ],
        "appendix": {
            "Who took part": [_clients(run, clients, names), _class_counts(run, clients, names)],
            "All values": [
                _rows(
                    "client",
                    names,
                    _values_of(run, clients, run.record["metrics"]) | _retrained(run, clients),
                ),
                WORDS["dash"],
                *_classes(run, run.metrics, clients, names),
            ],
            "Over the rounds": _over_time(run, [*run.metrics, "weight"], clients, names),
            "How to read the values": [_guides(run)],
            "Settings": _settings(run),
        },
    }


def _learned(run: Run, basis: Basis | None) -> list[str]:
    """Return sentences on the model's performance, and on the samples it was evaluated on."""
    # That of the values, or by any metric if there is none by theirs.
    games, judged = run.record.get("paid_in", {}), run.record["validation"]
    same = [each for each in games.values() if basis is None or each["by"] == basis.by]
    sentences = [f"The model's {change(game)}." for game in same[:1]]
    if judged:
        cases = "" if judged["rows"] is None else f"{judged['rows']:,} "
        sentences.append(
            f"It was evaluated on {cases}cases that no partner trained on, {judged['of']}."
        )
    return sentences


def _clients(run: Run, clients: Sequence[int], names: Sequence[str]) -> Table:
    """Return a table of the clients' samples, rounds and scores of their own models."""
    taken, samples = run.taken_part(), run.record["samples"]
    columns = {
        "samples": [str(samples[client]) for client in clients],
        "rounds": [f"{taken[client]} of {run.rounds}" for client in clients],
    }
    for head, name in (
        ("last weight", "weight"),
        *((f"own {titled(name)}", name) for name in OWN_SCORES),
    ):
        if name in run.measured:
            final = run.final(name)
            columns[head] = numbers([final[client] for client in clients])
    return _rows("client", names, columns)


def _settings(run: Run) -> list[str | Table | None]:
    """Return the settings, command and hashes by which a run can be repeated."""
    config = run.folder / "config.yaml"
    hashes = {
        "the server" if who == "server" else run.label(int(who)): of
        for who, of in run.record["hashes"].items()
    }
    return [
        f"To repeat the run: flsv fit --config {shlex.quote(str(config))}"
        if config.is_file()
        else "",
        _texts({**run.record["settings"], **_packages(run), **_logged(run)}),
        "A second run with the same hashes gave the clients the same samples and measured the same metrics.",
        _texts(hashes),
    ]


def _for_one(run: Run, client: int, basis: Basis | None, shares: Shares | None) -> dict[str, Any]:
    """Return the content of the page for one client."""
    others = [metric for metric in run.metrics if basis is None or metric != basis.key]
    shown = {metric: cells[0] for metric, cells in _values_of(run, [client], others).items()}
    rows = [[metric, cell, _mean(run, run.final(metric))] for metric, cell in shown.items()]
    finding, public = (
        findings(run, "another participant")[client],
        _public(run, [0.0] * run.num_clients),
    )
    why = (
        "this run has not ended"
        if not run.ended
        else f"this run has {run.num_clients} participants"
    )
    return {
        "title": f"Contribution of {run.label(client)}",
        "heading": f"Your share of {shares.title}" if shares else "What you contributed",
        "values": None if basis is None else _own(run, client, basis, shares),
        # No seeds: from the federation's, the others' parts of the data follow.
        "source": "" if basis is None else basis.title,
        "missing": basis is not None and basis.values[client] != basis.values[client],
        "moved": {},
        "front": [
            _part(run, client, finding),
            WORDS["findings"] if finding else "",
            _class_counts(run, [client], ["samples"]),
        ],
        "appendix": {
            "Other measurements": [Table(["", "your value", "mean of all"], rows) if rows else ""],
            "Over the rounds": _over_time(run, run.metrics, [client], ["you"]),
            # Columns that are not classes may be other clients.
            "Class by class": _classes(
                run, filter(run.columns_are_classes, run.metrics), [client], ["you"]
            ),
            "How to read the values": [_guides(run)],
            "What this page tells": [
                WORDS["public"] if public else WORDS["private"].format(FEWEST, why),
                WORDS["share_tells"] if shares and not public else "",
                WORDS["own_tells"],
            ],
            "The run": [_own_settings(run, client, public)],
        },
    }


def _part(run: Run, client: int, finding: str) -> Table | None:
    """Return a table of one client's rounds, samples and ``finding``, the faults of its updates."""
    samples, taken = run.record["samples"], run.taken_part()[client]
    part = {
        "rounds with your update": f"{taken} of {run.rounds}",
        "your training samples": str(samples[client]),
    }
    if _public(run, samples):
        part["of all training samples"] = f"{100 * samples[client] / max(sum(samples), 1):.0f} %"
    return _texts(part | ({"finding": finding} if finding else {}))


def _own_settings(run: Run, client: int, public: bool) -> Table | None:
    """Return a table of the classes of strategies and metrics, without arguments, which may name other clients."""
    record, named = run.record, [name for name in run.client_names if not name.isdigit()]
    # Names of values that a model logs may contain a client's name.
    logged = {
        key: value
        for key, value in _logged(run).items()
        if public and not any(name in key for name in named)
    }
    own = {"hash of your samples and labels": record["hashes"].get(str(client))}
    metrics = {metric: run.about(metric)["class"] for metric in run.metrics}
    return _texts(
        {
            **record["algorithm"],
            **metrics,
            **logged,
            **_packages(run),
            **(own if any(own.values()) else {}),
        }
    )


def _values(
    basis: Basis,
    clients: Sequence[int],
    names: Sequence[str],
    shares: Shares | None,
    outcome: Sequence[str],
) -> Table:
    """Return the page's main table: values with bars, shares and amounts, and ``found``, the faults of updates."""
    lows, highs = ends_to_show(basis, to_pay_by=shares is not None)
    value = [basis.values[client] for client in clients]
    low = [lows[client] for client in clients]
    high = [highs[client] for client in clients]
    columns: dict[str, Sequence[Any]] = {"value": with_intervals(value, low, high, between=" to ")}
    columns[""] = bars(value, low, high)
    if shares is None and basis.with_other_cases is not None:
        columns["other cases"] = [
            f"[{cell}]" for cell in _ranges(*basis.with_other_cases, clients=clients)
        ]
    if shares is not None:
        columns["share"], columns["amount"] = zip(*map(shares.cells, clients))
    if any(outcome):
        columns["finding"] = [outcome[client] or NONE for client in clients]
    return _rows("partner", names, columns)


def _own(run: Run, client: int, basis: Basis, shares: Shares | None) -> Table:
    """Return the main table of a client's page: its value and share, beside the mean of all."""
    low, high = ends_to_show(basis, to_pay_by=shares is not None)
    (value,) = with_intervals(
        [basis.values[client]],
        [low[client]],
        [high[client]],
        between=" to ",
    )
    columns = {"": basis.title, "your value": value}
    if shares is None and basis.with_other_cases is not None:
        (other_cases,) = _ranges(*basis.with_other_cases, clients=[client])
        columns["other cases"] = f"[{other_cases}]"
    columns["mean of all"] = _mean(run, basis.values)
    if shares is not None:
        columns["share"], columns["amount"] = shares.cells(client)
    return Table([*columns], [[*columns.values()]])


def _ranges(
    low: Sequence[float],
    high: Sequence[float],
    clients: Sequence[int],
) -> list[str]:
    """Format intervals, all with equally many decimals."""
    texts = numbers(
        [
            *(low[client] for client in clients),
            *(high[client] for client in clients),
        ]
    )
    return [f"{lowest} to {highest}" for lowest, highest in zip(texts, texts[len(clients) :])]


def _brackets(basis: Basis | None, shares: Shares | None) -> str:
    """Return sentences on the intervals of a page's main table."""
    if basis is None or all(end != end for end in basis.low):
        return str(WORDS["no_brackets"])
    sentences: Mapping[str, str] = WORDS["brackets"]
    if basis.with_other_cases is None:
        return f"{sentences['seeds']} {BRACKETS} {sentences['no_cases']}"
    if shares is not None:
        return sentences["cases"]
    return f"{sentences['seeds']} {BRACKETS} {sentences['column']}"


def _moved(run: Run, basis: Basis, shares: Shares | None) -> dict[str, float]:
    """Estimate the fractions of a payment that would move with other seeds, and by other scores."""
    seeds = other_seeds(run, basis, shares.budget.rule if shares else "zero")
    by = {f"by {titled(score)}": moved for score, moved in other_scores(run, basis).items()}
    return ({"with other seeds": seeds} if seeds == seeds else {}) | by


def _public(run: Run, values: Sequence[float]) -> bool:
    """Return whether the run has ended and at least five clients have a value, so that one may see means."""
    return run.ended and sum(value == value for value in values) >= FEWEST


def _mean(run: Run, values: Sequence[float]) -> str:
    """Format the mean of all clients' values, or return a dash if one client may not see it."""
    # From more digits, or from several pages, others' values could be derived.
    if not _public(run, values):
        return NONE
    return number(known_mean(values), digits=2)


def _rows(corner: str, names: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> Table:
    """Return a table with a row per name."""
    return Table([corner, *columns], [list(row) for row in zip(names, *columns.values())])


def _texts(texts: Mapping[str, object]) -> Table | None:
    """Return a table of names and texts, or None if there are none."""
    return (
        Table(["", ""], [[name, str(text)] for name, text in texts.items()], css="texts")
        if texts
        else None
    )


def _packages(run: Run) -> dict[str, str]:
    return {f"package {name}": version for name, version in run.record["packages"].items()}


def _logged(run: Run) -> dict[str, str]:
    """Format the values that the model logged last, such as its validation accuracy."""
    logged = run.record.get("logged", {})
    return {
        f"last {name}": number(NAN if value is None else value) for name, value in logged.items()
    }


def _values_of(run: Run, clients: Sequence[int], metrics: Iterable[str]) -> dict[str, list[str]]:
    """Format some clients' values as ``{metric: cells}``, with intervals if there are any."""
    found = {}
    for metric in metrics:
        values, low, high = (
            [each[client] for client in clients] for each in (run.final(metric), *run.ends(metric))
        )
        found[metric] = with_intervals(values, low, high, between=" to ")
    return found


def _retrained(run: Run, clients: Sequence[int]) -> dict[str, list[str]]:
    """Format the values by retraining like those of a metric, if there are any."""
    known = run.retrained()
    rows = [known[client] for client in clients] if any(known) else []
    values, low, high = ([row.get(name, NAN) for row in rows] for name in ("value", "low", "high"))
    return {RETRAINED: with_intervals(values, low, high, between=" to ")} if rows else {}


def _class_counts(run: Run, clients: Sequence[int], names: Sequence[str]) -> Table | None:
    """Return a heatmap of clients' numbers of samples per class, or None if these are not known."""
    counts, classes = run.record["class_counts"], run.record["classes"]
    if not counts or not classes:
        return None
    return heat(
        names, classes, [counts[client] for client in clients], "", "Training samples of each class"
    )


def _over_time(
    run: Run, metrics: Iterable[str], clients: Sequence[int], names: Sequence[str]
) -> list[Table]:
    """Return a heatmap of each metric's values over up to 20 rounds, including the last."""
    places = range(len(run.round_numbers))[:: -len(run.round_numbers) // ROUNDS or -1][::-1]
    of = ", one of the runs" if run.seeds > 1 else ""
    found = []
    for metric in metrics if run.rounds > 1 else ():
        history = run.history(metric)[list(clients)].iloc[list(places)]
        if history.notna().any(axis=None):
            rounds = [str(index + 1) for index in history.index]
            found.append(
                heat(
                    names,
                    rounds,
                    history.to_numpy(dtype=float).T.tolist(),
                    "round",
                    f"{metric}{of}",
                )
            )
    return found


def _classes(
    run: Run, metrics: Iterable[str], clients: Sequence[int], names: Sequence[str]
) -> list[Table]:
    """Return a heatmap of some clients' last values for each metric with several columns."""
    found = []
    for metric in metrics:
        columns, of_classes = run.columns(metric), run.columns_are_classes(metric)
        titles = [run.column_name(metric, column) for column in columns]
        if columns == [*map(str, range(run.num_clients))] and not of_classes:
            titles = [run.label(client) for client in range(run.num_clients)]
        if len(columns) > 1:
            values = np.array([run.final(metric, column) for column in columns]).T[list(clients)]
            found.append(
                heat(
                    names,
                    titles,
                    values.tolist(),
                    "",
                    f"{metric} by {'class' if of_classes else 'column'}",
                )
            )
    return found


def _guides(run: Run) -> Table | None:
    """Return a table with each metric's description, unit, sign, needs, cost and limits."""
    of: dict[tuple[str, str], list[str]] = {}
    for metric in run.metrics:
        about = run.about(metric)
        limits = [("limits", text) for text in WORDS["caveats"].get(about["class"], ())]
        for key in [("what it is", about["about"]), *about["guide"].items(), *limits]:
            of.setdefault(key, []).append(metric)
    rows = [[head, ", ".join(metrics), text] for (head, text), metrics in of.items() if text]
    return Table(["", "metric", ""], rows, css="texts") if rows else None
