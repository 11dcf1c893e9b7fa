"""write_report: writes the report of a run, an HTML file without scripts.

The report for one participant has its own values, and nothing that reveals another participant's. Its content is
selected, not filtered: names, values, settings and hashes of other participants are never read for it. Numbers computed
from all participants (a mean, a share of a sum, the joint model's performance) appear only with at least
:data:`MIN_CLIENTS_OF_MEANS` clients and in a run that has ended, because the difference between two rounds' means could
be the value of a single client. Means have two digits. A mean reveals the sum of the others' values, so
participants who combine their pages learn no single value as long as two others do not join. Spreads, ranks, extremes
and means per class or round would reveal more, and do not appear.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas
from pandas import DataFrame, Series

from flsv.core.artifacts import client_folders
from flsv.payment.html import (
    Cell,
    Table,
    bar_cells,
    heatmap_table,
    render,
    table_of_clients,
    table_of_texts,
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
    format_number,
    format_numbers,
    highest_first,
    performance,
    titled,
    with_intervals,
)
from flsv.scores import OWN_SCORES
from flsv.utilities.arguments import client_number
from flsv.utilities.atomic_files import replacing
from flsv.utilities.csv_files import NAN, save_table
from flsv.utilities.errors import ConfigurationError

#: The column of bars, which has no title.
_BARS = ""
#: Largest number of clients that are all shown. Of more, the ten highest and the ten lowest are shown.
MAX_CLIENTS_SHOWN = 30
#: With fewer clients, no number computed from all of them is shown to one of them.
MIN_CLIENTS_OF_MEANS = 5


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
    folder = run.folder
    if client is not None:
        client_id = client_number(client, run.client_names)
        folder = run.folder / "clients" / client_folders(run.client_names)[client_id]
    file = folder / "report.html" if out is None else Path(out)

    if budget is None:
        shares = None
        basis = preferred_basis(run)
        verdict = None if basis is None else basis.verdict()
    else:
        shares = shares_of(run, budget)
        basis = shares.basis
        verdict = shares.verdict
    # Where the verdict forbids a payment, the page shows no shares.
    shown_shares = shares
    if shares is not None and shares.verdict.forbids_payment:
        shown_shares = None
    if file.suffix != ".html":
        raise ConfigurationError(f"out={str(out)!r}: expected a file that ends with .html.")

    if client_id is None:
        content = _for_all(run, basis, shown_shares)
    else:
        content = _for_one(run, client_id, basis, shown_shares)
        verdict = None if verdict is None else verdict.for_one_client()
    page = render(
        subtitle=_subtitle(run),
        basis=basis,
        shares=shown_shares,
        verdict=verdict,
        **content,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as page_file:
        page_file.write(page.encode())
    if shares is not None and client_id is None:
        save_table(shares_file(file), shares.csv_table())
    return file


def _subtitle(run: Run) -> str:
    rounds = run.rounds_text
    if not run.ended:
        rounds += " (stopped)"
    date, _, _time = run.record["started"].partition("T")
    return f"{run.num_clients} partners, {rounds}, started {date}"


def _for_all(run: Run, basis: Basis | None, shares: Shares | None) -> dict[str, Any]:
    """Return the content of the page for the federation's operator, on all clients by name."""
    values = Series(NAN, index=range(run.num_clients))
    if basis is not None:
        values = basis.estimates["value"]
    clients = ends_of(highest_first(values), MAX_CLIENTS_SHOWN)
    names = list(map(run.label, clients))
    client_findings = findings(run)

    sentences = []
    if len(clients) < run.num_clients:
        sentences.append(f"The table shows {len(clients)} of {run.num_clients} partners.")
    if any(client_findings):
        sentences.append(MESSAGES["findings"])
    if basis is not None and basis.adds_up and basis.by.endswith("accuracy"):
        sentences.append(MESSAGES["steps"])
    sentences += _sentences_on_performance(run, basis)
    sentences += _sentences_on_missing_values(run, basis)
    sentences.append(
        "With other partners or other validation samples the values would be different."
    )

    misses_value = bool(values.isna().any())
    other_values = _values_of_others(run, basis, clients)
    has_dash = misses_value or any(NO_NUMBER in cells for cells in other_values.values())
    content: dict[str, Any] = {
        "title": "Who contributed what",
        "heading": f"Shares of {shares.title}" if shares else "What each contributed",
        "missing": misses_value,
        "front": sentences,
        "appendix": {
            "Who took part": [
                _participation_table(run, clients, names),
                _class_count_heatmap(run, clients, names),
            ],
            "Other values": [
                MESSAGES["other_values"] if other_values else "",
                table_of_clients(names, other_values) if other_values else "",
                MESSAGES["dash"] if has_dash else "",
                *_class_heatmaps(run, run.metrics, clients, names),
            ],
            "How to read the values": [_guide_table(run, basis)],
            "Settings": _settings_section(run, basis, clients),
        },
    }
    if basis is not None:
        content["values"] = _values_table(basis, clients, names, shares, client_findings)
        content["source"] = f"{_source(basis)}; {basis.origin}"
        content["moved"] = {
            f"by {titled(score)}": fraction
            for score, fraction in fractions_moved_by_scores(run, basis).items()
        }
    return content


def _source(basis: Basis) -> str:
    return basis.title if basis.key == RETRAINED else f"the metric {basis.title}"


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
        num_samples = "" if validation["rows"] is None else f"{validation['rows']:,} "
        sentences.append(
            f"It was evaluated on {num_samples}validation samples, which no partner trained on: {validation['of']}."
        )
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
    commands = []
    config = run.folder / "config.yaml"
    if config.is_file():
        commands.append(f"To repeat the run: flsv fit --config {shlex.quote(str(config))}")
    if basis is not None and basis.key == RETRAINED and run.retraining_options is not None:
        folder = shlex.quote(str(run.folder))
        command = f"flsv retrain {folder} {run.retraining_options}".rstrip()
        commands.append(f"To repeat the values: {command}")
    hashes = run.record["hashes"]
    owner_by_key = {"server": "the server"} | {str(client): run.label(client) for client in clients}
    shown_hashes = {owner: hashes[key] for key, owner in owner_by_key.items() if key in hashes}

    return [
        *commands,
        table_of_texts({**run.record["settings"], **_packages(run), **_logged(run)}),
        MESSAGES["hashes"],
        table_of_texts(shown_hashes),
    ]


def _for_one(
    run: Run,
    client: int,
    basis: Basis | None,
    shares: Shares | None,
) -> dict[str, Any]:
    """Return the content of the page for one client."""
    finding = findings(run, for_one_client=True)[client]
    class_metrics = filter(run.columns_are_classes, run.metrics)
    shows_means = _may_see_means(run, [0.0] * run.num_clients)
    content: dict[str, Any] = {
        "title": f"Contribution of {run.label(client)}",
        "heading": f"Your share of {shares.title}" if shares else "What you contributed",
        "front": [
            _participation(run, client, finding),
            MESSAGES["findings"] if finding else "",
            _class_count_heatmap(run, [client], ["samples"]),
        ],
        "appendix": {
            "Other measurements": [_other_measurements(run, client, basis)],
            # Columns that are not classes may be other clients.
            "Class by class": _class_heatmaps(run, class_metrics, [client], ["you"]),
            "How to read the values": [_guide_table(run, basis)],
            "What this page reveals": _sentences_on_privacy(run, shows_means, shares is not None),
            "The run": [_settings_for_one(run, client, shows_means)],
        },
    }
    if basis is not None:
        content["values"] = _values_for_one(run, client, basis, shares)
        # Without seeds: from the federation's seed, the others' parts of the data can be derived.
        content["source"] = _source(basis)
        content["missing"] = math.isnan(basis.values[client])
    return content


def _other_measurements(
    run: Run,
    client: int,
    basis: Basis | None,
) -> Table | str:
    """Return a table of a client's values by the other metrics."""
    rows = []
    for metric in _metrics_beside(run, basis):
        estimates = run.estimates(metric).loc[[client]]
        mean = _mean(run, run.final(metric))
        rows.append([_head_of(metric, estimates), *with_intervals(estimates, " to "), mean])
    if not rows:
        return ""
    return Table(["", "your value", "mean of all"], rows)


def _sentences_on_privacy(run: Run, shows_means: bool, has_shares: bool) -> list[str]:
    """Return sentences that say what a client's page reveals about the others."""
    if shows_means:
        return [MESSAGES["public"], MESSAGES["own_value_reveals"]]
    if run.ended:
        reason = f"this run has {run.num_clients} participants"
    else:
        reason = "this run has not ended"
    sentences = [MESSAGES["private"].format(fewest=MIN_CLIENTS_OF_MEANS, reason=reason)]
    if has_shares:
        sentences.append(MESSAGES["share_reveals"])
    sentences.append(MESSAGES["own_value_reveals"])
    return sentences


def _participation(run: Run, client: int, finding: str) -> Table | None:
    """Return a table of one client's rounds and samples, and the ``finding`` about its updates and data."""
    num_samples = run.record["samples"]
    num_rounds = run.taken_part()
    texts = {
        "rounds with your update": f"{num_rounds[client]} of {run.rounds}",
        "your training samples": str(num_samples[client]),
    }
    if _may_see_means(run, num_samples):  # from a fraction the sum follows
        fraction = num_samples[client] / max(sum(num_samples), 1)
        texts["of all training samples"] = f"{100 * fraction:.0f} %"
    if finding:
        texts["finding"] = finding
    return table_of_texts(texts)


def _settings_for_one(run: Run, client: int, shows_means: bool) -> Table | None:
    """Return a table of the classes of strategies and metrics, without arguments, which may name other clients."""
    texts = {**run.record["algorithm"]}
    for metric in run.metrics:
        texts[metric] = run.metric_info(metric)["class"]
    if shows_means:
        # Names of values that a model logs may contain a client's name.
        client_names = [name for name in run.client_names if not name.isdigit()]
        for value_name, value in _logged(run).items():
            if not any(name in value_name for name in client_names):
                texts[value_name] = value
    texts |= _packages(run)

    data_hash = run.record["hashes"].get(str(client))
    if data_hash:
        texts["hash of your samples and labels"] = data_hash
    return table_of_texts(texts)


def _values_table(
    basis: Basis,
    clients: Sequence[int],
    names: Sequence[str],
    shares: Shares | None,
    client_findings: Sequence[str],
) -> Table:
    """Return the page's main table: values with bars, shares and amounts, and findings."""
    estimates = basis.estimates.loc[clients]
    has_all_clients = len(clients) == len(basis.values)
    is_waterfall = has_all_clients and basis.adds_up
    if is_waterfall:
        bars = _waterfall_cells(basis, estimates)
    else:
        bars = bar_cells(estimates)
    columns: dict[str, list[Any]] = {
        "value": with_intervals(estimates, between=" to "),
        _BARS: bars,
    }
    if shares is not None:
        cells = [shares.cells(client) for client in clients]
        columns["share"] = [share for share, _ in cells]
        columns["amount"] = [amount for _, amount in cells]

    if any(client_findings):
        columns["finding"] = [client_findings[client] or NO_NUMBER for client in clients]
    if not is_waterfall:
        return table_of_clients(names, columns)

    # A row before the clients' rows, and one after them. The bars have these already.
    initial_score = performance(basis.by, basis.initial_score)
    final_score = performance(basis.by, basis.final_score)
    for column, texts in columns.items():
        if column == "value":
            columns[column] = [initial_score, *texts, final_score]
        elif column != _BARS:
            columns[column] = ["", *texts, ""]
    return table_of_clients(["untrained model", *names, "model of all"], columns)


def _waterfall_cells(basis: Basis, estimates: DataFrame) -> list[Cell]:
    """Draw the score of the untrained model, a step for each client, and the score of the model of all."""
    scores = DataFrame({"value": [basis.initial_score, basis.final_score]}, columns=ESTIMATE)
    steps = pandas.concat([scores[:1], estimates, scores[1:]])
    scores_after_steps = basis.initial_score + estimates["value"].cumsum()
    bases = [0.0, *(scores_after_steps - estimates["value"]), 0.0]
    return bar_cells(steps, bases)


def _values_for_one(
    run: Run,
    client: int,
    basis: Basis,
    shares: Shares | None,
) -> Table:
    """Return the main table of a client's page: its value and share, beside the mean of all."""
    (value_text,) = with_intervals(basis.estimates.loc[[client]], between=" to ")
    text_of_head = {
        "": basis.title,
        "your value": value_text,
        "mean of all": _mean(run, basis.values),
    }
    if shares is not None:
        text_of_head["share"], text_of_head["amount"] = shares.cells(client)
    row = list(text_of_head.values())
    return Table(list(text_of_head), [row])


def _may_see_means(run: Run, values: Sequence[float]) -> bool:
    """Return whether the run has ended, and five clients have a value."""
    num_values = sum(not math.isnan(value) for value in values)
    return run.ended and num_values >= MIN_CLIENTS_OF_MEANS


def _mean(run: Run, values: Sequence[float]) -> str:
    """Format the mean of all clients' values, a dash if it is hidden."""
    # With more digits, the values of others could be derived from several pages.
    if not _may_see_means(run, values):
        return NO_NUMBER
    return format_number(Series(values).mean(), digits=2)


def _packages(run: Run) -> dict[str, str]:
    return {f"package {name}": version for name, version in run.record["packages"].items()}


def _logged(run: Run) -> dict[str, str]:
    """Format the values that the model logged last, such as its validation accuracy."""
    return {
        f"last {name}": format_number(NAN if value is None else value)
        for name, value in run.record.get("logged", {}).items()
    }


def _values_of_others(
    run: Run,
    basis: Basis | None,
    clients: Sequence[int],
) -> dict[str, list[str]]:
    """Format some clients' values beside those of ``basis`` as ``{head: cells}``."""
    cells = {}
    for metric in _metrics_beside(run, basis):
        estimates = run.estimates(metric).loc[clients]
        cells[_head_of(metric, estimates)] = with_intervals(estimates, " to ")
    return cells


def _metrics_beside(run: Run, basis: Basis | None) -> list[str]:
    """Return the metrics whose values the page's main table does not show."""
    key_of_basis = None if basis is None else basis.key
    return [metric for metric in run.metrics if metric != key_of_basis]


def _head_of(name: str, estimates: DataFrame) -> str:
    """Return the head of a column of values, which says what the intervals are for."""
    has_intervals = bool(estimates["low"].notna().any())
    return f"{name}, {MESSAGES['over_seeds']}" if has_intervals else name


def _class_count_heatmap(run: Run, clients: Sequence[int], names: Sequence[str]) -> Table | None:
    """Return a heatmap of clients' numbers of samples per class, or None if these are not known."""
    counts = run.record["class_counts"]
    class_names = run.record["classes"]
    if not counts or not class_names:
        return None
    table = DataFrame([counts[client] for client in clients], index=names, columns=class_names)
    return heatmap_table(table, caption="Training samples of each class")


def _class_heatmaps(
    run: Run,
    metrics: Iterable[str],
    clients: Sequence[int],
    names: Sequence[str],
) -> list[Table]:
    """Return a heatmap of some clients' last values for each metric with several columns."""
    client_ids = list(map(str, range(run.num_clients)))
    heatmaps = []
    for metric in metrics:
        columns = run.columns(metric)
        if len(columns) <= 1:
            continue
        kind = "class" if run.columns_are_classes(metric) else "column"
        titles = list(columns.values())
        columns_are_clients = kind == "column" and list(columns) == client_ids
        if columns_are_clients:
            titles = list(map(run.label, range(run.num_clients)))

        values = DataFrame([run.final(metric, column) for column in columns], index=titles)
        table = values[list(clients)].set_axis(names, axis=1).T
        heatmaps.append(heatmap_table(table, caption=f"{metric} by {kind}"))
    return heatmaps


def _guide_table(run: Run, basis: Basis | None) -> Table | None:
    """Return a table with each metric's description, unit, sign, needs, cost and limits, the main values first."""
    # Metrics with the same text share a row.
    metrics_by_text: dict[tuple[str, str], list[str]] = {}
    if basis is not None and basis.key == RETRAINED:
        for title, text in MESSAGES["retrained"].items():
            sentence = text.format(origin=basis.origin, seeds=basis.inputs.seeds)
            metrics_by_text[title, sentence] = [RETRAINED]
    for metric in run.metrics:
        metric_info = run.metric_info(metric)
        titled_texts = [("what it is", metric_info["about"]), *metric_info["guide"].items()]
        caveats = MESSAGES["caveats"].get(metric_info["class"], ())
        titled_texts += [("limits", caveat) for caveat in caveats]
        for title_and_text in titled_texts:
            metrics_by_text.setdefault(title_and_text, []).append(metric)

    rows = []
    for (title, text), metrics in metrics_by_text.items():
        if text:
            rows.append([title, ", ".join(metrics), text])
    if not rows:
        return None
    return Table(["", "metric", ""], rows, css="texts")
