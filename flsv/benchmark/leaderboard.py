"""The benchmark's leaderboard: a page to sort, the same as CSV, and what a paper needs of it, BibTeX and a row of LaTeX
for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from flsv import __version__
from flsv._lightning.durable import replacing
from flsv.benchmark.federation import SETS
from flsv.benchmark.page import best_first, two
from flsv.benchmark.registry import Entry
from flsv.benchmark.scores import mean
from flsv.benchmark.summary import Cost, Known, Summary
from flsv.csv_files import save_csv

#: Column to what it says.
COLUMNS = {
    "metric": "its name for flsv bench --metric",
    "all": "mean rank correlation with retrained Shapley values",
    **{each: f"the same, in the federations of the set {each}" for each in SETS},
    "interval": "half the width of the 90 % interval of all, over the seeds",
    "worst": "the same, in the worst federation",
    "pearson": "Pearson's correlation",
    "share_error": "mean error of the clients' shares",
    "covered": "share of retrained values within the metric's own 90 % intervals",
    "cpu_ms": "time of the processor a round, milliseconds",
    "evaluations": "models evaluated a round",
    "federations": "in how many it has values",
    "needs": "what it needs",
}
#: Those of a row of LaTeX.
IN_LATEX = ("all", *SETS, "pearson", "share_error", "cpu_ms")
BIBTEX = f"""@software{{flsv,
  title = {{flsv: federated learning on PyTorch Lightning in which every participant's contribution is measured}},
  author = {{{{The flsv contributors}}}},
  version = {{{__version__}}},
  year = {{2026}},
}}"""


def leaderboard(
    summaries: Mapping[str, Summary], entries: Mapping[str, Entry], costs: Mapping[str, Cost]
) -> list[dict[str, str]]:
    """A row per metric, best first, by the names in :data:`COLUMNS`; what is not known is empty.

    Args:
        summaries: by metric.
        entries: likewise.
        costs: by metric, where they are known.
    """
    rows = []
    for name in best_first(summaries):
        each, cost = summaries[name], costs.get(name)
        cells: dict[str, float | None] = {
            "all": each.mean,
            **{which: each.sets.get(which) for which in SETS},
            "interval": each.interval,
            "worst": each.worst[1],
            "pearson": each.pearson,
            "share_error": each.error,
            "covered": None if each.intervals is None else each.intervals.truth,
        }
        told = {"metric": name, **{column: two(value) for column, value in cells.items()}}
        told["cpu_ms"] = "" if cost is None else f"{1000 * cost.seconds:.1f}"
        told["evaluations"] = "" if cost is None else f"{cost.evaluations:.0f}"
        told |= {"federations": str(len(each.spearman)), "needs": ", ".join(entries[name].needed) or "nothing"}
        rows.append(told)
    return rows


def latex_row(row: Mapping[str, str]) -> str:
    r"""A metric's row of a table in a paper.

    Example:
        >>> row = dict.fromkeys(COLUMNS, "") | {"metric": "my_metric", "all": "0.79", "interval": "0.02"}
        >>> print(latex_row({**row, "cpu_ms": "1.2"}))
        \texttt{my\_metric} & $0.79 \pm 0.02$ & -- & -- & -- & -- & -- & 1.2 \\
    """
    name = "".join(rf"\{letter}" if letter in "_&%$#{}" else letter for letter in row["metric"])
    cells = [row[column] or "--" for column in IN_LATEX]
    if row.get("interval"):
        cells[IN_LATEX.index("all")] = rf"${row['all']} \pm {row['interval']}$"
    return rf"\texttt{{{name}}} & {' & '.join(cells)} \\"


def write_leaderboard(
    folder: Path,
    summaries: Mapping[str, Summary],
    entries: Mapping[str, Entry],
    federations: Known,
    costs: Mapping[str, Cost],
    name: str = "leaderboard",
) -> list[str]:
    """The page and the CSV file, ``name.html`` and ``name.csv``.

    Args:
        folder: where.
        summaries: by metric.
        entries: likewise.
        federations: by name, each with its truth.
        costs: by metric, where they are known.
        name: of the files.

    Returns:
        Their names.
    """
    rows = leaderboard(summaries, entries, costs)
    save_csv(folder / f"{name}.csv", [[*COLUMNS], *([row[column] for column in COLUMNS] for row in rows)])
    ceiling = two(mean([truth.ceiling for _, truth in federations.values()]))
    with replacing(folder / f"{name}.html") as file:
        file.write(_page(rows, [*federations], ceiling, [key for key, each in entries.items() if each.own]).encode())
    return [f"{name}.html", f"{name}.csv"]


def _page(rows: Sequence[Mapping[str, str]], federations: Sequence[str], ceiling: str, own: Sequence[str]) -> str:
    templates = Environment(loader=PackageLoader("flsv.benchmark"), autoescape=True, undefined=StrictUndefined)
    head = [column.replace("_", " ") for column in IN_LATEX]
    latex = ["metric & " + " & ".join(head) + r" \\ \hline", *map(latex_row, rows)]
    told = {"rows": rows, "columns": COLUMNS, "federations": federations, "ceiling": ceiling, "own": own}
    return templates.get_template("leaderboard.html").render(**told, latex="\n".join(latex), bibtex=BIBTEX)
