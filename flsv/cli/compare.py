"""``flsv compare``: several algorithms on one partition, and each client's scores with each of them.

    flsv compare --base digits --config fedavg --config shapfed

Every ``--config`` is one algorithm; a ``--base`` is read before each. A run in which every client trains alone comes
first (``Standalone``). The tables show each client's score and, in brackets, its gain over training alone, in
percentage points. Fairness is Pearson's correlation, over the clients, between the scores alone and the final scores
(Tastan et al., IJCAI 2024, section 4.3; - if either is the same for all clients). The row "global" has the scores of
the server's model, the row "coalitions" the number of coalitions whose models were evaluated. Finished runs are kept:
start a stopped command again to continue. A run whose configuration or data have changed is repeated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pandas
import torch
from pandas import DataFrame
from torch import Tensor

from flsv._lightning.evaluation import on_device
from flsv._lightning.patches import callbacks_of
from flsv.cli.command import NO_BARS, display_path, printer
from flsv.cli.configs import find_config
from flsv.cli.parser import FederatedCLI, make_cli
from flsv.cli.parsers import compare_parser
from flsv.configuration.federation_config import ClientEvaluation
from flsv.core import LocalData, find_loop
from flsv.data import FederatedDataModule
from flsv.data.contents import loader_hash
from flsv.engines.client_manager import try_forward
from flsv.federation import FederatedLoop
from flsv.functional import collaborative_fairness
from flsv.games import ModelEvaluator
from flsv.personalization import Standalone
from flsv.results.folder import FolderLock
from flsv.results.terminal import print_table, shown_clients
from flsv.scores.class_scores import OWN_SCORES, ClassScores
from flsv.utilities.charts import client_labels
from flsv.utilities.choices import Tests
from flsv.utilities.csv_files import NAN, Cell, number_or_nan, parse_float, parse_int, save_table
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import ResultFile

STANDALONE = "standalone"
#: The file of a run's scores, in its folder.
KEPT = "outcome.csv"
MEASURES = OWN_SCORES
#: Columns of the file of a run's scores, and the functions that read their cells.
COLUMNS: Mapping[str, Cell] = {
    **{"models": str, "client": str},
    **dict.fromkeys(MEASURES, number_or_nan),
    **{"seconds": parse_float, "evaluations": parse_int},
}
Models = Literal["received", "trained", "global"]


class OwnModels(L.Callback):
    """Callback that evaluates every client's own model, and the global model, after the last round.

    A client has two own models: the one that it has ``trained`` in its last round, and the one that it then
    ``received`` from the server as the start point of the next round (the global model if there is no personalization).
    For an attacker, ``trained`` is the model that it kept, not the one that it sent.

    Args:
        loop: the federated loop of the same trainer, with ``ClientEvaluation(keep_trained=True)``.
        tests: the test samples: ``"shared"``, the test set that no client has, or ``"own"``, each client's test split.

    Attributes:
        scores: set after the fit, ``{models: {measure: scores}}`` with ``[n]`` scores for the ``"received"`` and
            ``"trained"`` models and one, ``[1]``, for the ``"global"`` model (with own tests the mean over the
            clients); the measures are :data:`flsv.scores.class_scores.OWN_SCORES`.
        seconds: the duration of the evaluation.

    Raises:
        ConfigurationError: the loop does not keep the trained models; or, before training: ``tests="own"`` and a client
            has no test samples, or the module's ``forward`` does not return logits ``[B, M]`` for B samples and M
            classes.
    """

    def __init__(self, loop: FederatedLoop, tests: Tests = "shared") -> None:
        self.loop, self.tests = loop, tests
        self.scores: dict[str, dict[str, Tensor]] = {}
        self.seconds = 0.0
        if not loop.evaluation.keeps:
            raise ConfigurationError("OwnModels needs FederatedLoop(evaluation=ClientEvaluation(keep_trained=True)).")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        empty = [client for client in range(data.num_clients) if not len(data.client_indices(client, "test"))]
        if self.tests == "own" and empty:
            raise ConfigurationError(
                f'tests="own" needs a test split at every client; clients {empty} have none. Set '
                "FederatedDataModule(splits=Splits(client_test=0.2)), or a larger one."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        try_forward(trainer, self._batches(data), data.num_classes, f'tests="{self.tests}"')

    def _batches(self, data: FederatedDataModule) -> Iterable[Any]:
        """Return the batches of the shared test set, or of client 0's test split, on which evaluation is tried."""
        return data.test_dataloader() if self.tests == "shared" else data.client_loader(0, "test", shuffle=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = time.perf_counter()
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        evaluate = ModelEvaluator(
            pl_module,
            self.loop.space,
            on_device(trainer, self._batches(data)),
            num_classes=data.num_classes,
            metric=_AUROC(data.num_classes),
            context=trainer.strategy.precision_plugin.forward_context,
        )
        server, everybody = self.loop.space.read(pl_module), list(range(data.num_clients))
        # Evaluate one client at a time if clients have samples of their own, or unshared parts of the model.
        alone = self.tests == "own" or bool(self.loop.space.private_names)
        found: list[Tensor] = []
        for clients in [[client] for client in everybody] if alone else [everybody]:
            if self.tests == "own":
                evaluate = evaluate.on(on_device(trainer, data.client_loader(clients[0], "test")))
            found.append(self._scores_of(clients, server, evaluate))
        for name, columns in zip(("received", "trained", "global"), torch.cat(found, dim=1).mT):
            self.scores[name] = dict(zip(MEASURES, columns.mean(1, keepdim=True) if name == "global" else columns))
        self.seconds = time.perf_counter() - start

    def _scores_of(self, clients: Sequence[int], server: Tensor, evaluate: ModelEvaluator) -> Tensor:
        """Compute the scores of the received, the trained and the global models of k clients, in this order,
        ``[3, k, number of measures]``.

        Args:
            clients: the k clients; only one client if clients keep parts of the model to themselves.
            server: the global model ``[P]``, which is also that of clients without a model of their own.
            evaluate: evaluates models on these clients' test samples.
        """
        received = self.loop.received()
        models: tuple[Mapping[int, Tensor], ...] = (received, {**received, **self.loop.trained}, {})
        rows = torch.stack([own.get(client, server) for own in models for client in clients])
        distinct, places = rows.unique(dim=0, return_inverse=True)  # equal models are evaluated only once
        values = _values(evaluate, distinct)[places].view(len(models), len(clients), -1)
        if self.loop.space.private_names:
            (client,) = clients
            kept = self.loop.clients[client].ask(kept_private)
            own = _values(evaluate.on(None, partial(dict, kept)), distinct)[places].view_as(values)
            values[:2] = own[:2]  # the global model has the server's entries where clients keep theirs
        return values


class _AUROC(ClassScores):
    """The scores of a classifier, reduced to the AUROC."""

    def compute(self) -> Tensor:  # type: ignore[override]  # one of its scores, not all
        return super().compute()["auroc"]


def kept_private(local: LocalData) -> dict[str, Tensor]:
    """Return the entries of the model that a client does not share, ``{name: tensor}``. Only a simulation asks this."""
    return dict(local.private)


def _values(evaluate: ModelEvaluator, models: Tensor) -> Tensor:
    """Score K models, given as vectors ``[K, P]``, by accuracy, balanced accuracy and AUROC; return ``[K, 3]``, with
    the scores in this order (:data:`MEASURES`)."""
    scores = evaluate(models)
    return torch.stack([scores.value("metric" if name == "auroc" else name) for name in MEASURES], dim=1)


@dataclass(frozen=True)
class Outcome:
    """The result of one algorithm.

    Args:
        name: the name of the algorithm.
        table: one row per kind of model (the keys of :attr:`OwnModels.scores`) and client, with the columns
            :data:`COLUMNS`; the client of the global model is "". ``seconds`` is the duration of the fit without the
            evaluation of the models, ``evaluations`` the number of different coalitions that were evaluated for the
            algorithm's metrics.
        tests: the samples on which the models were tested, see :class:`OwnModels`.
        names: the clients' names.
    """

    name: str
    table: DataFrame
    tests: Tests = "shared"
    names: tuple[str, ...] = ()

    def scores(self, measure: str, models: Models = "received") -> Tensor:
        """Return the scores of the clients' models by ``measure``, one per client; for ``models="global"``, the one
        score of the global model."""
        return torch.tensor(self.table.loc[self.table["models"] == models, measure].tolist(), dtype=torch.float64)

    def gains(self, alone: Outcome, measure: str) -> Tensor:
        """Compute each client's gain: the score of the model that it received last, minus its score in the outcome
        ``alone``."""
        return self.scores(measure) - alone.scores(measure)

    def fairness(self, alone: Outcome, measure: str) -> float:
        """Compute collaborative fairness, the correlation of the clients' scores with those in the outcome ``alone``;
        NaN if all clients' scores are the same."""
        return float(collaborative_fairness(alone.scores(measure), self.scores(measure)))


# ---- the runs


def run_algorithm(
    name: str, trainer: L.Trainer, module: L.LightningModule, data: FederatedDataModule, tests: Tests = "shared"
) -> Outcome:
    """Run one fit of a trainer with a :class:`flsv.FederatedLoop` among its callbacks, and return its :class:`Outcome`,
    with the scores of all models.

    Args:
        name: the name of the algorithm.
        trainer: the trainer; an :class:`OwnModels` is added to its callbacks.
        module: the module to train.
        data: the data of the clients.
        tests: the test samples, see :class:`OwnModels`.
    """
    loop: Any = find_loop(callbacks_of(trainer))
    own = OwnModels(loop, tests)
    callbacks_of(trainer).append(own)
    if "PL_GLOBAL_SEED" in os.environ:
        L.seed_everything(int(os.environ["PL_GLOBAL_SEED"]), verbose=False)  # all runs start from the same weights
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
    """Run the standalone baseline, in which each client trains alone on its own data, and every configuration.

    Args:
        configs: configuration files or names of packaged ones, one per algorithm.
        base: configuration files or names that are read before each of them.
        arguments: further arguments of ``flsv fit``, which override the files.
        out: the folder below which each run writes into a folder of its own.
        tests: the choice of test samples: ``"shared"``, the test set that no client has, or ``"own"``, each client's
            test split.
        say: called with a line of text when a run begins.

    Returns:
        The outcomes: the standalone baseline's, then one per configuration.

    Raises:
        ConfigurationError: the configurations do not give the same samples to the same clients; or own tests are
            requested and a client has no test samples.
    """
    names = _names(configs)
    for file in (*base, *configs):
        find_config(file)
    for name, config in zip(names[1:], configs):
        _built(base, config, arguments, out / name, alone=False)  # find errors before the first run
    outcomes: list[Outcome] = []
    dealt = None
    for name, config in zip(names, [configs[0], *configs]):
        alone = name == STANDALONE
        cli = _built(base, config, arguments, out / name, alone)
        identity = cli.identity()
        if dealt not in (None, identity.samples):
            raise ConfigurationError(
                f"{config} gives the clients other data than {configs[0]}, so there is nothing to "
                "compare. Give the data once, in a --base, and only the federation in each --config."
            )
        dealt = identity.samples
        beside = {"seed_everything": os.environ.get("PL_GLOBAL_SEED"), STANDALONE: alone, "tests": tests}
        beside["federation.seed"] = cli.config.federation.seed
        beside["test"] = loader_hash(cli.datamodule.test_dataloader()) if tests == "shared" else ""
        kept = ResultFile(out / name / KEPT, COLUMNS, {**identity.flat(), **beside}, anew=True)
        say(f"Run {len(outcomes) + 1} of {len(names)}: {name}{', done before' if kept.rows else ''}")
        if kept.rows:
            outcome = Outcome(name, DataFrame(kept.rows), tests, cli.datamodule.client_names)
        else:
            outcome = run_algorithm(name, cli.trainer, cli.model, cli.datamodule, tests)
            kept.add(outcome.table.itertuples(index=False, name=None))
        outcomes.append(outcome)
    return outcomes


def _built(base: Sequence[str], config: str, arguments: Sequence[str], folder: Path, alone: bool) -> FederatedCLI:
    """Build the trainer, module and data of one run; if ``alone``, of the standalone baseline."""
    files = [option for file in (*base, config) for option in ("--config", file)]
    own = ["--trainer.default_root_dir", str(folder), "--federation.reporting.table", "false"]
    own += ["--federation.evaluation.keep_trained", "true"]
    cli = make_cli([*files, *arguments, *own], run=False)
    callbacks: list[L.Callback] = callbacks_of(cli.trainer)
    if alone:
        callbacks[callbacks.index(cli.loop)] = _alone(cli.loop)
    return cli


def _alone(loop: FederatedLoop) -> FederatedLoop:
    """Return a loop like ``loop`` in which every client trains alone: with :class:`Standalone`, and without attacks,
    sampling and metrics."""
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

#: Names of the rows below the clients' rows.
OVERALL = ("mean", "fairness", "global", "seconds", "coalitions")


def score_table(outcomes: Sequence[Outcome], measure: str) -> DataFrame:
    """Return the table of one measure of the models that the clients received last.

    The columns are the algorithms, the standalone baseline first. The rows are the clients, in % with the gain over the
    baseline, then the summaries of :data:`OVERALL`."""
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
        cells, clients = score_table(outcomes, measure), len(outcomes[0].names)
        # If there are many clients, show those that gain the most and the least with the first algorithm.
        gains = outcomes[1].gains(outcomes[0], measure) if len(outcomes) > 1 else None
        shown = [*shown_clients(gains, clients), *range(clients, len(cells))]
        columns = {name: cells[name].tolist() for name in cells}
        print_table(_title(measure, outcomes[0].tests), list(cells.index), columns, shown, corner="")


def _title(measure: str, tests: Tests) -> str:
    name = "AUROC" if measure == "auroc" else measure.replace("_", " ").capitalize()
    where = "on the test set" if tests == "shared" else "on the clients' own test samples"
    return f"{name} {where}, %, of the models that the clients received (gain over standalone)"


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv compare`` with the command-line arguments ``args``; print less if ``quiet``."""
    options, rest = compare_parser().parse_known_args(list(args))
    if quiet:
        rest += NO_BARS
    with FolderLock(options.out):
        outcomes = compare(options.config, options.base, rest, options.out, options.tests, printer(quiet))
        tables = pandas.concat({outcome.name: outcome.table for outcome in outcomes}, names=["algorithm"])
        save_table(options.out / "compare.csv", tables.reset_index("algorithm"))
    if not quiet:
        _show(outcomes)
    print(f"Table:  {display_path(options.out / 'compare.csv')}")
    if not quiet:
        print(f"Charts: tensorboard --logdir {display_path(options.out)}")
