"""write_report: writes the report of a run, an HTML file without scripts.

:func:`flsv.payment.for_one.for_one_client` says what the report for one participant has.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
from pandas import DataFrame, Series

from flsv.core.artifacts import client_folders
from flsv.payment.for_one import for_one_client
from flsv.payment.html import (
    Cell,
    Table,
    bar_cells,
    table_of_clients,
    table_of_texts,
    write_page,
)
from flsv.payment.sections import (
    bases_beside,
    class_count_heatmap,
    class_heatmaps,
    guide_table,
    logged,
    notes_on_values,
    packages,
    sentences_on_intervals,
    sentences_on_untrained,
)
from flsv.payment.shares import (
    Budget,
    Shares,
    findings,
    fractions_moved_by_scores,
    shares_file,
    shares_of,
)
from flsv.results.basis import RETRAINED, Basis, preferred_basis
from flsv.results.reading import Run, open_run
from flsv.results.run_table import ESTIMATE
from flsv.results.text import (
    MESSAGES,
    NO_NUMBER,
    describe_change,
    ends_of,
    format_numbers,
    highest_first,
    percent,
    performance,
    titled,
    with_intervals,
)
from flsv.results.verdict import Verdict
from flsv.scores import OWN_SCORES
from flsv.utilities.arguments import client_number
from flsv.utilities.csv_files import NAN, save_table

#: The column of bars, which has no title.
_BARS = ""
#: Largest number of clients that are all shown. Of more, the ten highest and the ten lowest are shown.
MAX_CLIENTS_SHOWN = 30


def write_report(
    path: str | Path,
    client: int | str | None = None,
    out: str | Path | None = None,
    budget: Budget | None = None,
) -> Path:
    """Write a run's report as an HTML page, on all clients or for one of them.

    Args:
        path: the run's folder, or that of a ``flsv repeat``. The run need not have ended.
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
        ConfigurationError: there is no such run or client, ``out`` is not an ``.html`` file, or there are no
            values to share the budget out by. Nothing is written then.
    """
    run = open_run(path)
    client_id = None
    if client is not None:
        client_id = client_number(client, run.client_names)
    folder = _folder_of_page(run, client_id)
    file = folder / "report.html" if out is None else Path(out)

    shares: Shares | None = None
    if budget is None:
        basis = preferred_basis(run)
        verdict = None if basis is None else basis.verdict()
    else:
        shares = shares_of(run, budget)
        basis = shares.basis
        verdict = shares.verdict
    shown_shares = _shares_to_show(shares)
    if client_id is None:
        content = _for_all(run, basis, verdict, shown_shares)
    else:
        content = for_one_client(run, client_id, basis, verdict, shown_shares)
    write_page(file, subtitle=_subtitle(run), **content)

    if shares is not None and client_id is None:
        # Where the verdict forbids a payment, the table has the verdict and no shares.
        save_table(shares_file(file), shares.csv_table())
    return file


def _shares_to_show(shares: Shares | None) -> Shares | None:
    if shares is None or shares.verdict.forbids_payment:
        return None
    return shares


def _folder_of_page(run: Run, client: int | None) -> Path:
    if client is None:
        return run.folder
    return run.folder / "clients" / client_folders(run.client_names)[client]


def _subtitle(run: Run) -> str:
    rounds = run.rounds_text
    if not run.ended:
        rounds += " (stopped)"
    date, _, _time = run.record["started"].partition("T")
    return f"{run.num_clients} partners, {rounds}, started {date}"


def _for_all(
    run: Run, basis: Basis | None, verdict: Verdict | None, shares: Shares | None
) -> dict[str, Any]:
    """Return the content of the page for the federation's operator, on all clients by name."""
    clients = _shown_clients(run, basis)
    names = list(map(run.label, clients))
    heading = "What each contributed"
    if shares is not None:
        heading = f"Shares of {shares.title}"
    return {
        "title": "Who contributed what",
        "heading": heading,
        "verdict": verdict,
        "front": _front_for_all(run, basis, shares, clients),
        "appendix": {
            "Who took part": [
                _participation_table(run, clients, names),
                class_count_heatmap(run, clients, names),
            ],
            "Other values": [
                *_values_beside(run, basis, clients),
                *class_heatmaps(run, run.metrics, clients, names),
            ],
            "How to read the values": [guide_table(run, basis)],
            "Settings": _settings_section(run, basis, clients),
        },
    }


def _shown_clients(run: Run, basis: Basis | None) -> list[int]:
    """Return the clients in the order of their values, of many the first and the last ones."""
    values = Series(NAN, index=range(run.num_clients))
    if basis is not None:
        values = basis.estimates["value"]
    return ends_of(highest_first(values), MAX_CLIENTS_SHOWN)


def _front_for_all(
    run: Run,
    basis: Basis | None,
    shares: Shares | None,
    clients: Sequence[int],
) -> list[str | Table]:
    """Return the page's main table, and the sentences below it."""
    client_findings = findings(run)
    front: list[str | Table] = []
    if basis is None:
        front.append(MESSAGES["no_metric"])
    else:
        misses_value = bool(basis.estimates["value"].isna().any())
        names = list(map(run.label, clients))
        front.append(_values_table(basis, clients, names, shares, client_findings))
        front += notes_on_values(basis, shares, misses_value)
        front += _sentences_on_other_scores(run, basis)

    if len(clients) < run.num_clients:
        front.append(f"The table shows {len(clients)} of {run.num_clients} partners.")
    if any(client_findings):
        front.append(MESSAGES["findings"])
    front += _sentences_on_values(run, basis)
    return front


def _sentences_on_values(run: Run, basis: Basis | None) -> list[str]:
    """Return sentences on how the page's values are to be read."""
    steps = []
    if basis is not None and basis.adds_up and basis.by.endswith("accuracy"):
        steps.append(MESSAGES["steps"])
    return [
        *steps,
        *_sentences_on_performance(run, basis),
        *([] if basis is None else sentences_on_untrained(run, basis)),
        *_sentences_on_missing_values(run, basis),
        "With other partners or other validation samples the values would be different.",
    ]


def _values_beside(
    run: Run,
    basis: Basis | None,
    clients: Sequence[int],
) -> list[str | Table]:
    """Return a table of the values that the page is not about, and sentences on it."""
    bases = bases_beside(run, basis)
    if not bases:
        return []
    columns = {}
    for other_basis in bases:
        estimates = other_basis.estimates.loc[clients]
        columns[other_basis.key] = with_intervals(estimates, between=" to ")
    has_dash = any(NO_NUMBER in cells for cells in columns.values())
    return [
        MESSAGES["other_values"],
        table_of_clients(list(map(run.label, clients)), columns),
        *sentences_on_intervals(bases),
        MESSAGES["dash"] if has_dash else "",
    ]


def _sentences_on_other_scores(run: Run, basis: Basis) -> list[str]:
    """Return a sentence on the parts of a payment that other scores would give to others, none without any."""
    parts = [
        f"{percent(fraction)} by {titled(score)}"
        for score, fraction in fractions_moved_by_scores(run, basis).items()
    ]
    if not parts:
        return []
    return [MESSAGES["other_scores"].format(", ".join(parts))]


def _sentences_on_performance(run: Run, basis: Basis | None) -> list[str]:
    """Return sentences on the model's performance, and on the samples it was evaluated on."""
    sentences = []
    performances = run.performances
    if basis is not None and basis.key == RETRAINED and run.retrained is not None:
        performances = run.retrained.performances
    # The performance that the values distribute, or any if there are no values.
    for change in performances.values():
        if basis is None or change["by"] == basis.by:
            sentences.append(f"The model's {describe_change(change)}.")
            break

    validation = run.record["validation"]
    if validation:
        samples = "validation samples"
        if validation["rows"] is not None:
            samples = f"{validation['rows']:,} validation samples"
        num_trained_on = validation.get("trained_on")
        texts: Mapping[str, str] = MESSAGES["validation"]
        if num_trained_on is None:
            text = texts["not_compared"]
        elif num_trained_on == 0:
            text = texts["none"]
        else:
            text = texts["some"]
        sentences.append(text.format(samples, validation["of"], num_trained_on))
    return sentences


def _sentences_on_missing_values(run: Run, basis: Basis | None) -> list[str]:
    """Return sentences that say why metrics other than the page's have no values."""
    if basis is not None and basis.key == RETRAINED:
        return []  # the page shows retrained values instead of the metrics' values
    sentences = []
    reasons = dict(run.record.get("missing", {}))
    for metric, record in run.performances.items():
        if "why_no_values" in record:
            reasons[metric] = record["why_no_values"]
    for metric, reason in reasons.items():
        is_told_by_verdict = basis is not None and metric == basis.key
        if reason and not is_told_by_verdict:
            sentences.append(f"There are no values by {metric}. {reason}")
    return sentences


def _participation_table(run: Run, clients: Sequence[int], names: Sequence[str]) -> Table:
    """Return a table of the clients' samples, rounds and scores of their own models."""
    num_rounds = run.taken_part()
    num_samples = run.record["samples"]
    columns = {
        "samples": [str(num_samples[client]) for client in clients],
        "rounds": [f"{num_rounds[client]}\u00a0of\u00a0{run.rounds}" for client in clients],
    }
    metric_by_title = {"last weight": "weight"}
    for score in OWN_SCORES:
        metric_by_title[f"own {titled(score)}"] = score

    for title, metric in metric_by_title.items():
        if metric in run.measured:
            values = run.estimates(metric)["value"]
            columns[title] = format_numbers(values[clients])
    return table_of_clients(names, columns)


def _settings_section(
    run: Run,
    basis: Basis | None,
    clients: Sequence[int],
) -> list[str | Table | None]:
    """Return settings, commands and some clients' hashes, by which a run and its values can be repeated."""
    hashes = run.record["hashes"]
    owner_by_key = {"server": "the server"}
    for client in clients:
        owner_by_key[str(client)] = run.label(client)
    shown_hashes = {owner: hashes[key] for key, owner in owner_by_key.items() if key in hashes}
    return [
        *_commands_to_repeat(run, basis),
        table_of_texts({**run.record["settings"], **packages(run), **logged(run)}),
        MESSAGES["hashes"],
        table_of_texts(shown_hashes),
    ]


def _commands_to_repeat(run: Run, basis: Basis | None) -> list[str]:
    commands = []
    config = run.folder / "config.yaml"
    if config.is_file():
        commands.append(f"To repeat the run: flsv fit --config {shlex.quote(str(config))}")
    if basis is not None and basis.key == RETRAINED and run.retraining_options is not None:
        folder = shlex.quote(str(run.folder))
        command = f"flsv retrain {folder} {run.retraining_options}".rstrip()
        commands.append(f"To repeat the values: {command}")
    return commands


def _values_table(
    basis: Basis,
    clients: Sequence[int],
    names: Sequence[str],
    shares: Shares | None,
    client_findings: Sequence[str],
) -> Table:
    """Return the page's main table: values with bars, shares and amounts, and findings."""
    estimates = basis.estimates.loc[clients]
    # Each bar begins where the one before ends, from the score of the untrained model to that of the model of all.
    is_waterfall = basis.adds_up and len(clients) == len(basis.values)
    columns: dict[str, list[Any]] = {"value": with_intervals(estimates, between=" to ")}
    if is_waterfall:
        columns[_BARS] = _waterfall_cells(basis, estimates)
    else:
        columns[_BARS] = bar_cells(estimates)
    if shares is not None:
        columns |= _share_columns(shares, clients)
    if any(client_findings):
        columns["finding"] = [client_findings[client] or NO_NUMBER for client in clients]
    if not is_waterfall:
        return table_of_clients(names, columns)

    _add_scores_of_ends(columns, basis)
    return table_of_clients(["untrained model", *names, "model of all"], columns)


def _share_columns(shares: Shares, clients: Sequence[int]) -> dict[str, list[str]]:
    cells = [shares.cells(client) for client in clients]
    return {
        "share": [share for share, _ in cells],
        "amount": [amount for _, amount in cells],
    }


def _add_scores_of_ends(columns: dict[str, list[Any]], basis: Basis) -> None:
    """Add a row before the clients' rows, and one after them. The bars have these already."""
    initial_score = performance(basis.by, basis.initial_score)
    final_score = performance(basis.by, basis.final_score)
    for column, texts in columns.items():
        if column == "value":
            columns[column] = [initial_score, *texts, final_score]
        elif column != _BARS:
            columns[column] = ["", *texts, ""]


def _waterfall_cells(basis: Basis, estimates: DataFrame) -> list[Cell]:
    """Draw the score of the untrained model, a step for each client, and the score of the model of all."""
    scores = DataFrame({"value": [basis.initial_score, basis.final_score]}, columns=ESTIMATE)
    steps = pandas.concat([scores[:1], estimates, scores[1:]])
    scores_after_steps = basis.initial_score + estimates["value"].cumsum()
    bases = [0.0, *(scores_after_steps - estimates["value"]), 0.0]
    return bar_cells(steps, bases)
