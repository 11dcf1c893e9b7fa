"""``flsv stress``: what a client gains that cheats the contribution metrics.

    flsv stress                                all ways to cheat
    flsv stress --metric my_package.MyMetric   one of your own
    flsv stress --metric cgsv --attacks sybils scaling --seeds 5
    flsv stress --safeguard none copies claims all
    flsv stress --list                         ways to cheat

Without arguments: some metrics, in two federations of the digits. --safeguard: what the server can do about it.

One client cheats at a time, and is compared with itself in the same run without cheating: what share of all that is
paid does it get by each metric? Values lie in ``--out``, and what is there is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flsv.benchmark.cheating import CHEATS, SAFEGUARDS
from flsv.benchmark.federation import Federation, federations
from flsv.benchmark.registry import entry
from flsv.benchmark.stress import gain, stress
from flsv.benchmark.stress_page import Trials, by_gain, markdown, most
from flsv.cli.help import command_parser, positive
from flsv.report.folder_lock import FolderLock

METRICS = (
    "size",
    "cssv",
    "cgsv",
    "fedsv",
    "fedsv_samples",
    "banzhaf",
    "decayed_sum",
    "gradient_1",
    "gradient_agreement",
    "flsv.metrics.LowerBoundShapley",
)
FEDERATIONS = ("digits_dirichlet", "digits_sizes")


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``stress`` itself.

    Args:
        args: its arguments.
        quiet: files and errors only.
    """
    options = _parser().parse_args(list(args))
    console = Console(quiet=quiet)
    if options.list:
        table = Table("attack", "what the client does", box=SIMPLE_HEAD)
        for name, each in CHEATS.items():
            table.add_row(name, each.title)
        console.print(table)
        return
    say = partial(console.print, highlight=False)
    entries = dict(entry(name) for name in options.metric or METRICS)
    known = {each.name: each for each in federations(options.federations, options.root, say)}
    if options.client_val:
        known = {f"{name}+val": _validating(each, options.client_val) for name, each in known.items()}
    with FolderLock(options.out):
        trials = stress(
            known,
            entries,
            options.attacks,
            list(dict.fromkeys(["none", *options.safeguard])),
            seeds=options.seeds,
            attackers_each=options.clients,
            folder=options.out,
            say=say,
        )
        (options.out / "stress.md").write_text(markdown(trials, list(entries)), encoding="utf-8")
    _show(trials, list(entries), console)
    console.print(f"Written to {options.out}: stress.md, values.csv", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("flsv stress", __doc__)
    parser.add_argument(
        "--metric",
        action="append",
        help="a name of `flsv bench --list`, or the path of a class, perhaps with arguments; give several. Default: "
        + ", ".join(METRICS),
    )
    parser.add_argument(
        "--attacks",
        nargs="+",
        choices=list(CHEATS),
        default=list(CHEATS),
        metavar="ATTACK",
        help="names of --list. Default: all",
    )
    parser.add_argument(
        "--safeguard",
        nargs="+",
        choices=list(SAFEGUARDS),
        metavar="SAFEGUARD",
        default=["copies"],
        help="beside none: copies (FederatedLoop(copy_threshold=0.7, copy_gap=0.45): nothing for who is held), claims "
        "(norm_cap=1.25, sample_cap=1.25), all (these two), uniform (equal weights), both (copies and uniform). "
        "Default: copies",
    )
    parser.add_argument(
        "--federations",
        nargs="+",
        default=list(FEDERATIONS),
        help=f"names of `flsv bench --list`, tuning, held_out, or YAML files. Default: {', '.join(FEDERATIONS)}",
    )
    parser.add_argument("--seeds", type=positive, default=2, help="runs of every federation")
    parser.add_argument("--clients", type=positive, default=2, help="clients that cheat in turn, for every seed")
    parser.add_argument(
        "--client-val",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of every client's samples that it keeps to judge models by, for metrics that ask it to, such as "
        "flsv.metrics.EverybodyElse; the federation's results are kept under its name with +val",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/stress"), help="folder of values and tables")
    parser.add_argument("--root", default=None, help="folder of the data. Default: $FLSV_DATA_ROOT")
    parser.add_argument("--list", action="store_true", help="say which ways to cheat there are")
    return parser


def _validating(federation: Federation, share: float) -> Federation:
    data = {**federation.data, "client_val_fraction": share}
    return replace(federation, name=f"{federation.name}+val", data=data)


def _show(trials: Trials, metrics: Sequence[str], console: Console) -> None:
    guards = list(dict.fromkeys(guard for _, guard in trials))
    table = Table(title=Text("What the best cheat gains, in points of the payment", style="table.title"))
    table.box, table.title_justify = SIMPLE_HEAD, "left"
    table.add_column("metric")
    table.add_column("honest, %", justify="right")
    table.add_column("best cheat")
    for guard in guards:
        table.add_column("gain" if guard == "none" else f"under {guard}", justify="right")
    for metric in by_gain(trials, metrics, guards[0]):
        cheat, best = most(trials, metric, guards[0])
        gains = [gain(trials[cheat, guard], metric) for guard in guards]
        cells = ["" if each.points != each.points else f"{each.points:+.1f}" for each in gains]
        honest = "" if best.before != best.before else f"{best.before:.1f}"
        table.add_row(Text(metric), honest, cheat.replace("_", " "), *cells)
    console.print(table)
