"""``flsv compare``: several algorithms on one partition, and what each client got out of it.

    flsv compare --base quickstart --config fedavg --config shapfed

Every ``--config`` is one algorithm; a ``--base`` comes before each. A run in which every client is alone comes first
(``Standalone``): gains and collaborative fairness (Tastan et al., IJCAI 2024, section 4.3, tables 1-2) are relative to
it. On NaN fairness see :func:`flsv.functional.collaborative_fairness`.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from flsv.cli.own_models import MEASURES, OwnModels, Tests
from flsv.cli.packaged import find_config
from flsv.cli.parser import make_cli
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.functional import collaborative_fairness
from flsv.loop import FederatedLoop
from flsv.personalization import Standalone

STANDALONE = "standalone"
Models = Literal["received", "trained"]


@dataclass(frozen=True)
class Outcome:
    """What one algorithm came to.

    Args:
        name: of the algorithm.
        scores: as :attr:`OwnModels.scores`.
        seconds: of the whole fit, without the evaluation of the models.
        evaluations: coalitions that the algorithm's metrics asked to have evaluated.
        tests: what the models were tested on, see :class:`OwnModels`.
    """

    name: str
    scores: Mapping[str, Mapping[str, Tensor]]
    seconds: float
    evaluations: int
    tests: Tests = "shared"

    def gains(self, alone: Outcome, measure: str, models: Models = "received") -> Tensor:
        """``[n]``: each client's score minus what it has alone."""
        return self.scores[models][measure] - alone.scores[models][measure]

    def fairness(self, alone: Outcome, measure: str, models: Models = "received") -> float:
        """Collaborative fairness; NaN where all clients end up with equally good models."""
        return float(collaborative_fairness(alone.scores[models][measure], self.scores[models][measure]))


def run(
    name: str, trainer: L.Trainer, module: L.LightningModule, data: FederatedDataModule, tests: Tests = "shared"
) -> Outcome:
    """One fit; the trainer has a :class:`flsv.FederatedLoop` among its callbacks. ``tests`` is :class:`OwnModels`'s."""
    loop = next(callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop))  # type: ignore[attr-defined]
    own = OwnModels(loop, tests)
    trainer.callbacks.append(own)  # type: ignore[attr-defined]
    if "PL_GLOBAL_SEED" in os.environ:
        L.seed_everything(int(os.environ["PL_GLOBAL_SEED"]), verbose=False)  # all start from the same weights
    start = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - start - own.seconds
    if not own.scores:
        raise RuntimeError(f"{name}: the run was stopped before its last round.")
    evaluations = sum(int(getattr(metric, "evaluations", 0)) for metric in loop.metrics.values())
    return Outcome(name, own.scores, seconds, evaluations, tests)


def compare(
    configs: Sequence[str],
    base: Sequence[str] = (),
    arguments: Sequence[str] = (),
    out: Path = Path("runs/compare"),
    tests: Tests = "shared",
) -> list[Outcome]:
    """Run the standalone baseline and every configuration.

    Args:
        configs: configuration files or names of packaged ones, one per algorithm.
        base: configuration files or names that come before each of them.
        arguments: further arguments of ``flsv fit``, which override the files.
        out: what the runs write goes below, a folder each.
        tests: what models are tested on, see :class:`OwnModels`.

    Raises:
        ConfigurationError: the configurations do not deal out the same data to the same clients; own tests of clients
            that have none.
    """
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # given, beside this process's own
    for file in (*base, *configs):
        find_config(file)  # before the first of them is run
    names = [STANDALONE, *_names(configs)]
    outcomes: list[Outcome] = []
    dealt: list[Tensor] | None = None
    for name, config in zip(names, [configs[0], *configs]):
        files = [option for file in (*base, config) for option in ("--config", file)]
        folder = ["--trainer.default_root_dir", str(out / name), "--federation.print_table", "false"]
        folder += ["--federation.keep_trained", "true"]
        cli = make_cli([*files, *arguments, *folder], run=False)
        callbacks: list[L.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
        if name == STANDALONE:
            place = next(i for i, callback in enumerate(callbacks) if isinstance(callback, FederatedLoop))
            callbacks[place] = _alone(callbacks[place])  # type: ignore[arg-type]
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
        mine = [cli.datamodule.client_indices(client) for client in range(cli.datamodule.num_clients)]
        if dealt is not None and not (len(mine) == len(dealt) and all(map(torch.equal, mine, dealt))):
            raise ConfigurationError(
                f"{config} deals the data out to the clients otherwise than {configs[0]}, so there is nothing to "
                "compare. Say the data once, in a --base, and only the federation in each --config."
            )
        dealt = mine
        outcomes.append(run(name, cli.trainer, cli.model, cli.datamodule, tests))
    return outcomes


def _alone(loop: FederatedLoop) -> FederatedLoop:
    """The same clients without a federation: neither attacks nor samplers nor anything measured."""
    nothing = ("aggregator", "metrics", "sampler", "client_algorithm", "attacks", "privacy", "uploads")
    return loop.replace(
        **dict.fromkeys(nothing),
        personalizer=Standalone(),
        server_lr=1.0,
        evaluate_clients_every=0,
        evaluate_models="received",
        figures_every=0,
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


def rows(outcomes: Sequence[Outcome], measure: str, models: Models = "received") -> list[list[str]]:
    """The table of one measure, in %, its head first: a column per algorithm, the first of which is the standalone."""
    alone = outcomes[0]
    clients = range(len(alone.scores[models][measure]))
    columns = [["", *(f"client {i}" for i in clients), "mean", "fairness", "global", "seconds", "coalitions"]]
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
    """Both measures as Markdown tables; negative gains in bold."""
    parts = []
    for measure in MEASURES:
        head, *body = rows(outcomes, measure, models)
        lines = [head, ["---"] * len(head), *[[f"**{c}**" if "(-" in c else c for c in row] for row in body]]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"**{_title(measure, models, outcomes[0].tests)}**\n\n{table}")
    return "\n\n".join(parts) + "\n"


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """One row per algorithm, kind of model and client; the global model has no client."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["algorithm", "models", "client", *MEASURES, "seconds", "evaluations"])
        for outcome in outcomes:
            for models, scores in outcome.scores.items():
                for client, values in enumerate(zip(*(scores[measure].tolist() for measure in MEASURES))):
                    who = "" if models == "global" else client
                    cost = [f"{outcome.seconds:.3f}", outcome.evaluations]
                    writer.writerow([outcome.name, models, who, *(f"{value:.6f}" for value in values), *cost])


def _show(outcomes: Sequence[Outcome], models: Models) -> None:
    console = Console()
    for measure in MEASURES:
        head, *body = rows(outcomes, measure, models)
        title = _title(measure, models, outcomes[0].tests)
        # Text, not str: algorithms are named by their files, and rich would read markup into "[a].yaml".
        table = Table(title=Text(title, style="table.title"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
        for position, name in enumerate(head):
            table.add_column(Text(name), justify="right" if position else "left")
        for row in body:
            table.add_row(*(Text(cell, style="red" if "(-" in cell else "") for cell in row))
        console.print(table)


def _title(measure: str, models: Models, tests: Tests) -> str:
    name = measure.replace("_", " ").capitalize()
    where = "on the test set" if tests == "shared" else "on the clients' own test samples"
    return f"{name} {where}, %, of the models that the clients {models} (gain over standalone)"


def main(args: Sequence[str]) -> None:
    """The command line, without ``compare`` itself."""
    parser = argparse.ArgumentParser(
        prog="flsv compare",
        description=__doc__,
        epilog="Further arguments are those of flsv fit and override the files: --trainer.max_epochs 5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    options, rest = parser.parse_known_args(list(args))
    outcomes = compare(options.config, options.base, rest, options.out, options.tests)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "compare.md").write_text(markdown(outcomes, options.models))
    write_csv(options.out / "compare.csv", outcomes)
    _show(outcomes, options.models)
    print(f"Tables: {options.out / 'compare.md'}, {options.out / 'compare.csv'}")
