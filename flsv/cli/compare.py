"""``flsv compare``: several algorithms on one partition, and what each client got out of it.

    flsv compare --base digits --config fedavg --config shapfed

Every ``--config`` is one algorithm; a ``--base`` comes before each. A run in which every client is alone comes first
(``Standalone``): in brackets is each client's gain over it, in percentage points; fairness is Pearson's correlation,
over the clients, of what they have alone and what they end up with (Tastan et al., IJCAI 2024, section 4.3; - where
either is the same for all). global is the server's model; coalitions, how many models of coalitions were evaluated.
A run that is done is kept: start again what was stopped. What was changed, configuration or data, is run anew.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import lightning as L
import pandas
from pandas import DataFrame

from flsv.charts import client_labels
from flsv.cli.command import NO_BARS, command_parser, printer, shown
from flsv.cli.configs import find_config
from flsv.cli.own_models import COLUMNS, MEASURES, Outcome, OwnModels, Tests
from flsv.cli.parser import FederatedCLI, loop_of, make_cli
from flsv.csv_files import NAN, save_table
from flsv.data import FederatedDataModule
from flsv.data.contents import loader_hash
from flsv.errors import ConfigurationError
from flsv.kept import Kept
from flsv.loop import FederatedLoop
from flsv.personalization import Standalone
from flsv.report.folder import FolderLock
from flsv.report.terminal import chosen, print_table
from flsv.server.config import ClientEvaluation

STANDALONE = "standalone"
#: What a run came to, in its folder.
KEPT = "outcome.csv"


def run(
    name: str, trainer: L.Trainer, module: L.LightningModule, data: FederatedDataModule, tests: Tests = "shared"
) -> Outcome:
    """One fit; the trainer has a :class:`flsv.FederatedLoop` among its callbacks. ``tests`` is :class:`OwnModels`'s."""
    loop = loop_of(trainer)
    own = OwnModels(loop, tests)
    trainer.callbacks.append(own)  # type: ignore[attr-defined]
    if "PL_GLOBAL_SEED" in os.environ:
        L.seed_everything(int(os.environ["PL_GLOBAL_SEED"]), verbose=False)  # all start from the same weights
    start = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - start - own.seconds
    if not own.scores:
        raise RuntimeError(f"{name}: the run was stopped before its last round.")
    parts = {models: DataFrame({m: each.tolist() for m, each in of.items()}) for models, of in own.scores.items()}
    table = pandas.concat(parts, names=["models", "client"]).reset_index()
    table = table.assign(client=table["client"].mask(table["models"] == "global", ""))
    table = table.assign(seconds=seconds, evaluations=loop.coalitions)
    return Outcome(name, table[[*COLUMNS]], tests, data.client_names)


def compare(
    configs: Sequence[str],
    base: Sequence[str] = (),
    arguments: Sequence[str] = (),
    out: Path = Path("runs/compare"),
    tests: Tests = "shared",
    say: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """Run the standalone baseline and every configuration.

    Args:
        configs: configuration files or names of packaged ones, one per algorithm.
        base: configuration files or names that come before each of them.
        arguments: further arguments of ``flsv fit``, which override the files.
        out: what the runs write goes below, a folder each.
        tests: what models are tested on, see :class:`OwnModels`.
        say: is told which run begins.

    Raises:
        ConfigurationError: the configurations do not deal out the same data to the same clients; own tests of clients
            that have none.
    """
    for file in (*base, *configs):
        find_config(file)  # before the first of them is run
    names = _names(configs)
    outcomes: list[Outcome] = []
    dealt = None
    for name, config in zip(names, [configs[0], *configs]):
        alone = name == STANDALONE
        cli = _built(base, config, arguments, out / name, alone)
        identity = cli.identity()
        if dealt not in (None, identity.samples):
            raise ConfigurationError(
                f"{config} deals the data out to the clients otherwise than {configs[0]}, so there is nothing to "
                "compare. Say the data once, in a --base, and only the federation in each --config."
            )
        dealt = identity.samples
        beside = {"seed_everything": os.environ.get("PL_GLOBAL_SEED"), STANDALONE: alone, "tests": tests}
        beside["federation.seed"] = cli.config.federation.seed
        beside["test"] = loader_hash(cli.datamodule.test_dataloader()) if tests == "shared" else ""
        kept = Kept(out / name / KEPT, COLUMNS, {**identity.flat(), **beside}, anew=True)
        say(f"Run {len(outcomes) + 1} of {len(names)}: {name}{', done before' if kept.rows else ''}")
        if kept.rows:
            outcome = Outcome(name, DataFrame(kept.rows), tests, cli.datamodule.client_names)
        else:
            outcome = run(name, cli.trainer, cli.model, cli.datamodule, tests)
            kept.add(outcome.table.itertuples(index=False, name=None))
        outcomes.append(outcome)
    return outcomes


def _built(base: Sequence[str], config: str, arguments: Sequence[str], folder: Path, alone: bool) -> FederatedCLI:
    """The trainer, module and data of one run."""
    files = [option for file in (*base, config) for option in ("--config", file)]
    own = ["--trainer.default_root_dir", str(folder), "--federation.reporting.table", "false"]
    own += ["--federation.evaluation.keep_trained", "true"]
    cli = make_cli([*files, *arguments, *own], run=False)
    callbacks: list[L.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
    if alone:
        loop = loop_of(cli.trainer)
        callbacks[callbacks.index(loop)] = _alone(loop)
    return cli


def _alone(loop: FederatedLoop) -> FederatedLoop:
    """The same clients without a federation: neither attacks nor samplers nor anything measured."""
    nothing = ("aggregator", "metrics", "sampler", "client_algorithm", "uploads")
    return loop.replace(
        **dict.fromkeys(nothing),
        personalizer=Standalone(),
        evaluation=ClientEvaluation(keep_trained=loop.evaluation.keep_trained),
        reporting=replace(loop.reporting, figures=0),
    )


def _names(configs: Sequence[str]) -> list[str]:
    stems = [STANDALONE, *(Path(config).stem for config in configs)]
    before = [stems[:place].count(stem) for place, stem in enumerate(stems)]
    return [f"{stem}_{count + 1}" if count else stem for stem, count in zip(stems, before)]


# ---- tables

#: The rows below the clients'.
OVERALL = ("mean", "fairness", "global", "seconds", "coalitions")


def table(outcomes: Sequence[Outcome], measure: str) -> DataFrame:
    """The table of one measure of the models that the clients received last, in %: a column per algorithm, the
    standalone first."""
    alone = outcomes[0]
    columns = {}
    for outcome in outcomes:
        values = 100 * outcome.scores(measure)
        gains = 100 * outcome.gains(alone, measure)
        overall = f"{100 * outcome.scores(measure, 'global').item():.1f}"
        fairness = outcome.fairness(alone, measure)
        cells = [f"{value:.1f} ({gain:+.1f})" for value, gain in zip(values.tolist(), gains.tolist())]
        if outcome is alone:
            cells, overall, fairness = [f"{value:.1f}" for value in values.tolist()], "-", NAN
        correlation = "-" if fairness != fairness else f"{fairness:.2f}"
        cost = [f"{outcome.table['seconds'][0]:.1f}", str(outcome.table["evaluations"][0])]
        columns[outcome.name] = [*cells, f"{values.mean():.1f}", correlation, overall, *cost]
    return DataFrame(columns, index=[*client_labels(len(alone.names), alone.names), *OVERALL])


def _show(outcomes: Sequence[Outcome]) -> None:
    for measure in MEASURES:
        cells, clients = table(outcomes, measure), len(outcomes[0].names)
        # Of many clients those that gain the most and the least by the first algorithm.
        gains = outcomes[1].gains(outcomes[0], measure) if len(outcomes) > 1 else None
        shown = [*chosen(gains, clients), *range(clients, len(cells))]
        columns = {name: cells[name].tolist() for name in cells}
        print_table(_title(measure, outcomes[0].tests), list(cells.index), columns, shown, corner="")


def _title(measure: str, tests: Tests) -> str:
    name = "AUROC" if measure == "auroc" else measure.replace("_", " ").capitalize()
    where = "on the test set" if tests == "shared" else "on the clients' own test samples"
    return f"{name} {where}, %, of the models that the clients received (gain over standalone)"


def _parser() -> ArgumentParser:
    further = "Further arguments are those of flsv fit and override the files: --trainer.max_epochs 5"
    parser = command_parser("flsv compare", __doc__, further)
    parser.add_argument("--config", action="append", required=True, help="an algorithm; give several")
    parser.add_argument("--base", action="append", default=[], help="comes before every algorithm; may be given twice")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of the tables and the runs")
    parser.add_argument(
        "--tests",
        choices=get_args(Tests),
        default="shared",
        help="what they are tested on: the test set that no client has, or each client's own test split, as suits "
        "personalized models",
    )
    return parser


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``compare`` itself."""
    options, rest = _parser().parse_known_args(list(args))
    if quiet:
        rest += NO_BARS
    with FolderLock(options.out):
        outcomes = compare(options.config, options.base, rest, options.out, options.tests, printer(quiet))
        tables = pandas.concat({outcome.name: outcome.table for outcome in outcomes}, names=["algorithm"])
        save_table(options.out / "compare.csv", tables.reset_index("algorithm"))
    if not quiet:
        _show(outcomes)
    print(f"Table:  {shown(options.out / 'compare.csv')}")
    if not quiet:
        print(f"Charts: tensorboard --logdir {shown(options.out)}")
