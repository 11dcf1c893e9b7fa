"""``flsv stress``: what a client gains that cheats the contribution metrics.

    flsv stress runs/lightning_logs/version_0  in a run's own federation
    flsv stress RUN --partner Boston           what could this one gain?
    flsv stress                                all ways to cheat
    flsv stress --metric my_package.MyMetric   one of your own
    flsv stress --metric cgsv --attacks sybils scaling --seeds 5
    flsv stress --safeguard none copies claims all
    flsv stress --list                         ways to cheat

With a run: its own data, module, algorithm and rounds, and its own metrics, beside pay by numbers of samples; what it
does about cheats itself (filters, aggregator) it does here, too. Without: ten metrics, in two federations of the
digits. --safeguard: what the server can do about it.

One client cheats at a time, and is compared with itself in the same run without cheating: what share of all that is
paid does it get by each metric? Values lie in ``--out``, and what is there is not run again.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from flsv.arguments import client_number
from flsv.benchmark.federation import Federation, federations
from flsv.benchmark.page import Trials, best_of_each, by_gain, most, stress_markdown
from flsv.benchmark.registry import METRICS as KNOWN
from flsv.benchmark.registry import Entry, entry
from flsv.benchmark.stress import CHEATS, gain, stress
from flsv.cli.bench import show
from flsv.cli.command import shown
from flsv.cli.own_federation import federation_of
from flsv.cli.parsers import stress_parser
from flsv.errors import ConfigurationError
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
#: Beside a run's own metrics: what clients would get by how many samples they say that they have.
SIZE = {"size": KNOWN["size"]}


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``stress`` itself.

    Args:
        args: its arguments.
        quiet: files and errors only.
    """
    options = stress_parser().parse_args(list(args))
    _check(options)
    console = Console(quiet=quiet)
    if options.list:
        rows = [[name, each.title] for name, each in CHEATS.items()]
        show(console, ["attack", "what the client does"], rows, texts=2)
        return
    say = partial(console.print, highlight=False)
    out = options.out or (Path("runs/stress") if options.run is None else options.run / "stress")
    with tempfile.TemporaryDirectory() as scratch, FolderLock(out):
        asked = _shipped(options, say) if options.run is None else _of_run(options, Path(scratch))
        guards = list(dict.fromkeys(["none", *options.safeguard]))
        cheated = (len(asked.who) or options.clients) * len(options.attacks)
        fits = len(asked.federations) * options.seeds * len(guards) * (1 + cheated)
        say(f"{fits} fits or fewer: what is in {shown(out)} is not run again.")
        trials = stress(
            asked.federations,
            asked.entries,
            options.attacks,
            guards,
            seeds=options.seeds,
            first_seed=asked.seed,
            attackers_each=options.clients,
            who=asked.who,
            options=asked.loop,
            folder=out,
            say=say,
        )
        page = stress_markdown(trials, list(asked.entries), asked.partners)
        (out / "stress.md").write_text(page, encoding="utf-8")
    _show(trials, list(asked.entries), console)
    if asked.partners:
        for name, line in best_of_each(trials, list(asked.entries), asked.partners).items():
            say(f"{name}: {line}")
    say(f"Written to {shown(out)}: stress.md, values.csv")


@dataclass(frozen=True)
class _Asked:
    """What is tried where.

    Args:
        federations: by name.
        entries: metrics by name.
        partners: names of a run's clients.
        who: those who cheat; none: as many as there shall be, evenly among all.
        loop: arguments of :class:`flsv.FederatedLoop` in all runs.
        seed: of the first.
    """

    federations: Mapping[str, Federation]
    entries: Mapping[str, Entry]
    partners: Sequence[str] = ()
    who: Sequence[int] = ()
    loop: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def _check(options: Namespace) -> None:
    if options.run is None and options.partner:
        raise ConfigurationError("--partner names clients of a run: flsv stress RUN --partner Boston.")
    if options.run is not None and (options.federations or options.client_val):
        raise ConfigurationError("A run is a federation of its own: leave --federations and --client-val out.")


def _shipped(options: Namespace, say: Callable[[str], None]) -> _Asked:
    known = {each.name: each for each in federations(options.federations or FEDERATIONS, options.root, say)}
    if options.client_val:
        known = {f"{name}+val": _validating(each, options.client_val) for name, each in known.items()}
    return _Asked(known, dict(entry(name) for name in options.metric or METRICS))


def _of_run(options: Namespace, scratch: Path) -> _Asked:
    own, metrics = federation_of(options.run, scratch)
    names = own.datamodule().client_names
    who = [*dict.fromkeys(client_number(each, names, "--partner") for each in options.partner or ())]
    entries = dict(entry(name) for name in options.metric) if options.metric else {**metrics, **SIZE}
    return _Asked({own.name: own}, entries, names, who, own.loop, own.seed)


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
