"""Parts of a page that the operator of a federation and a participant see alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pandas import DataFrame

from flsv.payment.html import Table, heatmap_table
from flsv.payment.shares import Shares
from flsv.results.basis import RETRAINED, Basis, bases_by_other_scores, basis_by_metric
from flsv.results.reading import Run
from flsv.results.text import MESSAGES, format_number, joined, titled
from flsv.utilities.csv_files import NAN


def notes_on_values(
    basis: Basis,
    shares: Shares | None,
    misses_value: bool,
) -> list[str]:
    """Return sentences below the main table: where the values come from, and what its intervals and dashes mean."""
    source = basis.title
    if basis.key != RETRAINED:
        source = f"the metric {source}"
    notes = [f"Source of the values: {source}; {basis.origin}. {basis.sentence_on_intervals}"]
    if shares is not None:
        notes.append(MESSAGES["rules"][shares.budget.rule])
        if basis.has_standard_errors:
            notes.append(MESSAGES["intervals"]["shares"])
    if misses_value:
        notes.append(MESSAGES["dash"])
    return notes


def bases_beside(run: Run, basis: Basis | None) -> list[Basis]:
    """Return the values by each metric that the page's main table does not show."""
    bases = []
    if basis is not None and basis.key == RETRAINED:
        bases += bases_by_other_scores(run)
    for metric in run.metrics:
        if basis is None or metric != basis.key:
            bases.append(basis_by_metric(run, metric))
    return bases


def sentences_on_untrained(run: Run, basis: Basis) -> list[str]:
    """Return a sentence on how much the untrained models' score moves the values, none if it is not known."""
    deviation = basis.untrained_deviation
    if math.isnan(deviation):
        return []
    return [
        MESSAGES["untrained"].format(
            score=titled(basis.by),
            deviation=format_number(deviation, digits=2),
            of_value=format_number(deviation / run.num_clients, digits=2),
        )
    ]


def sentences_on_intervals(bases: Iterable[Basis]) -> list[str]:
    """Return a sentence on each kind of intervals, which names the metrics that have them."""
    metrics_by_sentence: dict[str, list[str]] = {}
    for basis in bases:
        if basis.has_intervals:
            sentence = basis.sentence_on_intervals
            metrics_by_sentence.setdefault(sentence, []).append(basis.key)
    sentences = []
    for sentence, metrics in metrics_by_sentence.items():
        sentences.append(f"{joined(metrics)}: {sentence}")
    return sentences


def packages(run: Run) -> dict[str, str]:
    """Return the versions of packages, by title."""
    versions = run.record["packages"]
    return {f"package {name}": versions[name] for name in versions}


def logged(run: Run) -> dict[str, str]:
    """Format the values that the model logged last, such as its validation accuracy."""
    texts = {}
    logged_values = run.record.get("logged", {})
    for name, value in logged_values.items():
        number = NAN if value is None else value
        texts[f"last {name}"] = format_number(number)
    return texts


def class_count_heatmap(
    run: Run,
    clients: Sequence[int],
    names: Sequence[str],
) -> Table | None:
    """Return a heatmap of clients' numbers of samples per class, or None if these are not known."""
    counts = run.record["class_counts"]
    class_names = run.record["classes"]
    if not counts or not class_names:
        return None
    client_counts = [counts[client] for client in clients]
    table = DataFrame(client_counts, index=names, columns=class_names)
    return heatmap_table(table, caption="Training samples of each class")


def class_heatmaps(
    run: Run,
    metrics: Iterable[str],
    clients: Sequence[int],
    names: Sequence[str],
) -> list[Table]:
    """Return a heatmap of some clients' last values for each metric with several columns."""
    heatmaps = []
    for metric in metrics:
        columns = run.columns(metric)
        if len(columns) <= 1:
            continue
        rows = [run.final(metric, column) for column in columns]  # each with all clients' values
        values = DataFrame(rows, index=_titles_of_columns(run, metric))
        values_of_clients = values[list(clients)].set_axis(names, axis=1)
        kind = "class" if run.columns_are_classes(metric) else "column"
        heatmap = heatmap_table(values_of_clients.T, caption=f"{metric} by {kind}")
        heatmaps.append(heatmap)
    return heatmaps


def _titles_of_columns(run: Run, metric: str) -> list[str]:
    columns = run.columns(metric)
    all_clients = range(run.num_clients)
    are_clients = list(columns) == list(map(str, all_clients))
    if are_clients and not run.columns_are_classes(metric):
        return list(map(run.label, all_clients))
    return list(columns.values())


#: The title of a text of the guide, and the text.
TitledText = tuple[str, str]


def guide_table(run: Run, basis: Basis | None) -> Table | None:
    """Return a table with each metric's description, unit, sign, needs, cost and limits, the main values first."""
    # Metrics with the same text share a row.
    metrics_by_text = {}
    if basis is not None and basis.key == RETRAINED:
        for title_and_text in _guide_to_retraining(basis):
            metrics_by_text[title_and_text] = [RETRAINED]
    for metric in run.metrics:
        for title_and_text in _guide_to_metric(run, metric):
            metrics_by_text.setdefault(title_and_text, []).append(metric)

    rows = []
    for (title, text), metrics in metrics_by_text.items():
        if text:
            rows.append([title, ", ".join(metrics), text])
    if not rows:
        return None
    return Table(["", "metric", ""], rows, css="texts")


def _guide_to_retraining(basis: Basis) -> list[TitledText]:
    seeds = basis.inputs.seeds
    guide = []
    for title, text in MESSAGES["retrained"].items():
        sentence = text.format(origin=basis.origin, seeds=seeds)
        guide.append((title, sentence))
    return guide


def _guide_to_metric(run: Run, metric: str) -> list[TitledText]:
    metric_info = run.metric_info(metric)
    class_name = metric_info["class"]
    caveats = MESSAGES["caveats"].get(class_name, ())
    return [
        ("what it is", metric_info["about"]),
        *metric_info["guide"].items(),
        *(("limits", caveat) for caveat in caveats),
    ]
