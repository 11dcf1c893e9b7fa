"""``flsv retrain``: each client's value by training the federation again without it, after a run.

    flsv retrain lightning_logs/version_0
    flsv retrain lightning_logs/version_0 --trainings singles --rounds 10
    torchrun --nproc-per-node 4 -m flsv retrain lightning_logs/version_0

A metric's values during a run are cheap and approximate. This command trains the same federation again with only some
of its clients, and computes Shapley values from the results. If the module allows it, the models of all coalitions are
rows of one batched model and train side by side, with three seeds. Up to seven clients, all coalitions are trained and
the values are exact; with more clients, each client alone, every two, and all but one (with ten to twelve clients also
all but two; with more, coalitions of all sizes and their complements in place of every two). If the module does not
allow it, the command says why, trains each client alone, all but one, and all (2 n + 1 trainings for n clients, one
after the other), and fits a game to their utilities. --trainings singles (n + 1 trainings) only ranks the clients,
without amounts. Under torchrun the processes share the coalitions among them.

If the run draws some of its clients for each round, each coalition draws its own cohorts among its members, as many as
the run draws, so that run and retraining play one game; by --participation all, all members train in every round.

The values, with intervals, are written to retrained.csv in the run's folder and shown by flsv report, with the
coalitions, seeds and rounds that were trained and all settings that were changed. The file also has the shares by
accuracy, by balanced accuracy and by the loss, and the shares without each of the seeds: they show how far a payment
depends on the choice of the score and on chance. Models are judged as the run's metrics judged them, or by --metric
(``by`` in the file). The command warns if that is accuracy and most samples belong to one class. Data that differ from
the run's are refused. Finished trainings are kept: start a stopped command again to continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from pandas import DataFrame
from torch import Tensor

from flsv._lightning.evaluation import all_on_device
from flsv._lightning.patches import callbacks_of
from flsv.cli.command import display_path, done_waiting, printer, waiting
from flsv.cli.parser import FederatedCLI, find_loop
from flsv.cli.parsers import retrain_parser
from flsv.cli.saved_run import changed_settings, check_data, judges_of, performance_by, saved_run
from flsv.engines.ranks import ranks_of_environment
from flsv.functional.shapley.few_coalitions import Which, default_design, few_coalitions
from flsv.functional.shapley.one_seed import BRACKETS
from flsv.games.copy_module import copy_module
from flsv.games.performance import (
    CLASSIFICATION,
    Judges,
    ModelScore,
    judged_by,
    performance_of,
    scores_positive,
    title_of,
)
from flsv.report.basis import ALL_TAKE_PART, RANKING_ONLY, SHARE_BY, retrained_from
from flsv.report.facts import retrained_caveats
from flsv.results.folder import RECORD, RETRAINED, FolderLock
from flsv.results.record import read_record
from flsv.results.terminal import print_table
from flsv.results.text import joined, percent, with_intervals
from flsv.retraining.coalition_rounds import samplers_among
from flsv.retraining.retrained_utility import TrainedGame
from flsv.retraining.train_coalitions import SEEDS, Here, train_seeds, values_of
from flsv.retraining.utility_store import LAST, UtilityStore
from flsv.retraining.whole_fits import Participation, called, coalition_loop, sampler_of, trained_in
from flsv.sampling import ClientSampler, FullParticipation
from flsv.training.rows.row_checks import of_the_run
from flsv.utilities.csv_files import NAN, save_table
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError


@checked
def retrain(
    run: Path,
    which: Which = "auto",
    *,
    metric: str | None = None,
    mode: str | None = None,
    judges: Judges | None = None,
    rounds: Count | None = None,
    seeds: Count | None = None,
    participation: Participation = "drawn",
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    wait: Callable[[str], None] = lambda text: None,
) -> tuple[DataFrame, Path]:
    """Train a run's federation again with only some of its clients, and compute the clients' values from the results.

    Args:
        run: the folder of a run that ``flsv fit`` has written.
        which: the coalitions, see :func:`flsv.functional.few_coalitions`. If they cannot be trained side by side,
            ``"auto"`` stands for ``"both"``: each client alone, all but one, and all.
        metric: the performance of a model, on the server's validation set, see
            :class:`flsv.retraining.RetrainedUtility`. None: the performance that the run's metrics used; accuracy if
            they used none. Trainings are stored separately for each performance.
        mode: ``"min"`` or ``"max"``, whether less or more of a logged ``metric`` is better.
        judges: the owner of the samples on which models are judged: the ``"server"``, or the ``"clients"`` with their
            validation samples. None: as for the run's metrics.
        rounds: the number of rounds of each training; default: the number that was set for the run.
        seeds: the number of trainings of every coalition, each with another seed; their spread shows the noise of
            training. None: three if they are trained side by side, else one.
        participation: with a sampler, whether each coalition draws its own cohorts among its members, as many clients
            as the run draws (``"drawn"``), or all members of a coalition train in every round (``"all"``).
        overrides: arguments of ``flsv fit`` that override the run's configuration.
        say: called with lines of text: how many coalitions are trained, and why one after the other, if they are.
        wait: called with a text that says what is being done, before each step that takes long.

    Returns:
        A table with one row per client, and the file that it was written to. ``by`` is the performance that models were
        judged by. ``low`` and ``high`` are the ends of the value's interval; with one seed, the interval is the average
        spread between seeds, see :func:`flsv.functional.shapley.one_seed.one_seed_stderr`. ``majority`` is the accuracy
        of always answering with the validation set's most frequent class, NaN if models are not judged by accuracy.
        ``seeds``, ``rounds`` and ``trainings`` describe what was trained, ``changed`` lists every setting that differs
        from the run's.

    Raises:
        ConfigurationError: the folder holds no configuration; the data are not those of the run; the federation has
            entries of the model that stay at the clients; or the folder holds trainings with other settings or data.
    """
    _check_performance(metric, mode)
    ranks = ranks_of_environment()
    arguments = [*overrides, *([] if rounds is None else [f"--trainer.max_epochs={rounds}"])]

    def told(text: str) -> None:
        say(text)
        wait("flsv retrain: training coalitions")

    with saved_run(run, arguments) as (make, first):
        cli = make(first)
        metric, mode, judges = _performance_of(find_loop(cli.trainer), metric, mode, judges)
        asked, names, file = _scores(metric, mode, judges)
        identity, clients = cli.identity(), cli.datamodule.client_names
        loop = find_loop(cli.trainer)
        sampler, draws = sampler_of(loop, participation), not isinstance(loop.config.sampler, FullParticipation)
        another_game = draws and participation == "all"
        samplers_among(sampler, few_coalitions(len(clients), which))  # refused before training
        check_data(run, read_record(run / RECORD), identity, clients)
        settings = {**identity.flat(), "metric": joined(names), "mode": mode}
        settings |= {"participation": participation} if draws else {}
        store = UtilityStore(run / f"retrained_{file}.csv", names, settings, ranks=ranks)
        by = called(asked) if isinstance(asked, ModelScore) else metric

        def game(seed: int) -> TrainedGame:
            # ShadowShapley's coalitions at the end of the run are trained in exactly the same way.
            own = make(seed)
            return TrainedGame(
                lambda cohort: (_trainer(make(seed), cohort, seed), copy_module(own.model)),
                own.datamodule,
                asked,
                sampler=sampler,
            )

        ended = [by] if len(names) == 1 else names
        for seed in range(first, first + (seeds or SEEDS)) if not arguments and not another_game else ():
            for members, values in trained_in(run, ended, seed, cli.trainer.max_epochs).items():
                if store.missing(seed, [members]):
                    store.add(seed, members, {LAST: [[value] for value in values]})
        wait("flsv retrain: training coalitions")
        found = train_seeds(Here(game), cli.datamodule.num_samples.tolist(), which, first, seeds, store, ranks, told)
        majority = _majority(cli, by)
        if isinstance(asked, ModelScore) and scores_positive(asked):
            by = title_of(asked, cli.datamodule.positive_class)
    changed = changed_settings(run, identity) if overrides else []
    changed += [ALL_TAKE_PART] if another_game else []
    trained = [str(seed) for seed in found.seeds]
    facts = {
        "majority": majority,
        "seeds": " ".join(trained),
        "rounds": cli.trainer.max_epochs,
        "trainings": _design(found.which, len(found.masks) == 2 ** len(clients), len(clients)),
        "changed": "; ".join(changed),
    }
    by_score = dict(zip(names, found.utilities.unbind(-1)))
    columns = _shared_out(found.masks, by_score, str(metric), trained, found.which in RANKING_ONLY)
    rows = DataFrame({"client": range(len(clients)), "client_name": clients, "by": by, **columns, **facts})
    if ranks.rank == 0:
        save_table(run / RETRAINED, rows)
    return rows, run / RETRAINED


def _design(which: Which, everything: bool, num_clients: int) -> str:
    if everything:
        return "all"
    return default_design(num_clients) if which == "auto" else which


def _scores(metric: str, mode: Any, judges: Judges) -> tuple[ModelScore | Sequence[str], Sequence[str], str]:
    """Return the performance to train for, the names of all scores that its trainings give, and the file's name
    part."""
    if judges == "clients":
        measure = judged_by(judges, performance_of("flsv retrain", metric, mode, "metric"))
        return measure, (metric,), f"clients_{metric.replace('/', '-')}"
    if metric in CLASSIFICATION:
        return CLASSIFICATION, CLASSIFICATION, "scores"
    other: Any = performance_of("flsv retrain", metric, mode, "metric")
    return other, (metric,), metric.replace("/", "-")


def _performance_of(
    loop: Any, metric: str | None, mode: str | None, judges: Judges | None
) -> tuple[str, str | None, Judges]:
    """Return the performance, its mode and the judges: the given ones, or those of the run's metrics in their place."""
    if metric is None:
        metric, mode = performance_by(loop)
    return metric, mode, judges or judges_of(loop)


def _check_performance(metric: str | None, mode: str | None) -> None:
    if mode is not None and metric is None:
        raise ConfigurationError(f"mode={mode!r}: name the logged value, too (metric).")
    if metric == "per_class_accuracy":
        raise ConfigurationError(f"metric={metric!r} has a number per class: use balanced_accuracy, their mean.")


def _shared_out(
    masks: Tensor, by_score: Mapping[str, Tensor], metric: str, seeds: Sequence[str], rank_only: bool
) -> dict[str, list[float]]:
    """Compute the clients' values, intervals and shares, ``{column: [n]}``, from the utilities of the coalitions.

    Args:
        masks: bool ``[K, n]``, the K coalitions of n clients.
        by_score: ``{score: utilities [seeds, K]}``.
        metric: the score whose values are returned; shares are returned for all scores.
        seeds: the seeds of the trainings, as text.
        rank_only: whether the coalitions only rank the clients, so that no shares are computed.
    """
    utilities = by_score[metric]
    columns = values_of(masks, utilities, rank_only)
    if rank_only:
        return columns
    others = {f"{SHARE_BY} by {name}": of for name, of in by_score.items() if len(by_score) > 1 and of.isfinite().all()}
    for place, seed in enumerate(seeds) if len(seeds) > 1 else ():
        others[f"{SHARE_BY} without seed {seed}"] = torch.cat([utilities[:place], utilities[place + 1 :]])
    return columns | {name: values_of(masks, of, rank_only)["share"] for name, of in others.items()}


def _trainer(cli: FederatedCLI, cohort: ClientSampler, seed: int) -> L.Trainer:
    """Return the configuration's trainer, with a loop in which the clients take part that ``cohort`` draws."""
    loop = find_loop(cli.trainer)
    others = [c for c in callbacks_of(cli.trainer) if c is not loop and not of_the_run(c)]
    # mypy: set by Lightning's connectors
    cli.trainer.callbacks = [*others, coalition_loop(loop, cohort, seed)]  # type: ignore[attr-defined]
    return cli.trainer


def _majority(cli: FederatedCLI, metric: str) -> float:
    """Return the fraction of the validation set's most frequent class if models are judged by accuracy; else NaN."""
    if metric != "accuracy":
        return NAN
    cli.trainer.strategy.connect(cli.model)  # the module's hooks may turn the loaders' batches into pairs (x, y)
    labels = torch.cat([y for _, y in all_on_device(cli.trainer, cli.datamodule.val_dataloader())])
    return float(labels.bincount().max()) / len(labels)


def _show(rows: DataFrame, planned: int | None) -> None:
    ends = (rows[name].tolist() for name in ("value", "low", "high"))
    columns = {"value": with_intervals(*ends), "share": rows["share"].map(percent).tolist()}
    names, first = rows["client_name"].tolist(), rows.iloc[0].to_dict()
    print_table(f"{first['by']}, by retraining ({retrained_from(first, planned)})", names, columns)
    print(BRACKETS)
    if len(first["seeds"].split()) == 1:
        print("These are of one seed: wide, by what seeds differ by in trials. Before more coalitions, use --seeds 3.")
    for text in retrained_caveats(rows.to_dict("records")):
        print(text)


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv retrain`` with the command-line arguments ``args``; print less if ``quiet``."""
    options, rest = retrain_parser().parse_known_args(list(args))
    waiting("flsv retrain: reading the run and its data", quiet or ranks_of_environment().rank > 0)
    say = printer(quiet or ranks_of_environment().rank > 0)
    alone = ranks_of_environment().rank == 0 and options.run.is_dir()
    with FolderLock(options.run) if alone else nullcontext():
        rows, path = retrain(
            options.run,
            options.trainings,
            metric=options.metric,
            mode=options.mode,
            judges=options.judges,
            rounds=options.rounds,
            seeds=options.seeds,
            participation=options.participation,
            overrides=rest,
            say=say,
            wait=partial(waiting, quiet=quiet or ranks_of_environment().rank > 0),
        )
    done_waiting()
    if ranks_of_environment().rank:
        return
    if not quiet:
        _show(rows, read_record(options.run / RECORD).get("rounds"))
    print(f"Retrained: {display_path(path)}")
