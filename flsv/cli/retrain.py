"""flsv retrain: each client's value by training a run's federation without it.

    flsv retrain lightning_logs/version_0
    flsv retrain lightning_logs/version_0 --trainings all --rounds 10
    flsv retrain lightning_logs/version_0 --without Lyon
    flsv retrain lightning_logs/version_0 --with Osaka=data/osaka.csv
    flsv retrain lightning_logs/version_0 --backend dask

Trains coalitions of the run's clients, each in a process of its own, and
computes Shapley values with intervals. By default it trains each client alone,
all but one, and all (2 n + 1 trainings for n clients), with three seeds. From
their outputs it predicts those of all other coalitions (from their scores if
there are no outputs). --trainings all is exact for these trainings. The
coalition of all clients must come to the weights of the run's last checkpoint,
and data that differ from the run's are refused. A training that fails is
named. Finished trainings are kept: start a stopped command again to continue.

The values are written to retrained.csv in the run's folder, and flsv report
shows them. The file also has the shares by other scores and without each seed:
they show how far a payment depends on the choice of the score and on chance.

--without computes no values. It trains the run again with the other clients
only, by the same seed, and saves this module as without_NAME.ckpt.

--with computes the gain by a new client, named with its file or folder: the
score with all clients and it, minus that with all clients. All its samples are
for training. The validation set, and means and categories of a table, stay the
run's. with_NAME.csv has the gain by each of three seeds, and the mean with its
interval. This is no share of a payment: for that, train a run with it.
"""

from __future__ import annotations

import importlib
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

import joblib
import torch
from pandas import DataFrame

from flsv.cli.command import command_parser, display_path, from_1, printer
from flsv.cli.retrained_run import Question, RunSummary, in_children, summarized_run, train
from flsv.core.artifacts import client_folders
from flsv.functional.intervals import BRACKETS, interval_over_seeds
from flsv.functional.shapley.few_coalitions import Which, few_coalitions
from flsv.games.performance import Judges
from flsv.report.basis import ALL_TAKE_PART, basis_of_retrained
from flsv.results.folder import RECORD, RETRAINED, FolderLock
from flsv.results.record import read_record
from flsv.results.terminal import print_table
from flsv.results.text import joined, percent, with_intervals
from flsv.retraining.fits_in_processes import FitsInProcesses, Piece, Prediction
from flsv.retraining.retrained_values import SEEDS, Retrained, learn, stored_outputs, train_seeds
from flsv.retraining.train_fits import Fit
from flsv.retraining.utility_store import LAST, UtilityStore
from flsv.utilities.choices import Participation
from flsv.utilities.csv_files import NAN, save_table
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.forks import cores

#: A training is ended after ``LONGER`` times the run's seconds, plus ``LEAST_S``.
LONGER, LEAST_S = 20, 3600.0


@checked
def retrain(
    run: Path,
    which: Which = "both",
    *,
    metric: str | None = None,
    mode: str | None = None,
    judges: Judges | None = None,
    rounds: Count | None = None,
    seeds: Count | None = None,
    participation: Participation = "drawn",
    overrides: Sequence[str] = (),
    jobs: Count | None = None,
    threads: Count | None = 1,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[DataFrame, Path]:
    """Train a run's federation again with only some of its clients, and compute the clients' Shapley values."""
    # Arguments are those of flsv.retrain. None takes the run's own measure and judges, its rounds, three seeds, and all
    # cores (one process on an accelerator). Give `threads=None` only if this process has not used PyTorch's threads
    # itself.
    # In the table `by` is the performance that models were judged by, `majority` the accuracy of always answering the
    # most frequent class. With one seed the width of `low` to `high` is from the usual spread between seeds, see
    # flsv.functional.intervals.
    changes = [*overrides, *([] if rounds is None else [f"--trainer.max_epochs={rounds}"])]

    with summarized_run(
        run, changes, Question(metric, mode, judges, participation), which
    ) as summary:
        for text in summary.warned:
            warnings.warn(text, stacklevel=2)
        for text in summary.said:
            say(text)
        names = summary.question.names
        outputs = stored_outputs(
            few_coalitions(len(summary.clients), which), summary.question.measure
        )
        store = UtilityStore(run / summary.question.file, names, summary.settings, outputs=outputs)
        if not (changes or summary.another_game):
            by = [summary.by] if len(names) == 1 else names
            learn(
                store,
                run,
                by,
                outputs,
                range(summary.seed, summary.seed + (seeds or SEEDS)),
                summary.rounds,
            )
        trainings = _trainings(
            summary, jobs, threads, None if changes else _limit_s(read_record(run / RECORD))
        )
        found = train_seeds(trainings, summary.num_samples, which, summary.seed, seeds, store, say)
    rows = _table(found, summary, bool(overrides))
    save_table(run / RETRAINED, rows)
    return rows, run / RETRAINED


def _without(
    run: Path, names: Sequence[str], options: Namespace, changes: Sequence[str], threads: int
) -> Path:
    """Train a run's federation without the clients ``names``, and return the path of the saved module."""
    question = Question(options.metric, options.mode, options.judges, options.participation)
    with summarized_run(run, changes, question, "leave-one-out") as summary:
        members = tuple(client for client, name in enumerate(summary.clients) if name not in names)
        if not members or len(members) + len({*names}) != len(summary.clients):
            raise ConfigurationError(
                f"--without {' '.join(names)}: expected some of {listed(summary.clients)}, not all."
            )
        left_out = [
            folder
            for client, folder in enumerate(client_folders(summary.clients))
            if client not in members
        ]
        path = (run / f"without_{'_'.join(left_out)}.ckpt").absolute()
        task = partial(train, summary, Piece(summary.seed, members, save=path), threads)
        ((_, fit),) = in_children(
            [(members, task)], 1, None if changes else _limit_s(read_record(run / RECORD))
        )
        if not isinstance(fit, Fit):
            raise ConfigurationError(
                f"the federation without {joined(names)} failed to train: {fit}"
            )
        score = fit.rows[LAST][summary.question.names.index(str(summary.question.metric))][0]
        print(
            f"without {joined(names)}: {summary.title} {score:.4g}, by the run's seed {summary.seed}"
        )
    return path


def _with(run: Path, joining: str, options: Namespace, changes: Sequence[str]) -> Path:
    """Compute the gain of a new client, ``NAME=DATA``, and return the path of the CSV file."""
    name, _, given = joining.partition("=")
    if not (name and given):
        raise ConfigurationError(
            f"--with {joining}: expected a name and data, as Osaka=data/osaka.csv."
        )
    question = Question(options.metric, options.mode, options.judges, options.participation)
    with summarized_run(run, changes, question, "leave-one-out") as summary:
        trainings = _trainings(
            replace(
                summary,
                joining={name: str(Path(given).absolute()) if Path(given).exists() else given},
            ),
            options.jobs,
            None,
            None if changes else _limit_s(read_record(run / RECORD)),
        )
        everybody, question = tuple(range(len(summary.clients))), summary.question
        place = question.names.index(str(question.metric))
        seeds, scores = list(range(summary.seed, summary.seed + (options.seeds or SEEDS))), []
        for seed in seeds:
            fits: dict[Any, Any] = dict(
                trainings.fits([everybody, (*everybody, len(everybody))], seed)
            )
            if failed := [fit for fit in fits.values() if not isinstance(fit, Fit)]:
                raise ConfigurationError(f"the federation with {name} failed to train: {failed[0]}")
            without, joined = (fits[each] for each in sorted(fits))
            scores.append(
                [
                    without.empty[place][0],
                    *(each.rows[LAST][place][0] for each in (without, joined)),
                ]
            )
    none, before, after = torch.tensor(scores, dtype=torch.float64).T
    gains = after - before
    half = float(interval_over_seeds(torch.stack([gains, before - none], 1))[0])
    mean = float(gains.mean())
    columns: Any = {
        "client_name": name,
        "by": summary.title,
        "seed": [*map(str, seeds), "mean"],
        "without": [*before.tolist(), float(before.mean())],
        "with": [*after.tolist(), float(after.mean())],
        "gain": [*gains.tolist(), mean],
        "low": [*[NAN] * len(seeds), mean - half],
        "high": [*[NAN] * len(seeds), mean + half],
        "rounds": summary.rounds,
    }
    path = run / f"with_{client_folders([name])[0]}.csv"
    save_table(path, DataFrame(columns))
    (gain,) = with_intervals([mean], [mean - half], [mean + half])
    print(
        f"with {name}: {summary.title} {float(after.mean()):.4g} after {float(before.mean()):.4g}, a gain of {gain}"
    )
    print(BRACKETS)
    return path


def _trainings(
    summary: RunSummary, jobs: int | None, threads: int | None, limit_s: float | None
) -> FitsInProcesses:
    """Return an object that trains coalitions in child processes."""
    jobs = jobs or (cores() if summary.on_cpu else 1)
    threads = threads or max(1, min(torch.get_num_threads(), cores() // jobs))

    def task(piece: Piece | Prediction) -> Callable[[], Any]:
        return partial(train, summary, piece, threads)

    verified_by = None if summary.checkpoint is None else summary.seed
    return FitsInProcesses(task, len(summary.clients), jobs, limit_s, verified_by, in_children)


def _limit_s(record: Mapping[str, Any]) -> float | None:
    """Return the time limit of a training in seconds from the run's duration, or None if it has not ended."""
    if not record.get("ended"):
        return None
    started, ended = (datetime.fromisoformat(record[name]) for name in ("started", "ended"))
    return LEAST_S + LONGER * (ended - started).total_seconds()


def _table(found: Retrained, summary: RunSummary, changed: bool) -> DataFrame:
    """Compute the table that :func:`retrain` returns."""
    n, seeds = len(summary.clients), [str(seed) for seed in found.seeds]
    columns = {
        "client": range(n),
        "client_name": summary.clients,
        "by": summary.title,
        **found.columns(summary.question.names, str(summary.question.metric)),
        "majority": summary.majority,
        "seeds": " ".join(seeds),
        "rounds": summary.rounds,
        "trainings": "all" if len(found.masks) == 2**n else found.which,
        "changed": "; ".join(
            [
                *(summary.changed if changed else ()),
                *([ALL_TAKE_PART] if summary.another_game else ()),
            ]
        ),
    }
    return DataFrame(columns)


def _show(rows: DataFrame, record: Mapping[str, Any]) -> None:
    intervals = with_intervals(
        rows["value"].tolist(),
        rows["low"].tolist(),
        rows["high"].tolist(),
    )
    columns = {"value": intervals}
    basis = basis_of_retrained(rows.to_dict("records"), record)
    verdict = basis.verdict()
    if not verdict.forbids:
        columns["share"] = rows["share"].map(percent).tolist()

    title = f"{rows['by'].iloc[0]}, by retraining ({basis.origin})"
    print_table(title, rows["client_name"].tolist(), columns)
    print(BRACKETS)
    if verdict.reasons:
        print(verdict.text)


@contextmanager
def _workers_of(backend: str | None) -> Iterator[None]:
    """Train on the workers of a joblib backend within this context."""
    # Dask's scheduler is the one of its own configuration, such as DASK_SCHEDULER_ADDRESS, else one of this machine.
    if backend is None:
        yield
        return
    try:
        client = (
            importlib.import_module("distributed").Client() if backend == "dask" else nullcontext()
        )
        configured = joblib.parallel_config(backend)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigurationError(f"--backend {backend}: {error}") from error
    with client, configured:
        yield


def _parser() -> ArgumentParser:
    further = "Further arguments are those of flsv fit and override the run's configuration."
    parser = command_parser("flsv retrain", __doc__, further)
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="the run's folder",
    )
    parser.add_argument(
        "--trainings",
        dest="which",
        choices=get_args(Which),
        default="both",
        metavar="WHICH",
        help=f"coalitions to train: {', '.join(get_args(Which))}. Default: both. leave-one-out only ranks",
    )
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
    joining = (
        "a client that took no part, and its file or folder: what it would add to the others' model"
    )
    parser.add_argument(
        "--with",
        dest="joining",
        metavar="NAME=DATA",
        help=joining,
    )
    jobs = "trainings at once, each in a process of its own. Default: as many as cores, on an accelerator 1"
    parser.add_argument("--jobs", type=from_1, help=jobs)
    backend = "joblib backend whose workers train, such as dask. Default: processes of this machine"
    parser.add_argument("--backend", metavar="NAME", help=backend)
    return parser


def _check_options(options: Namespace) -> None:
    if options.without and options.joining:
        raise ConfigurationError("--with and --without are two questions: ask one after the other.")
    if options.backend and options.jobs:
        raise ConfigurationError(
            f"--jobs and --backend {options.backend}: its workers are as many as it has."
        )


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv retrain`` with the command-line arguments ``args``."""
    options, fit_arguments = _parser().parse_known_args(list(args))
    _check_options(options)
    without, joining, backend = (
        vars(options).pop(name) for name in ("without", "joining", "backend")
    )
    lock = FolderLock(options.run) if options.run.is_dir() else nullcontext()
    with _workers_of(backend), lock:
        changes = [
            *fit_arguments,
            *([f"--trainer.max_epochs={options.rounds}"] if options.rounds else ()),
        ]
        if joining:
            path = _with(options.run, joining, options, changes)
        elif without:
            path = _without(
                options.run,
                without,
                options,
                changes,
                torch.get_num_threads(),
            )
        else:
            rows, path = retrain(
                **vars(options),
                overrides=fit_arguments,
                threads=None,
                say=printer(quiet),
            )
            if not quiet:
                _show(rows, read_record(options.run / RECORD))
    print(f"{'Saved' if without else 'Retrained'}: {display_path(path)}")
