"""flsv bench: a benchmark of contribution metrics against retrained Shapley
values.

    flsv bench                                all metrics, all federations
    flsv bench --metric my_package.MyMetric   a metric of your own, in minutes
    flsv bench --quick                        four federations, a minute or so
    flsv bench --metric cgsv --federations held_out --seeds 5
    flsv bench --federations mine.yaml        a federation of your own
    flsv bench --list                         metrics and federations

Federations whose data are not on this machine are left out. Every metric is
compared with the truth: the Shapley values of the game in which each coalition
of a federation's clients was trained, several times. The package contains the
truth of its own federations. For a federation of your own, the coalitions are
trained first. Finished values are kept in --out: start a stopped command again
to continue.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pandas import DataFrame

from flsv.benchmark import Federation, Truth, federation, make_truth, names, truth_table
from flsv.benchmark.federation import SETS, available_federations
from flsv.benchmark.registry import BASELINES, METRICS, Entry, entry
from flsv.benchmark.run import bench
from flsv.benchmark.scores import BenchResults
from flsv.benchmark.summary import (
    Cost,
    Known,
    by_federation,
    by_set,
    costs,
    scores_of,
    summarize,
    two_digits,
)
from flsv.benchmark.truth import SEEDS
from flsv.cli.command import command_parser, display_path, from_1, printer
from flsv.cli.options import STRICT_HELP
from flsv.results.folder import FolderLock
from flsv.results.terminal import print_table
from flsv.utilities.formats import refuse_other_versions

#: The federation in which costs are measured, which needs no download.
COSTS_IN = "digits_dirichlet"
#: Federations of ``--quick``: few clients, no download, one for each kind of difference between clients.
QUICK = ("digits_sizes", "digits_dirichlet", "digits_label_noise", "digits_free_riders")


def _parser() -> argparse.ArgumentParser:
    out = Path("runs/benchmark")
    parser = command_parser("flsv bench", __doc__)
    parser.add_argument(
        "--metric",
        action="append",
        help="a name of `flsv bench --list`, or the path of a class, perhaps with arguments: "
        "'my_package.MyMetric(momentum=0.5)'. May be repeated. Default: all of --list",
    )
    parser.add_argument(
        "--federations",
        nargs="+",
        help="names of `flsv bench --list`, sets (tuning, held_out, fresh), or YAML files. Default: all",
    )
    parser.add_argument(
        "--out", type=Path, default=out, help=f"folder of values and tables. Default: {out}"
    )
    parser.add_argument("--list", action="store_true", help="list the metrics and federations")
    parser.add_argument(
        "--seeds", type=from_1, help="number of runs of every federation. Default: 3"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"one run of each of {', '.join(QUICK)}, unless --federations or --seeds are given. Without costs",
    )
    parser.add_argument("--truth-seeds", type=from_1, help="number of trainings of every coalition")
    parser.add_argument("--strict", action="store_true", help=STRICT_HELP)
    return parser


def main(args: Sequence[str], quiet: bool = False) -> int:
    """Run ``flsv bench`` with the command-line arguments ``args``.

    Return the exit status: 1 if a metric failed in a federation or has no value in any, else 0.
    """
    options = _parser().parse_args(list(args))
    if options.strict:
        refuse_other_versions()
    if options.list:
        _list()
        return 0
    say, entries = printer(quiet), dict(map(entry, options.metric or METRICS))
    if any(candidate.own for candidate in entries.values()):
        entries |= {name: METRICS[name] for name in BASELINES}
    with FolderLock(options.out):
        truths = _known(options, say)
        seeds = options.seeds or (1 if options.quick else 3)
        results = bench(truths, entries, seeds=seeds, folder=options.out, say=say)
        cost = {} if options.quick else _costs(truths, entries, options.out / "costs.csv", say)
        summary = _report(options.out, results, truths, entries, cost)
        if not quiet:
            _show(summary, truths)
        files = [
            "benchmark.csv",
            "federations.csv",
            *([] if options.quick else ["costs.csv"]),
            "values.csv",
        ]
        print(f"Written: {display_path(options.out)} ({', '.join(files)})")
        return _say_failures(results, entries)


def _known(options: argparse.Namespace, say: Callable[[str], None]) -> Known:
    """Return the requested federations and their true values, ``{name: (federation, truth)}``."""
    asked = available_federations(options.federations or (QUICK if options.quick else SETS), say)
    for each in asked:
        if each.name not in names():
            each.check()
    return {
        each.name: (each, _truth(each, options.out, options.truth_seeds or len(SEEDS)))
        for each in asked
    }


def _truth(each: Federation, out: Path, seeds: int) -> Truth:
    """Return a federation's true values: packaged ones, or values of coalitions that are trained now."""
    if each.name in names() and each == federation(each.name):
        return truth_table(each)
    folder = out / "truths"
    if not (folder / f"{each.name}.csv").is_file():
        print(f"{each.name}: training all of its coalitions, {seeds} times.", flush=True)
    make_truth(each, folder, range(SEEDS[0], SEEDS[0] + seeds))
    return truth_table(each, folder)


def _say_failures(results: BenchResults, entries: Mapping[str, Entry]) -> int:
    """Print the first error of each metric that failed or has no value, and return the exit status."""
    valued = {metric for _, _, metric in results.values}
    refused = {key: why for key, why in results.refused.items() if key[2] not in valued}
    wrong: dict[str, str] = {}
    for (name, seed, metric), why in (results.failed | refused).items():
        if metric in entries:
            wrong.setdefault(metric, f"{metric} has no value in {name}, seed {seed}: {why}")
    for text in wrong.values():
        print(f"flsv: error: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _report(
    out: Path,
    results: BenchResults,
    known: Known,
    entries: Mapping[str, Entry],
    cost: Mapping[str, Cost],
) -> DataFrame:
    """Write the tables as CSV files into ``out``, and return the result of :func:`summarize`."""
    summary = summarize(results, known, entries)
    table = by_set(results, known, entries, cost)
    table.to_csv(out / "benchmark.csv", index=False, float_format="%.3f")
    ranks = by_federation(scores_of(results, known)).T.assign(
        ceiling={name: each.ceiling for name, (_, each) in known.items()}
    )
    ranks.to_csv(out / "federations.csv", float_format="%.3f")
    return summary


def _costs(
    known: Known, entries: Mapping[str, Entry], path: Path, say: Callable[[str], None]
) -> Mapping[str, Cost]:
    """Measure each metric's cost, ``{metric: cost}``, in the federation :data:`COSTS_IN`, or else the user's own."""
    own = [each for name, (each, _) in known.items() if name not in names()]
    return costs(
        known[COSTS_IN][0] if COSTS_IN in known else (*own, federation(COSTS_IN))[0],
        entries,
        path,
        say=say,
    )


def _list() -> None:
    found = [federation(name) for name in names()]
    metrics = {"what it is": [each.title for each in METRICS.values()]}
    metrics["needs"] = [", ".join(each.needed) or "nothing" for each in METRICS.values()]
    columns: dict[str, list[str]] = {"what it is": [each.title for each in found]}
    columns["set"] = [each.set.replace("_", " ") for each in found]
    columns["data"] = ["there" if each.available else "not there" for each in found]
    print_table("Metrics", list(METRICS), metrics, corner="metric")
    print_table("Federations", names(), columns, corner="federation")


def _show(summary: DataFrame, known: Known) -> None:
    title = f"Rank correlation with the retrained Shapley values, {len(known)} federation{'s' * (len(known) > 1)}"
    ceiling = sum(truth.ceiling for _, truth in known.values()) / len(known)
    sets = [which for which in SETS if any(each.set == which for each, _ in known.values())]
    columns: dict[str, list[str]] = {
        which.replace("_", " "): ["", *summary[which].map(two_digits)] for which in sets
    }
    columns["all"] = [two_digits(ceiling), *summary["all"].map(two_digits)]
    columns["worst"] = [
        "",
        *(f"{two_digits(row['worst'])} {row['where']}" for _, row in summary.iterrows()),
    ]
    print_table(title, ["the truth, one other seed", *summary.index], columns, corner="metric")
