"""``flsv bench``: which contribution metric to trust.

    flsv bench                                all metrics, all federations
    flsv bench --metric my_package.MyMetric   one of your own, in minutes
    flsv bench --quick                        two runs, no other aggregators
    flsv bench --metric cgsv --federations held_out --seeds 5
    flsv bench --federations mine.yaml        one of your own; its truth first
    flsv bench --list                         metrics and federations

Federations whose data are not there are left out. Every metric is measured against the truth: the Shapley values of the
game in which each coalition of a federation's clients was really trained, several times. The package holds these
tables; ``flsv bench --truth`` makes them, and goes on where it was stopped. So does the benchmark itself, whose values
lie in ``--out``. Under ``torchrun`` the fits are shared out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flsv.benchmark import Federation, Truth, federation, make_truth, names, truth_table
from flsv.benchmark.conditions import AGGREGATORS, CONDITIONS
from flsv.benchmark.federation import SETS, federations
from flsv.benchmark.page import markdown, write
from flsv.benchmark.registry import METRICS, entry
from flsv.benchmark.run import bench
from flsv.benchmark.summary import Summary, costs, summarise
from flsv.benchmark.truth import SEEDS, settings
from flsv.cli.help import command_parser, positive
from flsv.drawing import drawing
from flsv.engines.ranks import ranks_of_environment

#: Where costs are measured: it needs no download.
COSTS_IN = "digits_dirichlet"


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``bench`` itself."""
    options = _parser().parse_args(list(args))
    if options.list:
        _list()
        return
    ranks = ranks_of_environment()
    say = _nothing if quiet or ranks.rank else partial(print, flush=True)
    asked = federations(options.federations or SETS, options.root, say)
    if options.truth:
        for each in asked[ranks.rank :: ranks.size]:
            trained = make_truth(each, options.out, range(SEEDS[0], SEEDS[0] + options.truth_seeds))
            say(f"{each.name}: {trained} coalitions trained, in {options.out / each.name}.csv")
        return
    entries = dict(entry(name) for name in options.metric or METRICS)
    known: dict[str, tuple[Federation, Truth]] = {}
    for each in asked:
        if ranks.rank:  # what is not there yet, the first rank makes
            ranks.everybody(None, "the truth")
        known[each.name] = (each, _truth(each, options.out, options.truth_seeds, ranks.rank))
        if not ranks.rank:
            ranks.everybody(None, "the truth")
    usual = [each for each in CONDITIONS if each not in AGGREGATORS] if options.quick else list(CONDITIONS)
    chosen = ["base", *(options.conditions if options.conditions is not None else usual)]
    results = bench(
        known,
        entries,
        seeds=options.seeds or (2 if options.quick else 3),
        conditions=list(dict.fromkeys(chosen)),
        folder=options.out,
        ranks=ranks,
        say=say,
    )
    if ranks.rank:
        return
    cost_in = known[COSTS_IN][0] if COSTS_IN in known else federation(COSTS_IN)
    cost = costs(cost_in, entries, options.out / "costs.csv", say=say)
    summaries = {name: summarise(results, known, name) for name in entries}
    (options.out / "benchmark.md").write_text(markdown(summaries, entries, known, cost), encoding="utf-8")
    with drawing("benchmark.png"):
        write(options.out, summaries, cost, known)
    if not quiet:
        _show(summaries, known)
    say(
        f"Written to {options.out}: benchmark.md, benchmark.png, values.csv, costs.csv. "
        f"{time.process_time() / 60:.1f} minutes of the processor."
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("flsv bench", __doc__)
    parser.add_argument(
        "--metric",
        action="append",
        help="a name of --list, or the path of a class, perhaps with arguments: 'my_package.MyMetric(momentum=0.5)'; "
        "give several. Default: all of --list",
    )
    parser.add_argument(
        "--federations", nargs="+", default=None, help="names of --list, tuning, held_out, or YAML files. Default: all"
    )
    parser.add_argument("--seeds", type=positive, default=None, help="runs of every federation. Default: 3")
    parser.add_argument(
        "--quick", action="store_true", help="two runs of every federation, and no other aggregators, unless you say so"
    )
    parser.add_argument(
        "--conditions",
        nargs="*",
        choices=list(CONDITIONS),
        metavar="CONDITION",
        default=None,
        help=f"what else than the run as it is, once each: {', '.join(CONDITIONS)}; nothing: only that. Default: all",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="folder of values, tables and picture")
    parser.add_argument("--root", default=None, help="folder of the data. Default: $FLSV_DATA_ROOT")
    parser.add_argument("--truth", action="store_true", help="train all coalitions, and write their utilities to --out")
    parser.add_argument("--truth-seeds", type=positive, default=len(SEEDS), help="trainings of every coalition")
    parser.add_argument("--list", action="store_true", help="say which metrics and federations there are")
    return parser


def _truth(each: Federation, out: Path, seeds: int, rank: int) -> Truth:
    shipped = federation(each.name) if each.name in names() else None
    if shipped is not None and settings(shipped) == settings(each):
        return truth_table(each)
    folder = out / "truths"
    if rank == 0:
        if not (folder / f"{each.name}.csv").is_file():
            print(f"{each.name}: training all of its coalitions, {seeds} times.", flush=True)
        make_truth(each, folder, range(SEEDS[0], SEEDS[0] + seeds))
    return truth_table(each, folder)


def _list() -> None:
    console = Console()
    table = Table("metric", "what it is", "needs", box=SIMPLE_HEAD)
    for name, each in METRICS.items():
        table.add_row(name, each.title, ", ".join(each.needs) or "nothing")
    console.print(table)
    table = Table("federation", "what it is", "set", "data", box=SIMPLE_HEAD)
    for name in names():
        found = federation(name)
        table.add_row(name, found.title, found.set.replace("_", " "), "there" if found.available else "not there")
    console.print(table)


def _show(summaries: dict[str, Summary], known: dict[str, tuple[Federation, Truth]]) -> None:
    title = f"Rank correlation with the retrained Shapley values, {len(known)} federations"
    table = Table(title=Text(title, style="table.title"), title_justify="left", box=SIMPLE_HEAD)
    for name in ("metric", "tuning", "held out", "all", "worst"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    ceiling = sum(truth.ceiling for _, truth in known.values()) / len(known)
    table.add_row("the truth, one other seed", "", "", f"{ceiling:.2f}", "")
    for name, each in sorted(
        summaries.items(), key=lambda item: -(item[1].mean if item[1].mean == item[1].mean else -2)
    ):
        where, worst = each.worst
        numbers = ("" if value != value else f"{value:.2f}" for value in (each.tuning, each.held_out, each.mean, worst))
        *cells, least = numbers
        table.add_row(Text(name), *cells, f"{least} {where}")
    Console().print(table)


def _nothing(*_: object) -> None:
    return None
