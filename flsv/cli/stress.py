"""``flsv stress``: what a client gains that cheats the contribution metrics.

    flsv stress                                all ways to cheat
    flsv stress --metric my_package.MyMetric   one of your own
    flsv stress --metric cgsv --attacks sybils scaling --seeds 5
    flsv stress --safeguard none copies claims all
    flsv stress --list                         ways to cheat

Without arguments: ten metrics, in two federations of the digits. --safeguard: what the server can do about it.

One client cheats at a time, and is compared with itself in the same run without cheating: what share of all that is
paid does it get by each metric? Values lie in ``--out``, and what is there is not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.console import Console

from flsv.benchmark.federation import Federation, federations
from flsv.benchmark.page import Trials, by_gain, most, stress_markdown
from flsv.benchmark.registry import entry
from flsv.benchmark.stress import CHEATS, gain, stress
from flsv.cli.bench import show
from flsv.cli.parsers import stress_parser
from flsv.report.folder import FolderLock

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
    options = stress_parser().parse_args(list(args))
    console = Console(quiet=quiet)
    if options.list:
        rows = [[name, each.title] for name, each in CHEATS.items()]
        show(console, ["attack", "what the client does"], rows, texts=2)
        return
    say = partial(console.print, highlight=False)
    entries = dict(entry(name) for name in options.metric or METRICS)
    known = {each.name: each for each in federations(options.federations or FEDERATIONS, options.root, say)}
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
        (options.out / "stress.md").write_text(stress_markdown(trials, list(entries)), encoding="utf-8")
    _show(trials, list(entries), console)
    console.print(f"Written to {options.out}: stress.md, values.csv", highlight=False)


def _validating(federation: Federation, share: float) -> Federation:
    data = {**federation.data, "splits": {**federation.data.get("splits", {}), "client_val": share}}
    return replace(federation, name=f"{federation.name}+val", data=data)


def _show(trials: Trials, metrics: Sequence[str], console: Console) -> None:
    guards = list(dict.fromkeys(guard for _, guard in trials))
    rows = []
    for metric in by_gain(trials, metrics, guards[0]):
        cheat, best = most(trials, metric, guards[0])
        gains = [gain(trials[cheat, guard], metric) for guard in guards]
        cells = ["" if each.points != each.points else f"{each.points:+.1f}" for each in gains]
        honest = "" if best.before != best.before else f"{best.before:.1f}"
        rows.append([metric, cheat.replace("_", " "), honest, *cells])
    head = ["metric", "best cheat", "honest, %", *("gain" if guard == "none" else f"under {guard}" for guard in guards)]
    show(console, head, rows, "What the best cheat gains, in points of the payment", texts=2)
