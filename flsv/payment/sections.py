"""Parts of a page that the operator of a federation and a participant see alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pandas import DataFrame

from flsv.payment.html import Table, heatmap_table
from flsv.payment.shares import Shares
from flsv.results.basis import RETRAINED, Basis, basis_by_metric
from flsv.results.reading import Run
from flsv.results.text import MESSAGES, format_number, joined
from flsv.utilities.csv_files import NAN


def notes_on_values(
    basis: Basis,
    shares: Shares | None,
    misses_value: bool,
) -> list[str]:
    """Return sentences below the main table: where the values come from, and what its intervals and dashes mean."""
    source = basis.title if basis.key == RETRAINED else f"the metric {basis.title}"
    notes = [f"Source of the values: {source}; {basis.origin}. {basis.sentence_on_intervals}"]
    if shares is not None:
        notes.append(MESSAGES["rules"][shares.budget.rule])
        if basis.has_intervals:
            notes.append(MESSAGES["intervals"]["shares"])
    if misses_value:
        notes.append(MESSAGES["dash"])
    return notes


def bases_beside(run: Run, basis: Basis | None) -> list[Basis]:
    """Return the values by each metric that the page's main table does not show."""
    key_of_basis = None if basis is None else basis.key
    return [basis_by_metric(run, metric) for metric in run.metrics if metric != key_of_basis]


def sentences_on_intervals(bases: Iterable[Basis]) -> list[str]:
    """Return a sentence on each kind of intervals, which names the metrics that have them."""
    metrics_by_sentence: dict[str, list[str]] = {}
    for basis in bases:
        if basis.has_intervals:
            metrics_by_sentence.setdefault(basis.sentence_on_intervals, []).append(basis.key)
    return [f"{joined(keys)}: {sentence}" for sentence, keys in metrics_by_sentence.items()]


def packages(run: Run) -> dict[str, str]:
    """Return the versions of packages, by title."""
    return {f"package {name}": version for name, version in run.record["packages"].items()}


def logged(run: Run) -> dict[str, str]:
    """Format the values that the model logged last, such as its validation accuracy."""
    texts = {}
    for name, value in run.record.get("logged", {}).items():
        number = NAN if value is None else value
        texts[f"last {name}"] = format_number(number)
    return texts


def class_count_heatmap(run: Run, clients: Sequence[int], names: Sequence[str]) -> Table | None:
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

        final_values = [run.final(metric, column) for column in columns]
        values = DataFrame(final_values, index=titles)
        table = values[list(clients)].set_axis(names, axis=1).T
        heatmaps.append(heatmap_table(table, caption=f"{metric} by {kind}"))
    return heatmaps


def guide_table(run: Run, basis: Basis | None) -> Table | None:
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
