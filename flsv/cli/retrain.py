"""``flsv retrain``: each client's value by training the federation again without it, after a run.

    flsv retrain lightning_logs/version_0
    flsv retrain lightning_logs/version_0 --trainings singles --rounds 10
    torchrun --nproc-per-node 4 -m flsv retrain lightning_logs/version_0

A metric's values during a run are cheap and approximate. This command trains the same federation again with only some
of its clients, and computes Shapley values from the results. If the module allows it, the models of all coalitions are
rows of one batched model and train side by side, with three seeds. Up to seven clients, all coalitions are trained and
the values are exact; with more clients, each client alone, every two, and all but one (with ten to twelve clients also
all but two). If the module does not allow it, the command says why, trains each client alone, all but one, and all (2 n
+ 1 trainings for n clients, one after the other), and fits a game to their utilities. --trainings singles (n + 1
trainings) only ranks the clients, without amounts. Under torchrun the processes share the coalitions among them.

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
from flsv.cli.command import display_path, printer
from flsv.cli.parser import FederatedCLI, find_loop
from flsv.cli.parsers import retrain_parser
from flsv.cli.saved_run import changed_settings, check_data, judges_of, performance_by, saved_run
from flsv.engines.ranks import ranks_of_environment
from flsv.functional.shapley.few_coalitions import Which, default_design, few_coalitions, retrained_shapley
from flsv.functional.shapley.one_seed import BRACKETS
from flsv.games.performance import (
    CLASSIFICATION,
    Judges,
    ModelScore,
    judged_by,
    performance_of,
    scores_positive,
    title_of,
)
from flsv.games.retrained_utility import RetrainedUtility
from flsv.games.stored_utility import StoredUtility
from flsv.report.facts import retrained_caveats
from flsv.report.shares import ALL_TAKE_PART, RANKING_ONLY, SHARE_BY, retrained_from
from flsv.results.folder import RECORD, RETRAINED, FolderLock
from flsv.results.record import read_record
from flsv.results.terminal import print_table
from flsv.results.text import NONE, joined, percent, shares_in
from flsv.retraining.coalition_rounds import samplers_among
from flsv.retraining.side_by_side import NotSideBySide, SideBySideUtility
from flsv.retraining.whole_fits import OF_THE_RUN, Participation, called, coalition_loop, sampler_of, trained_in
from flsv.sampling import ClientSampler, FullParticipation
from flsv.utilities.csv_files import NAN, save_table
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError

#: Default number of seeds if the coalitions are trained side by side.
SEEDS = 3


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
) -> tuple[DataFrame, Path]:
    """Train a run's federation again with only some of its clients, and compute the clients' values from the results.

    Args:
        run: the folder of a run that ``flsv fit`` has written.
        which: the coalitions, see :func:`flsv.functional.few_coalitions`. If they cannot be trained side by side,
            ``"auto"`` stands for ``"both"``: each client alone, all but one, and all.
        metric: the performance of a model, on the server's validation set, see :class:`flsv.games.RetrainedUtility`.
            None: the performance that the run's metrics used; accuracy if they used none. Trainings are stored
            separately for each performance.
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
    utilities: list[Tensor] = []
    together = True

    def told(done: int, of: int) -> None:
        say(f"{done} of {of} coalitions")

    with saved_run(run, arguments) as (make, first):
        record = read_record(run / RECORD)
        while seeds is None or len(utilities) < seeds:
            seed = first + len(utilities)
            cli = make(seed)
            metric, mode, judges = _performance_of(find_loop(cli.trainer), metric, mode, judges)
            asked, names, file = _scores(metric, mode, judges)
            utility = RetrainedUtility(
                lambda cohort, seed=seed: _trainer(make(seed), cohort, seed),  # type: ignore[misc]  # a default argument
                cli.model,
                cli.datamodule,
                asked,
                max_clients=10**6,
                mode=mode,  # type: ignore[arg-type]  # checked by RetrainedUtility
                ranks=ranks,
                sampler=sampler_of(find_loop(cli.trainer), participation),
            )
            samplers_among(utility.sampler, few_coalitions(utility.num_players, which))  # refused before training
            identity = cli.identity()
            check_data(run, record, identity, cli.datamodule.client_names)
            settings = {**identity.flat(), "metric": joined(names), "mode": mode}
            if draws := not isinstance(find_loop(cli.trainer).config.sampler, FullParticipation):
                settings["participation"] = participation
            another_game = draws and participation == "all"
            path = run / f"retrained_{file}.csv"
            by = _by(asked, metric, mode)
            # ShadowShapley's coalitions at the end of the run are trained in exactly the same way.
            ended = [by] if len(names) == 1 else names
            known = {} if arguments or another_game else trained_in(run, ended, seed, cli.trainer.max_epochs)
            keep = partial(StoredUtility, path=path, settings=settings, ranks=ranks, told=told, seed=seed, names=names)
            keep = partial(keep, known=known)
            found, which, together = _play(utility, keep, which, together, compare=not utilities, say=say)
            utilities.append(found)
            everything = len(found) == 2**utility.num_players
            seeds = seeds or (SEEDS if together else 1)
        majority = _majority(cli, by)
        by = title_of(utility.metric, cli.datamodule.positive_class) if scores_positive(utility.metric) else by
    changed = changed_settings(run, identity) if overrides else []
    changed += [ALL_TAKE_PART] if another_game else []
    trained = [str(seed) for seed in range(first, first + len(utilities))]
    facts = {
        "majority": majority,
        "seeds": " ".join(trained),
        "rounds": cli.trainer.max_epochs,
        "trainings": _design(which, everything, utility.num_players),
        "changed": "; ".join(changed),
    }
    clients = cli.datamodule.client_names
    by_score = dict(zip(names, torch.stack(utilities).view(seeds, len(found), -1).unbind(-1)))
    masks = few_coalitions(len(clients), which)
    values = _shared_out(masks, by_score, str(metric), trained, which in RANKING_ONLY)
    rows = DataFrame({"client": range(len(clients)), "client_name": clients, "by": by, **values, **facts})
    if ranks.rank == 0:
        save_table(run / RETRAINED, rows)
    return rows, run / RETRAINED


def _by(asked: Any, metric: str, mode: str | None) -> str:
    """Return the name of the performance ``asked`` for in the file of coalitions' utilities."""
    if isinstance(asked, ModelScore):
        return called(asked)
    return metric if mode is None else f"{metric} ({mode})"


def _design(which: Which, everything: bool, num_clients: int) -> str:
    if everything:
        return "all"
    return default_design(num_clients) if which == "auto" else which


def _scores(metric: str, mode: Any, judges: Judges) -> tuple[str | ModelScore | Sequence[str], Sequence[str], str]:
    """Return the performance to train for, the names of all scores that its trainings give, and the file's name
    part."""
    if judges == "clients":
        measure = judged_by(judges, performance_of("flsv retrain", metric, mode, "metric"))
        return measure, (metric,), f"clients_{metric.replace('/', '-')}"
    if metric in CLASSIFICATION:
        return CLASSIFICATION, CLASSIFICATION, "scores"
    return metric, (metric,), metric.replace("/", "-")


def _performance_of(
    loop: Any, metric: str | None, mode: str | None, judges: Judges | None
) -> tuple[str, str | None, Judges]:
    """Return the performance, its mode and the judges: the given ones, or those of the run's metrics in their place."""
    if metric is None:
        metric, mode = performance_by(loop)
    return metric, mode, judges or judges_of(loop)


def _check_performance(metric: str | None, mode: str | None) -> None:
    if mode is not None and metric is None:
        raise ConfigurationError(f"mode={mode!r}: say by metric, too, which logged value it is of.")
    if metric == "per_class_accuracy":
        raise ConfigurationError(f"metric={metric!r} is a number per class: say balanced_accuracy, their mean.")


def _play(
    utility: RetrainedUtility,
    keep: partial[StoredUtility],
    which: Which,
    together: bool,
    compare: bool,
    say: Callable[[str], None],
) -> tuple[Tensor, Which, bool]:
    """Train the coalitions, and return their utilities, the name of their set, and whether they were trained together.

    The set's name is ``which``, or ``"both"`` in place of ``"auto"`` if they cannot be trained together, as rows of one
    batched model.
    """
    masks = few_coalitions(utility.num_players, which)
    try:
        if together:
            side_by_side = SideBySideUtility(utility, keep.keywords["seed"], compare)
            return keep(side_by_side, at_once=len(masks))(masks), which, True
    except NotSideBySide as error:
        if which == "auto" and compare:
            which, masks = "both", few_coalitions(utility.num_players, "both")
        say(f"{len(masks) - 1} trainings follow, one after the other: {error}")
    return keep(utility)(masks), which, False


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
    values, half = retrained_shapley(masks, utilities)
    columns = {"value": values.tolist(), "low": (values - half).tolist(), "high": (values + half).tolist()}
    # Only for ranking: the coalitions that are missing would change amounts by a third.
    columns["share"] = [NAN] * masks.shape[1] if rank_only else shares_in(columns["value"])
    if rank_only:
        return columns
    others = {f"{SHARE_BY} by {name}": of for name, of in by_score.items() if len(by_score) > 1 and of.isfinite().all()}
    for place, seed in enumerate(seeds) if len(seeds) > 1 else ():
        others[f"{SHARE_BY} without seed {seed}"] = torch.cat([utilities[:place], utilities[place + 1 :]])
    return columns | {name: shares_in(retrained_shapley(masks, of)[0].tolist()) for name, of in others.items()}


def _trainer(cli: FederatedCLI, cohort: ClientSampler, seed: int) -> L.Trainer:
    """Return the configuration's trainer, with a loop in which the clients take part that ``cohort`` draws."""
    loop = find_loop(cli.trainer)
    others = [c for c in callbacks_of(cli.trainer) if c is not loop and not isinstance(c, OF_THE_RUN)]
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
    cells = rows[["value", "low", "high"]].map(lambda value: f"{value:.4f}" if value == value else NONE)
    columns = {
        "value": cells["value"],
        "90 % interval": (cells["low"] + " to " + cells["high"]).where(rows["low"].notna(), NONE),
        "share": rows["share"].map(percent),
    }
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
        )
    if ranks_of_environment().rank:
        return
    if not quiet:
        _show(rows, read_record(options.run / RECORD).get("rounds"))
    print(f"Retrained: {display_path(path)}")
