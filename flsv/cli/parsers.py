"""The parsers of commands that are slow to import: what is wrong with their arguments is said before torch is there."""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml

from flsv.cli.command import check_clients, command_parser, existing, positive
from flsv.cli.configs import SECTIONS
from flsv.cli.names import PACKAGE, check_options, declared, docstring
from flsv.cli.values import check_class, check_values
from flsv.errors import ConfigurationError

#: Options of ``flsv value`` beside its sections; and sections of a configuration that mean nothing there.
VALUE = ("--validation", "--pictures", "--out", "--device", "--seed")
UNUSED = ("seed_everything", "trainer", "model", "federation", "ckpt_path", "optimizer", "lr_scheduler")
#: Likewise for ``flsv data``.
UNUSED_BY_DATA = (*UNUSED, "value")


def check_arguments(command: str, arguments: Sequence[str]) -> None:
    """Check the arguments of a command, and of ``flsv fit`` where it takes those, too.

    Raises:
        SystemExit: 2, when it has said what is wrong.
    """
    if command in FURTHER:
        parser = FURTHER[command]()
        options, _ = parser.parse_known_args(list(arguments))
        check_options(arguments, [option for action in parser._actions for option in action.option_strings])
        if command == "retrain":
            _check_measure(options.metric, options.mode)
        for name in getattr(options, "aggregator", ()):
            check_class("--aggregator", name, "Aggregator")
        check_values(arguments, SECTIONS, one=command != "compare")
    elif command == "value":
        check_unused(arguments)
        check_options(arguments, VALUE, ("data", "value"))
        check_values(arguments, ("data", "value"))
    elif command == "data":
        check_options(arguments, ("--out", *(f"--{section}" for section in UNUSED_BY_DATA)), ("data",))
        check_values(arguments, ("data",))
    elif command in PARSERS:
        options = PARSERS[command]().parse_args(list(arguments))
        _check_names(options.metric or (), options.federations or ())
        if getattr(options, "run", None) is not None:
            check_clients(options.run, options.partner or (), "--partner")


def _check_names(metrics: Iterable[str], federations: Iterable[str]) -> None:
    """Raise ConfigurationError for what ``flsv bench --list`` does not have, and is no path of one's own."""
    known = [*yaml.safe_load((PACKAGE / "benchmark" / "metrics.yaml").read_text(encoding="utf-8"))]
    for name in metrics:
        path = name.partition("(")[0]
        if name in known:
            continue
        if "." in path:
            check_class("--metric", path, "Metric")
        else:
            raise ConfigurationError(_no_name("metric", name, known, "or the path of a class, my_package.MyMetric"))
    sets = declared("benchmark/federation.py", "SETS")
    known = [*sets, *sorted(path.stem for path in (PACKAGE / "benchmark" / "federations").glob("*.yaml"))]
    for name in federations:
        if name not in known and not (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
            raise ConfigurationError(_no_name("federation", name, known, "or a YAML file"))


def _no_name(what: str, name: str, known: Sequence[str], other: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}, {other}."
    return f"there is no {what} {name!r}. {hint}"


def _check_measure(metric: str | None, mode: str | None) -> None:
    """Raise ConfigurationError for a measure that is none of a classifier's, and is not said to be logged."""
    known = (*declared("games/performance.py", "CLASSIFICATION"), *declared("games/scores.py", "CLASS_SCORES"))
    if metric is None or mode is not None or metric in (*known, "per_class_accuracy"):
        return
    raise ConfigurationError(
        f"--metric {metric}: expected one of {', '.join(known)}; or, with --mode min or --mode max, what the module "
        "logs in validation_step."
    )


def check_unused(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError where ``flsv value`` is given an option of a fit."""
    for section in UNUSED:
        given = [
            arg for arg in arguments if arg == f"--{section}" or arg.startswith((f"--{section}.", f"--{section}="))
        ]
        if given:
            raise ConfigurationError(
                f"{given[0]}: flsv value trains nothing. Of a configuration file of flsv fit it looks at data and "
                "value only; on the command line, give options of these."
            )


def compare_parser() -> ArgumentParser:
    """Of ``flsv compare``; further arguments are those of ``flsv fit``."""
    further = "Further arguments are those of flsv fit and override the files: --trainer.max_epochs 5"
    parser = command_parser("flsv compare", docstring("cli/compare.py"), further)
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
    parser = command_parser("flsv repeat", docstring("cli/repeat.py"), further)
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
    parser = command_parser("flsv retrain", docstring("cli/retrain.py"), further)
    parser.add_argument("run", metavar="RUN", type=existing, help="the run's folder")
    parser.add_argument(
        "--trainings",
        choices=declared("functional/shapley/few_coalitions.py", "Which"),
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
    conditions = declared("benchmark/run.py", "CONDITIONS")
    listed = "metrics and federations"
    parser = benchmark_parser(
        "flsv bench", docstring("cli/bench.py"), "all of --list", "all", Path("runs/benchmark"), listed
    )
    parser.add_argument("--seeds", type=positive, default=None, help="runs of every federation. Default: 3")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two runs of every federation, no other aggregators, none of many clients, unless you say so",
    )
    parser.add_argument(
        "--conditions",
        nargs="*",
        choices=conditions,
        metavar="CONDITION",
        default=None,
        help=f"what else than the run as it is, once each: {', '.join(conditions)}; nothing: only that. Default: all",
    )
    parser.add_argument("--truth", action="store_true", help="train the coalitions, and write their utilities to --out")
    parser.add_argument("--truth-seeds", type=positive, help="trainings of every coalition")
    return parser


def stress_parser() -> ArgumentParser:
    """Of ``flsv stress``."""
    cheats, safeguards = (declared("benchmark/stress.py", name) for name in ("CHEATS", "SAFEGUARDS"))
    metrics, where, listed = (
        *(", ".join(declared("cli/stress.py", name)) for name in ("METRICS", "FEDERATIONS")),
        "ways to cheat",
    )
    own = "RUN/stress with a run, else runs/stress"
    parser = benchmark_parser("flsv stress", docstring("cli/stress.py"), metrics, where, None, listed, own)
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


#: Those whose further arguments are of ``flsv fit``, and those that have none.
FURTHER: dict[str, Callable[[], ArgumentParser]] = {
    "compare": compare_parser,
    "repeat": repeat_parser,
    "retrain": retrain_parser,
}
PARSERS: dict[str, Callable[[], ArgumentParser]] = {"bench": bench_parser, "stress": stress_parser}
