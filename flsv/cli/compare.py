"""``flsv compare``: several algorithms on one partition, and what each client got out of it.

    flsv compare --base quickstart --config fedavg --config shapfed

Every ``--config`` is one algorithm; a ``--base`` comes before each. A run in which every client is alone comes first
(``Standalone``): gains and collaborative fairness (Tastan et al., IJCAI 2024, section 4.3, tables 1-2) are relative to
it. On NaN fairness see :func:`flsv.functional.collaborative_fairness`. A run that is done is kept: start again what was
stopped. What was changed, configuration or data, is run anew.
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
import torch
from torch import Tensor

from flsv.charts import client_labels
from flsv.cli.command import NO_BARS, command_parser, printer, shown
from flsv.cli.configs import find_config
from flsv.cli.own_models import MEASURES, Models, Outcome, OwnModels, Tests
from flsv.cli.parser import FederatedCLI, loop_of, make_cli
from flsv.csv_files import save_csv
from flsv.data import FederatedDataModule
from flsv.data.contents import loader_hash
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.personalization import Standalone
from flsv.report.folder import FolderLock, run_folder
from flsv.report.terminal import chosen, print_table
from flsv.report.text import markdown_table, plain
from flsv.server.config import ClientEvaluation
from flsv.server.identity import Identity

STANDALONE = "standalone"
#: What a run came to, in its folder.
KEPT = "outcome.json"


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
    folder = run_folder(trainer)
    return Outcome(name, own.scores, seconds, loop.coalitions, tests, folder, data.client_names)


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
    names = [STANDALONE, *_names(configs)]
    outcomes: list[Outcome] = []
    dealt: list[Tensor] | None = None
    for name, config in zip(names, [configs[0], *configs]):
        cli = _built(base, config, arguments, out / name, alone=name == STANDALONE)
        identity, path = _identity(cli, name == STANDALONE, tests), out / name / KEPT
        mine = [cli.datamodule.client_indices(client) for client in range(cli.datamodule.num_clients)]
        if dealt is not None and not (len(mine) == len(dealt) and all(map(torch.equal, mine, dealt))):
            raise ConfigurationError(
                f"{config} deals the data out to the clients otherwise than {configs[0]}, so there is nothing to "
                "compare. Say the data once, in a --base, and only the federation in each --config."
            )
        dealt = mine
        kept = Outcome.kept(path, identity)
        say(f"Run {len(outcomes) + 1} of {len(names)}: {name}{', done before' if kept else ''}")
        if kept is None:
            run(name, cli.trainer, cli.model, cli.datamodule, tests).keep(path, identity)
            kept = Outcome.kept(path, identity)
        assert kept is not None
        outcomes.append(kept)
    return outcomes


def _identity(cli: FederatedCLI, alone: bool, tests: Tests) -> Identity:
    found = cli.identity()
    seeds = {"seed_everything": os.environ.get("PL_GLOBAL_SEED"), "federation.seed": cli.config.federation.seed}
    beside = {**seeds, STANDALONE: alone, "tests": tests}
    test = loader_hash(cli.datamodule.test_dataloader()) if tests == "shared" else ""
    told = {name: str(value) for name, value in beside.items()}
    return Identity({**found.settings, **told}, {**found.samples, "test": test})


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
    names: list[str] = []
    for config in configs:
        stem, again = Path(config).stem, 2
        name = stem
        while name in (*names, STANDALONE):
            name, again = f"{stem}_{again}", again + 1
        names.append(name)
    return names


# ---- tables

#: The rows below the clients'.
OVERALL = ("mean", "fairness", "global", "seconds", "coalitions")


def rows(outcomes: Sequence[Outcome], measure: str, models: Models = "received") -> list[list[str]]:
    """The table of one measure, in %, its head first: a column per algorithm, the first of which is the standalone."""
    alone = outcomes[0]
    columns = [["", *client_labels(len(alone.names), alone.names), *OVERALL]]
    for outcome in outcomes:
        values = 100 * outcome.scores[models][measure]
        cells = [f"{value:.1f}" for value in values.tolist()]
        fairness, overall = float("nan"), "-"
        if outcome is not alone:
            gains = 100 * outcome.gains(alone, measure, models)
            cells = [f"{cell} ({gain:+.1f})" for cell, gain in zip(cells, gains.tolist())]
            fairness = outcome.fairness(alone, measure, models)
            overall = f"{100 * outcome.scores['global'][measure].item():.1f}"
        correlation = "-" if fairness != fairness else f"{fairness:.2f}"
        cost = [f"{outcome.seconds:.1f}", str(outcome.evaluations)]
        columns.append([outcome.name, *cells, f"{values.mean():.1f}", correlation, overall, *cost])
    return [list(row) for row in zip(*columns)]


def markdown(outcomes: Sequence[Outcome], models: Models = "received") -> str:
    """All measures as Markdown tables; negative gains in bold, and what the rows are."""
    parts = []
    for measure in MEASURES:
        head, *body = rows(outcomes, measure, models)
        cells = [[plain(name), *(f"**{c}**" if "(-" in c else c for c in row)] for name, *row in body]
        table = markdown_table(head, cells)
        parts.append(f"**{_title(measure, models, outcomes[0].tests)}**\n\n{table}")
    return "\n\n".join([*parts, *NOTES]) + "\n"


NOTES = (
    "In brackets: the gain over standalone, where every client trains alone for as many rounds, in percentage points. "
    "**Bold**: the client has lost by taking part.",
    "fairness: Pearson's correlation, over the clients, of what they have alone and what they end up with; - where "
    "either is the same for all. global: the server's model. seconds: the fit, without the evaluation of the models; "
    "the first one also pays for what the process does once. coalitions: models of coalitions that were evaluated; one "
    "that several metrics asked for counts once.",
)


def write_gains(path: Path, outcome: Outcome, alone: Outcome) -> None:
    """``gains.csv`` of one run, for its report: what each client has alone, and what it received and trained."""
    head = ["client", "client_name", "tests"]
    columns: dict[str, list[float]] = {}
    for measure in MEASURES:
        columns[f"{measure}_alone"] = alone.scores["received"][measure].tolist()
        columns |= {f"{measure}_{models}": outcome.scores[models][measure].tolist() for models in get_args(Models)}
    table: list[list[object]] = [[*head, *columns]]
    for client, values in enumerate(zip(*columns.values())):
        table.append([client, outcome.names[client], outcome.tests, *(f"{value:.6f}" for value in values)])
    save_csv(path, table)


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """One row per algorithm, kind of model and client; the global model has no client."""
    table: list[list[object]] = [["algorithm", "models", "client", *MEASURES, "seconds", "evaluations"]]
    for outcome in outcomes:
        for models, scores in outcome.scores.items():
            for client, values in enumerate(zip(*(scores[measure].tolist() for measure in MEASURES))):
                who = "" if models == "global" else client
                cost = [f"{outcome.seconds:.3f}", outcome.evaluations]
                table.append([outcome.name, models, who, *(f"{value:.6f}" for value in values), *cost])
    save_csv(path, table)


def _show(outcomes: Sequence[Outcome], models: Models) -> None:
    for measure in MEASURES:
        head, *body = rows(outcomes, measure, models)
        names = [row[0] for row in body]
        clients = sum(name not in OVERALL for name in names)
        columns = {name: [row[place] for row in body] for place, name in enumerate(head) if place}
        # Of many clients those that gain the most and the least by the first algorithm.
        gains = outcomes[1].gains(outcomes[0], measure, models) if len(outcomes) > 1 else None
        shown = [*chosen(gains, clients), *range(clients, len(names))]
        title = _title(measure, models, outcomes[0].tests)
        print_table(title, names, columns, shown, corner="")


def _title(measure: str, models: Models, tests: Tests) -> str:
    name = "AUROC" if measure == "auroc" else measure.replace("_", " ").capitalize()
    where = "on the test set" if tests == "shared" else "on the clients' own test samples"
    return f"{name} {where}, %, of the models that the clients {models} (gain over standalone)"


def _parser() -> ArgumentParser:
    further = "Further arguments are those of flsv fit and override the files: --trainer.max_epochs 5"
    parser = command_parser("flsv compare", __doc__, further)
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
        (options.out / "compare.md").write_text(markdown(outcomes, options.models), encoding="utf-8")
        write_csv(options.out / "compare.csv", outcomes)
        for outcome in outcomes[1:]:
            if outcome.folder is not None and outcome.folder.is_dir():
                write_gains(outcome.folder / "gains.csv", outcome, outcomes[0])
    if not quiet:
        _show(outcomes, options.models)
        print(f"Tables: {shown(options.out / 'compare.md')}, {shown(options.out / 'compare.csv')}")
        print(f"Charts: tensorboard --logdir {shown(options.out)}")
        example = next((outcome.folder for outcome in outcomes[1:] if outcome.folder is not None), None)
        if example is not None:
            print(f"Report of a run, with what each client gained: flsv report {shown(example)}")
