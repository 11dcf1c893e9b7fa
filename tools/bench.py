"""A benchmark of contribution metrics against retrained Shapley values.

    python tools/bench.py                                all metrics, all federations
    python tools/bench.py --metric my_package.MyMetric   a metric of your own, in minutes
    python tools/bench.py --quick                        four federations, a minute or so
    python tools/bench.py --metric cgsv --federations held_out --seeds 5
    python tools/bench.py --federations mine.yaml        a federation of your own
    python tools/bench.py --list                         metrics and federations

Federations whose data are not on this machine are left out. Every metric is
compared with the truth: the Shapley values of the game in which each coalition
of a federation's clients was trained, several times. The folder benchmark has
the truth of its own federations. For a federation of your own, the coalitions are
trained first. Finished values are kept in --out: start a stopped command again
to continue.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pandas import DataFrame

from benchmark import Federation, Truth, federation, make_truth, names, truth_table
from benchmark.federation import SETS, available_federations
from benchmark.registry import BASELINES, METRICS, Entry, entry
from benchmark.run import bench
from benchmark.scores import BenchResults
from benchmark.summary import (
    FederationTruths,
    scores_of,
    summarize,
    two_digits,
)
from benchmark.truth import SEEDS
from flsv.cli.command import command_parser, display_path, printer
from flsv.cli.entry import QUIET_OPTIONS, exit_status, hide_messages
from flsv.results.terminal import print_table
from flsv.utilities.atomic_files import FolderLock
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.one_lightning import import_as_lightning

#: Federations of ``--quick``: few clients, no download, one for each kind of difference between clients.
QUICK_FEDERATIONS = ("digits_sizes", "digits_dirichlet", "digits_label_noise", "digits_free_riders")


def _parser() -> argparse.ArgumentParser:
    out = Path("runs/benchmark")
    parser = command_parser("python tools/bench.py", __doc__)
    parser.add_argument(
        "--metric",
        action="append",
        help="a name of `python tools/bench.py --list`, or the path of a class, perhaps with arguments: "
        "'my_package.MyMetric(momentum=0.5)'. May be repeated. Default: all of --list",
    )
    parser.add_argument(
        "--federations",
        action="extend",
        nargs="+",
        help="names of `python tools/bench.py --list`, sets (tuning, held_out, fresh), or YAML files. Default: all",
    )
    parser.add_argument(
        "--out", type=Path, default=out, help=f"folder of values and tables. Default: {out}"
    )
    parser.add_argument("--list", action="store_true", help="list the metrics and federations")
    parser.add_argument("--seeds", type=int, help="number of runs of every federation. Default: 3")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"one run of each of {', '.join(QUICK_FEDERATIONS)}, unless --federations or --seeds are given",
    )
    parser.add_argument("--truth-seeds", type=int, help="number of trainings of every coalition")
    parser.add_argument(
        *QUIET_OPTIONS, action="store_true", help="no progress, no tables: errors and files only"
    )
    return parser


def main(args: Sequence[str] | None = None) -> int:
    """Run the benchmark with the command line's arguments, and return the exit status."""
    words = list(sys.argv[1:] if args is None else args)
    return exit_status(_run, words, is_resumable=True)


def _run(words: Sequence[str]) -> int:
    """Return the exit status: 1 if a metric failed in a federation or has no value in any, else 0."""
    options = _parser().parse_args(words)
    quiet = options.quiet
    import_as_lightning()  # a metric's or a module's package may import pytorch_lightning
    hide_messages(quiet=True)
    if options.list:
        _print_lists()
        return 0
    say = printer(quiet)
    entries = _entries(options.metric or METRICS)
    if any(description.is_users for description in entries.values()):
        for name in BASELINES:
            entries[name] = METRICS[name]
    out = options.out
    default_seeds = 1 if options.quick else 3
    seeds = options.seeds or default_seeds
    with FolderLock(out):
        federations = _federations_and_truths(options, say)
        results = bench(
            federations,
            entries,
            seeds=seeds,
            folder=out,
            say=say,
        )
        scores = scores_of(results, federations)
        scores.to_csv(out / "scores.csv", index=False, float_format="%.3f")
        if not quiet:
            _print_summary(summarize(scores, entries), federations)
        print(f"Written: {display_path(out)} (scores.csv, values.csv)")
        return _say_failures(results, entries)


def _entries(metrics: Iterable[str]) -> dict[str, Entry]:
    """Return the description of each metric by its short name."""
    entries: dict[str, Entry] = {}
    for metric in metrics:
        short_name, description = entry(metric)
        earlier_description = entries.setdefault(short_name, description)
        if earlier_description.made_by != description.made_by:
            raise ConfigurationError(
                f"--metric {earlier_description.made_by} and --metric {description.made_by} would both be called "
                f"{short_name}. Give one of the classes another name, or compare them in two runs."
            )
    return entries


def _federations_and_truths(
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> FederationTruths:
    """Return the requested federations and their true values, ``{name: (federation, truth)}``."""
    if options.federations:
        requested_names = options.federations
    else:
        requested_names = QUICK_FEDERATIONS if options.quick else SETS
    requested = available_federations(requested_names, say)
    packaged_names = names()
    for candidate in requested:
        if candidate.name not in packaged_names:
            candidate.check()

    num_seeds = options.truth_seeds or len(SEEDS)
    federations = {}
    for candidate in requested:
        truth = _truth(candidate, options.out, num_seeds)
        federations[candidate.name] = candidate, truth
    return federations


def _truth(candidate: Federation, out: Path, num_seeds: int) -> Truth:
    """Return a federation's true values: packaged ones, or values of coalitions that are trained now."""
    name = candidate.name
    is_packaged = name in names() and candidate == federation(name)
    if is_packaged:
        return truth_table(candidate)
    folder = out / "truths"
    if not (folder / f"{name}.csv").is_file():
        print(f"{name}: training all of its coalitions, {num_seeds} times.", flush=True)
    first_seed = SEEDS[0]
    make_truth(candidate, folder, seeds=range(first_seed, first_seed + num_seeds))
    return truth_table(candidate, folder)


def _say_failures(results: BenchResults, entries: Mapping[str, Entry]) -> int:
    """Print the first error of each failed metric, and return the exit status."""
    metrics_with_value = {metric for _federation, _seed, metric in results.values}
    reasons = dict(results.failed)
    for (name, seed, metric), reason in results.refused.items():
        if metric not in metrics_with_value:
            reasons[name, seed, metric] = reason

    errors: dict[str, str] = {}
    for (name, seed, metric), reason in reasons.items():
        if metric in entries and metric not in errors:
            errors[metric] = f"{metric} has no value in {name}, seed {seed}: {reason}"
    for error in errors.values():
        print(f"flsv: error: {error}", file=sys.stderr)
    return 1 if errors else 0


def _print_lists() -> None:
    metrics = METRICS.values()
    columns_of_metrics = {
        "what it is": [metric.title for metric in metrics],
        "needs": [", ".join(metric.requirements) or "nothing" for metric in metrics],
    }
    print_table("Metrics", list(METRICS), columns_of_metrics, corner="metric")

    federations = list(map(federation, names()))
    columns_of_federations = {
        "what it is": [packaged.title for packaged in federations],
        "set": [packaged.set.replace("_", " ") for packaged in federations],
        "data": ["there" if packaged.available else "not there" for packaged in federations],
    }
    print_table("Federations", names(), columns_of_federations, corner="federation")


def _print_summary(summary: DataFrame, federations: FederationTruths) -> None:
    plural = "s" if len(federations) > 1 else ""
    count = f"{len(federations)} federation{plural}"
    title = f"Rank correlation with the retrained Shapley values, {count}"
    set_names = {member.set for member, _ in federations.values()}
    ceilings = [truth.ceiling for _, truth in federations.values()]
    mean_ceiling = sum(ceilings) / len(federations)

    # The first row is the truth's.
    row_names = ["the truth, one other seed", *summary.index]
    columns: dict[str, list[str]] = {}
    for set_name in SETS:
        if set_name in set_names:
            head = set_name.replace("_", " ")
            columns[head] = ["", *summary[set_name].map(two_digits)]
    columns["all"] = [two_digits(mean_ceiling), *summary["all"].map(two_digits)]
    columns["worst"] = [""]
    for _, row in summary.iterrows():
        worst = two_digits(row["worst"])
        columns["worst"].append(f"{worst} {row['where']}")
    columns["misallocated"] = ["", *summary["misallocated"].map(two_digits)]
    print_table(title, row_names, columns, corner="metric")


if __name__ == "__main__":
    sys.exit(main())
