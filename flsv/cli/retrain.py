"""flsv retrain: each client's value by training a run's federation without it.

    flsv retrain lightning_logs/version_0
    flsv retrain lightning_logs/version_0 --trainings all --rounds 10
    flsv retrain lightning_logs/version_0 --without Lyon
    flsv retrain lightning_logs/version_0 --backend dask

Trains coalitions of the run's clients, each by the fit of a copy of it, and
computes Shapley values with intervals. By default it trains each client alone,
all but one, and all (2 n + 1 trainings for n clients), with three seeds. From
their outputs it predicts those of all other coalitions (from their scores if
there are no outputs). --trainings all is exact for these trainings. The
coalition of all clients must come to the weights of the run's last checkpoint,
and data that differ from the run's are refused. A training that fails is
named. Finished trainings are kept: start a stopped command again to continue.

The values are written to retrained.csv in the run's folder, and flsv report
shows them. The file also has the shares by other scores: they show how far a
payment depends on the choice of the score.

--without computes no values. It trains the run again with the other clients
only, by the same seed, and saves this module as without_NAME.ckpt.
"""

from __future__ import annotations

import importlib
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import joblib
from pandas import DataFrame

from flsv.cli.command import command_parser, display_path, from_1, printer
from flsv.cli.retrained_run import Question, RunSummary, copy_of_saved_run, summarized_run
from flsv.core.artifacts import client_folders
from flsv.report.basis import ALL_TAKE_PART, basis_of_retrained
from flsv.report.reading import open_run
from flsv.report.shares import findings
from flsv.results.folder import RECORD, RETRAINED
from flsv.results.record import read_record
from flsv.results.terminal import filled, print_table
from flsv.results.text import joined, percent, with_intervals
from flsv.retraining.copied_fits import CopiedFits, Scoring
from flsv.retraining.fit_order import FitResult
from flsv.retraining.retrain import NUM_SEEDS, Retrained, copy_from_run, stored_outputs, train_seeds
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.utility_store import UtilityStore
from flsv.scores.performance import Judges
from flsv.utilities.atomic_files import FolderLock
from flsv.utilities.choices import Participation, Trainings
from flsv.utilities.csv_files import save_table
from flsv.utilities.declared import Count, checked
from flsv.utilities.display import BRACKETS_NOTE
from flsv.utilities.errors import ConfigurationError, listed


@checked
def retrain(
    run: Path,
    coalitions: Trainings = "both",
    *,
    metric: str | None = None,
    mode: str | None = None,
    judges: Judges | None = None,
    rounds: Count | None = None,
    seeds: Count | None = None,
    participation: Participation = "drawn",
    overrides: Sequence[str] = (),
    jobs: Count = 1,
    halvings: Count = 1,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[DataFrame, Path]:
    """Train a run's federation again with only some of its clients, and compute the clients' Shapley values."""
    # Arguments are those of flsv.retrain. None takes the run's own measure and judges, its rounds and three seeds.
    # In the table `by` is the performance that models were judged by, `majority` the accuracy of always answering the
    # most frequent class. With one seed the width of `low` to `high` is from the usual spread between seeds, see
    # flsv.functional.intervals.
    changes = list(overrides)
    if rounds is not None:
        changes.append(f"--trainer.max_epochs={rounds}")

    with summarized_run(
        run, changes, Question(metric, mode, judges, participation), coalitions
    ) as summary:
        for text in summary.warning_texts:
            warnings.warn(text, stacklevel=2)
        for text in summary.notes:
            say(text)
        names = summary.question.names
        outputs = stored_outputs(
            coalitions,
            len(summary.clients),
            measure=summary.question.measure,
            halvings=halvings,
        )
        store = UtilityStore(run / summary.question.file, names, summary.settings, outputs=outputs)
        if not (changes or summary.is_another_game):
            copy_from_run(
                store,
                run,
                names=[summary.by] if len(names) == 1 else names,
                output_names=outputs,
                seeds=range(summary.seed, summary.seed + (seeds or NUM_SEEDS)),
                num_rounds=summary.rounds,
            )
        retrained = train_seeds(
            _training(summary, _fits(summary, jobs)),
            summary.clients,
            design=coalitions,
            halvings=halvings,
            first_seed=summary.seed,
            num_seeds=seeds,
            store=store,
            say=say,
        )
    rows = _table(retrained, summary, has_overrides=bool(overrides))
    rows["finding"] = findings(open_run(run))
    save_table(run / RETRAINED, rows)
    return rows, run / RETRAINED


def _without(run: Path, names: Sequence[str], options: Namespace, changes: Sequence[str]) -> Path:
    """Train a run's federation without the clients ``names``, and return the path of the saved module."""
    question = Question(options.metric, options.mode, options.judges, options.participation)
    with summarized_run(run, changes, question, "leave-one-out") as summary:
        members = []
        omitted = []
        for client, folder in enumerate(client_folders(summary.clients)):
            if summary.clients[client] in names:
                omitted.append(folder)
            else:
                members.append(client)
        if not members or len(omitted) != len({*names}):
            raise ConfigurationError(
                f"--without {' '.join(names)}: expected some of {listed(summary.clients)}, not all."
            )

        path = (run / f"without_{'_'.join(omitted)}.ckpt").absolute()
        order = replace(summary.order, members=tuple(members), save_as=path)
        ((_, result),) = _fits(summary, jobs=1).train([order])
        if not isinstance(result, FitResult):
            raise ConfigurationError(
                f"the federation without {joined(names)} failed to train: {result}"
            )
        utilities = list(result.utilities.values())  # in the order of the question's names
        column = summary.question.names.index(str(summary.question.metric))
        score = float(utilities[column])
        print(
            f"without {joined(names)}: {summary.title} {score:.4g}, by the run's seed {summary.seed}"
        )
    return path


def _fits(summary: RunSummary, jobs: int) -> CopiedFits:
    """Return an object that trains coalitions of a run."""
    make_copy = partial(copy_of_saved_run, summary)
    scoring = Scoring.by(summary.question.measure, summary.question.participation)
    return CopiedFits(make_copy, scoring, jobs=jobs)


def _training(summary: RunSummary, fits: CopiedFits) -> CoalitionTraining:
    """Return the training of a run's coalitions, checked against its checkpoint."""
    return CoalitionTraining(
        fits, summary.order, num_samples=summary.num_samples, proof=summary.proof
    )


def _table(retrained: Retrained, summary: RunSummary, has_overrides: bool) -> DataFrame:
    """Compute the table that :func:`retrain` returns."""
    num_clients = len(summary.clients)
    has_all_coalitions = len(retrained.masks) == 2**num_clients
    changes = []
    if has_overrides:
        changes += summary.changed_settings
    if summary.is_another_game:
        changes.append(ALL_TAKE_PART)
    columns = {
        "client": range(num_clients),
        "client_name": summary.clients,
        "by": summary.title,
        **retrained.columns(summary.question.names, str(summary.question.metric)),
        "majority": summary.majority,
        "seeds": " ".join(map(str, retrained.seeds)),
        "rounds": summary.rounds,
        "trainings": "all" if has_all_coalitions else retrained.design,
        "changed": "; ".join(changes),
    }
    return DataFrame(columns)


def _show(rows: DataFrame, record: Mapping[str, Any]) -> None:
    columns = {"value": with_intervals(rows)}
    basis = basis_of_retrained(rows, record)
    verdict = basis.verdict()
    if not verdict.forbids_payment:
        columns["share"] = rows["share"].map(percent).tolist()

    title = f"{rows['by'].iloc[0]}, by retraining ({basis.origin})"
    print_table(title, rows["client_name"].tolist(), columns)
    print(BRACKETS_NOTE)
    if verdict.reasons:
        print(filled(verdict.text))


@contextmanager
def _workers_of(backend: str | None) -> Iterator[None]:
    """Train on the workers of a joblib backend within this context."""
    # Dask's scheduler is the one of its own configuration, such as DASK_SCHEDULER_ADDRESS, else one of this machine.
    if backend is None:
        yield
        return
    connection: Any = nullcontext()
    try:
        if backend == "dask":
            connection = importlib.import_module("distributed").Client()
        configured_backend = joblib.parallel_config(backend)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigurationError(f"--backend {backend}: {error}") from error
    with connection, configured_backend:
        yield


def _parser() -> ArgumentParser:
    further = "Further arguments are those of flsv fit and override the run's configuration."
    parser = command_parser("flsv retrain", __doc__, further)
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument(
        "--trainings",
        dest="coalitions",
        choices=get_args(Trainings),
        default="both",
        metavar="WHICH",
        help=f"coalitions to train: {', '.join(get_args(Trainings))}. Default: both. leave-one-out only ranks",
    )
    halvings = "with --trainings halves: how often the clients are halved. Default: 1"
    parser.add_argument("--halvings", type=from_1, default=1, help=halvings)
    performances = "accuracy, balanced_accuracy, negative_loss, auroc, average_precision, f1"
    parser.add_argument(
        "--metric",
        help=f"score of a model: {performances}, or a value that the module logs. Default: as in the run's metrics",
    )
    parser.add_argument(
        "--mode",
        choices=("min", "max"),
        help="whether less or more of a logged value is better",
    )
    parser.add_argument(
        "--judges",
        choices=get_args(Judges),
        help="whose samples models are scored on: the server's, or those that all clients hold out. "
        "Default: as in the run",
    )
    parser.add_argument(
        "--rounds",
        type=from_1,
        help="rounds of each training. Default: as in the run",
    )
    parser.add_argument(
        "--seeds",
        type=from_1,
        help="trainings of each coalition, each with another seed. Default: 3",
    )
    parser.add_argument(
        "--participation",
        choices=get_args(Participation),
        default="drawn",
        help="with a sampler: each coalition draws cohorts of the run's size (default), or all its members train",
    )
    without = (
        "clients to leave out: saves the module of the same run of the others as without_NAME.ckpt"
    )
    parser.add_argument("--without", nargs="+", metavar="NAME", help=without)
    jobs = "trainings at once, each in a process of its own. Default: 1, in the command's own"
    parser.add_argument("--jobs", type=from_1, default=1, help=jobs)
    backend = "joblib backend whose workers train, such as dask"
    parser.add_argument("--backend", metavar="NAME", help=backend)
    return parser


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv retrain`` with the command-line arguments ``args``."""
    options, fit_arguments = _parser().parse_known_args(list(args))
    without = vars(options).pop("without")
    backend = vars(options).pop("backend")
    if backend and options.jobs > 1:
        raise ConfigurationError(
            f"--jobs and --backend {backend}: its workers are as many as it has."
        )
    lock = FolderLock(options.run) if options.run.is_dir() else nullcontext()
    with _workers_of(backend), lock:
        changes = list(fit_arguments)
        if options.rounds:
            changes.append(f"--trainer.max_epochs={options.rounds}")
        if without:
            path = _without(options.run, without, options, changes)
        else:
            rows, path = retrain(
                **vars(options),
                overrides=fit_arguments,
                say=printer(quiet),
            )
            if not quiet:
                _show(rows, read_record(options.run / RECORD))
    print(f"{'Saved' if without else 'Retrained'}: {display_path(path)}")
