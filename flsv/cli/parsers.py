"""The parsers of commands that are slow to import: their help, and what is wrong with their own options, come first."""

from __future__ import annotations

import ast
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from flsv.cli.command import command_parser, existing, positive

#: As in :mod:`flsv.functional.shapley.few_coalitions` and :mod:`flsv.benchmark.run`, which import torch.
TRAININGS = ("singles", "pairs", "leave-one-out", "both", "all")
CONDITIONS = ("base", "partial", "dropout", "private", "uniform", "median")


def about(command: str) -> str | None:
    """The docstring of a command's module, which is not imported."""
    return ast.get_docstring(ast.parse(Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")))


def compare_parser() -> ArgumentParser:
    """Of ``flsv compare``; further arguments are those of ``flsv fit``."""
    further = "Further arguments are those of flsv fit and override the files: --trainer.max_epochs 5"
    parser = command_parser("flsv compare", about("compare"), further)
    parser.add_argument("--config", action="append", required=True, help="an algorithm; give several")
    parser.add_argument("--base", action="append", default=[], help="comes before every algorithm; may be given twice")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of the tables and the runs")
    parser.add_argument(
        "--models",
        choices=("received", "trained"),
        default="received",
        help="the clients' models that are shown: those received after the last round, or those they trained in it",
    )
    parser.add_argument(
        "--tests",
        choices=("shared", "own"),
        default="shared",
        help="what they are tested on: the test set that no client has, or each client's own test split, as suits "
        "personalised models",
    )
    return parser


def repeat_parser() -> ArgumentParser:
    """Of ``flsv repeat``, likewise."""
    further = "Further arguments are those of flsv fit: --config quickstart --trainer.max_epochs 5"
    parser = command_parser("flsv repeat", about("repeat"), further)
    parser.add_argument("runs", metavar="N", type=_runs, help="how many runs; before all other arguments")
    parser.add_argument("--out", type=Path, default=Path("runs/repeat"), help="folder of the runs and the summary")
    parser.add_argument("--first-seed", type=int, default=0, help="the seeds are this one and those after it")
    parser.add_argument("--aggregator", action="append", default=[], help="give several: they take turns, one a run")
    return parser


def _runs(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(
            f"how many runs? It comes first: flsv repeat 5 --config quickstart; got {text!r}"
        ) from None


def retrain_parser() -> ArgumentParser:
    """Of ``flsv retrain``, likewise."""
    further = "Further arguments are those of flsv fit and override the run's configuration."
    parser = command_parser("flsv retrain", about("retrain"), further)
    parser.add_argument("run", metavar="RUN", type=existing, help="the run's folder")
    parser.add_argument(
        "--trainings",
        choices=TRAININGS,
        help="each client alone (n + 1 trainings), every two, too (n (n + 1) / 2 + 1), all but one (n + 1), both "
        "(2 n + 1), or all coalitions; default: "
        "all of up to ten clients that can be trained side by side, else both",
    )
    parser.add_argument(
        "--metric",
        help="what a model is worth: accuracy, balanced_accuracy, negative_loss, auroc, average_precision, f1, or what "
        "the module logs; default: what the run's metrics valued by",
    )
    parser.add_argument("--mode", choices=("min", "max"), help="whether less or more of a logged value is better")
    parser.add_argument("--rounds", type=positive, help="of each training; default: the run's")
    parser.add_argument(
        "--hint", metavar="METRIC", help="a metric of the run, OneRoundShapley, that joins the fit of singles"
    )
    parser.add_argument(
        "--seeds", type=positive, default=1, help="trainings of each coalition; their spread is the noise"
    )
    return parser


def benchmark_parser(
    name: str, description: str | None, metrics: str, federations: str, out: Path | None, listed: str, where: str = ""
) -> ArgumentParser:
    """The options that ``bench`` and ``stress`` have in common.

    Args:
        name: of the command.
        description: its module's docstring.
        metrics: which are tried by default, in words.
        federations: likewise.
        out: where values and tables go by default; None: that hangs on other options.
        listed: what ``--list`` says.
        where: in words, where that hangs on other options.
    """
    parser = command_parser(name, description)
    parser.add_argument(
        "--metric",
        action="append",
        help="a name of `flsv bench --list`, or the path of a class, perhaps with arguments: "
        f"'my_package.MyMetric(momentum=0.5)'; give several. Default: {metrics}",
    )
    parser.add_argument(
        "--federations",
        nargs="+",
        help=f"names of `flsv bench --list`, sets (tuning, held_out, fresh), or YAML files. Default: {federations}",
    )
    parser.add_argument(
        "--out", type=Path, default=out, help=f"folder of values, tables and pictures. Default: {where or out}"
    )
    parser.add_argument("--root", help="folder of the data. Default: $FLSV_DATA_ROOT")
    parser.add_argument("--list", action="store_true", help=f"say which {listed} there are")
    return parser


def bench_parser() -> ArgumentParser:
    """Of ``flsv bench``."""
    listed = "metrics and federations"
    parser = benchmark_parser("flsv bench", about("bench"), "all of --list", "all", Path("runs/benchmark"), listed)
    parser.add_argument("--seeds", type=positive, default=None, help="runs of every federation. Default: 3")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two runs of every federation, no other aggregators, none of many clients, unless you say so",
    )
    parser.add_argument(
        "--conditions",
        nargs="*",
        choices=CONDITIONS,
        metavar="CONDITION",
        default=None,
        help=f"what else than the run as it is, once each: {', '.join(CONDITIONS)}; nothing: only that. Default: all",
    )
    parser.add_argument("--truth", action="store_true", help="train the coalitions, and write their utilities to --out")
    parser.add_argument("--truth-seeds", type=positive, help="trainings of every coalition")
    return parser


def stress_parser() -> ArgumentParser:
    """Of ``flsv stress``."""
    from flsv.benchmark.stress import CHEATS, SAFEGUARDS
    from flsv.cli.stress import FEDERATIONS, METRICS

    cheats, safeguards = tuple(CHEATS), tuple(SAFEGUARDS)
    metrics, where, listed = ", ".join(METRICS), ", ".join(FEDERATIONS), "ways to cheat"
    own = "RUN/stress with a run, else runs/stress"
    parser = benchmark_parser("flsv stress", about("stress"), metrics, where, None, listed, own)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        type=existing,
        help="a run's folder: clients cheat in its own federation, under its own metrics and size",
    )
    parser.add_argument(
        "--partner", nargs="+", metavar="CLIENT", help="with a run: names or numbers of those who cheat in turn"
    )
    parser.add_argument(
        "--attacks",
        nargs="+",
        choices=cheats,
        default=cheats,
        metavar="ATTACK",
        help="names of --list. Default: all",
    )
    parser.add_argument(
        "--safeguard",
        nargs="+",
        choices=safeguards,
        metavar="SAFEGUARD",
        default=["copies"],
        help="beside none: copies (CopyFilter(): nothing for who is held), claims "
        "(NormCap(1.25), SampleCap(1.25)), all (these two), uniform (equal weights), both (copies and uniform). "
        "Their filters stand in the place of a run's own. Default: copies",
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
    return parser


PARSERS: dict[str, Callable[[], ArgumentParser]] = {
    "compare": compare_parser,
    "repeat": repeat_parser,
    "retrain": retrain_parser,
    "bench": bench_parser,
    "stress": stress_parser,
}
