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


def bench_parser() -> ArgumentParser:
    """Of ``flsv bench``."""
    out = Path("runs/benchmark")
    parser = command_parser("flsv bench", about("bench"))
    parser.add_argument(
        "--metric",
        action="append",
        help="a name of `flsv bench --list`, or the path of a class, perhaps with arguments: "
        "'my_package.MyMetric(momentum=0.5)'; give several. Default: all of --list",
    )
    parser.add_argument(
        "--federations",
        nargs="+",
        help="names of `flsv bench --list`, sets (tuning, held_out, fresh), or YAML files. Default: all",
    )
    parser.add_argument("--out", type=Path, default=out, help=f"folder of values, tables and pictures. Default: {out}")
    parser.add_argument("--root", help="folder of the data. Default: $FLSV_DATA_ROOT")
    parser.add_argument("--list", action="store_true", help="say which metrics and federations there are")
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


PARSERS: dict[str, Callable[[], ArgumentParser]] = {
    "compare": compare_parser,
    "repeat": repeat_parser,
    "retrain": retrain_parser,
    "bench": bench_parser,
}
