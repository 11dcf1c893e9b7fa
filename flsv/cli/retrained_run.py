"""Functions of ``flsv retrain`` that rebuild a run's federation from its folder."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from flsv._lightning.evaluation import all_on_device
from flsv.cli.parser import FederatedCLI
from flsv.cli.saved_run import SILENT_ARGUMENTS, make_run, saved_run
from flsv.configuration.identity import Identity, config_settings
from flsv.federation import FederatedLoop
from flsv.games.coalition_utility import Measure
from flsv.metrics.coalitions.design import coalition_masks
from flsv.results.folder import RECORD
from flsv.results.record import read_record
from flsv.results.text import joined
from flsv.retraining.coalition_refusals import check_draws, sampler_of
from flsv.retraining.copied_fits import copy_of_run
from flsv.retraining.fit_order import FitOrder
from flsv.retraining.train_fits import Proof
from flsv.retraining.utility_store import LAST_ROUND_KEY, column_name
from flsv.sampling import FullParticipation
from flsv.scores.performance import (
    CLASSIFICATION,
    Judges,
    ModelScore,
    judged_by,
    performance_of,
    scores_positive,
    title_of,
    warn_of_rarity,
)
from flsv.utilities.choices import Participation, Trainings
from flsv.utilities.csv_files import NAN
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import refuse_other_versions
from flsv.utilities.run_copy import RunCopy
from flsv.utilities.seeding import global_rngs, restore_global_rngs

#: Error if all clients, trained again, come to other weights than the run.
MESSAGE_IF_DIFFERENT = (
    "there are no values: the coalition of all clients, trained again from the run's configuration, came to another "
    "model than the run's last checkpoint ({}). Code, data or packages have changed since, or its training does not "
    "follow from configuration and seed. Train the run again (flsv fit --config RUN/config.yaml), and retrain that."
)


@dataclass(frozen=True)
class Question:
    """Options of ``flsv retrain`` for training and scoring coalitions. None means as in the run."""

    metric: str | None
    mode: Any = None
    judges: Judges | None = None
    participation: Participation = "drawn"

    def __post_init__(self) -> None:
        if self.mode is not None and self.metric is None:
            raise ConfigurationError(f"mode={self.mode!r} needs a logged value: add --metric NAME.")
        if self.metric == "per_class_accuracy":
            raise ConfigurationError(
                "metric='per_class_accuracy' has a number per class: use balanced_accuracy."
            )

    def answered_by(self, loop: FederatedLoop) -> Question:
        """Return a copy in which options that are None are taken from the metrics of ``loop``."""
        metric, mode = (self.metric, self.mode) if self.metric is not None else performance_by(loop)
        return replace(self, metric=metric, mode=mode, judges=self.judges or _judges_of(loop))

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the scores that are computed for each trained model."""
        has_all_scores = self.judges != "clients" and self.metric in CLASSIFICATION
        if has_all_scores:
            return CLASSIFICATION
        return (str(self.metric),)

    @property
    def measure(self) -> Measure:
        """Return the performance measure that scores models, or the names of several, see :attr:`names`."""
        if self.names == CLASSIFICATION:
            return CLASSIFICATION
        measure: Any = performance_of("flsv retrain", str(self.metric), self.mode, "metric")
        return judged_by("clients", measure) if self.judges == "clients" else measure

    @property
    def file(self) -> str:
        """Return the name of the CSV file with the coalitions' utilities."""
        metric = "scores" if self.names == CLASSIFICATION else str(self.metric).replace("/", "-")
        return f"retrained_{'clients_' * (self.judges == 'clients')}{metric}.csv"


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run's federation."""

    arguments: Sequence[str]
    seed: int
    clients: list[str]
    num_samples: list[int]
    rounds: int | None
    question: Question
    # The performance measure's name in files
    by: str
    # The performance measure's name in tables and texts
    title: str
    # The fraction of the validation set's most frequent class if the measure is accuracy, else NaN
    majority: float
    # All settings on which utilities depend, except the seed
    settings: dict[str, Any]
    # Texts about the settings that differ from the run's, except the number of rounds
    changed_settings: list[str]
    # Whether all members of a coalition train in every round although the run drew cohorts
    is_another_game: bool
    notes: list[str]
    warning_texts: list[str]
    # Whether results of other versions of packages are refused
    is_strict: bool
    # The run's last checkpoint, which the coalition of all clients must reproduce, None if they cannot be compared
    checkpoint: Path | None

    @property
    def folder(self) -> Path:
        """Return the temporary folder of the trainings."""
        return Path(self.arguments[1]).parent

    @property
    def order(self) -> FitOrder:
        """Return the order to train all clients with the run's seed."""
        last_round = LAST_ROUND_KEY if self.rounds is None else self.rounds - 1
        return FitOrder(
            members=tuple(range(len(self.clients))),
            seed=self.seed,
            rounds=(last_round,),  # those after which models are scored
        )

    @property
    def proof(self) -> Proof | None:
        """Return the check that all clients come to the weights of the run's checkpoint."""
        if self.checkpoint is None:
            return None
        order = replace(
            self.order, scores_untrained=True, returns_models=True, checkpoint=self.checkpoint
        )
        return Proof(order, MESSAGE_IF_DIFFERENT)


def summarize(
    run: Path, arguments: Sequence[str], seed: int, question: Question, coalitions: Trainings
) -> RunSummary:
    """Build a run's federation, check it, and return its summary."""
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        cli = make_run(arguments, seed)
        data = cli.datamodule
        sampler = cli.loop.config.sampler
        question = question.answered_by(cli.loop)
        measure: Any = question.measure
        record = read_record(run / RECORD)
        identity = cli.identity()
        _check_data(run, record, identity, data.client_names)
        check_draws(
            sampler_of(cli.loop, question.participation),
            coalition_masks(coalitions, data.num_clients),
        )
        caught_warnings.clear()
        if isinstance(measure, ModelScore):
            warn_of_rarity([measure], data)
    warning_texts = [str(warning.message) for warning in caught_warnings]

    if isinstance(measure, ModelScore):
        measure_name = column_name(measure)
    else:
        measure_name = str(question.metric)
    title = measure_name
    if scores_positive(measure):
        title = title_of(measure, data.positive_class)
    majority = NAN
    if measure_name == "accuracy":
        majority = _majority(cli)

    rounds = _rounds(record, arguments, cli)
    draws_cohorts = not isinstance(sampler, FullParticipation)
    is_another_game = draws_cohorts and question.participation == "all"
    settings = {**identity.flat(), "metric": joined(question.names), "mode": question.mode}
    if draws_cohorts:
        settings["participation"] = question.participation
    if rounds != cli.trainer.max_epochs:
        settings["rounds"] = rounds

    _option, config_file, *_seeds = arguments  # --config FILE, then the options of seeds
    changed_settings = _changed_settings(identity, Path(config_file))
    planned_rounds = cli.trainer.max_epochs
    checkpoint, why_not = None, None
    if planned_rounds != record.get("rounds"):
        why_not = f"{planned_rounds} rounds are planned instead of {record.get('rounds')}"
    elif not is_another_game:
        checkpoint, why_not = _checkpoint_or_reason(run, seed, rounds, changed_settings)
    notes = []
    if why_not is not None:
        notes.append(f"the trainings are not compared with the run's own weights: {why_not}")

    return RunSummary(
        arguments=arguments,
        seed=seed,
        clients=list(data.client_names),
        num_samples=data.num_samples.tolist(),
        rounds=rounds,
        question=question,
        by=measure_name,
        title=title,
        majority=majority,
        settings=settings,
        changed_settings=changed_settings,
        is_another_game=is_another_game,
        notes=notes,
        warning_texts=warning_texts,
        is_strict=cli.config.strict,
        checkpoint=checkpoint,
    )


def _rounds(record: Mapping[str, Any], arguments: Sequence[str], cli: FederatedCLI) -> int | None:
    """Return the number of rounds: as asked for, or as the run had."""
    is_asked_for = any(argument.startswith("--trainer.max_epochs") for argument in arguments)
    if is_asked_for:
        return cli.trainer.max_epochs
    return record.get("rounds_done") or cli.trainer.max_epochs


def _check_data(
    run: Path, record: Mapping[str, Any], identity: Identity, names: Sequence[str]
) -> None:
    """Raise ConfigurationError unless the clients and their samples are the run's."""
    names_in_run = record["clients"]
    if list(names) != names_in_run:
        differences = [
            f"its clients are {', '.join(names_in_run)}, and these are {', '.join(names)}"
        ]
    else:
        identity_of_run = Identity(identity.settings, record["hashes"])
        differences = identity.differences(identity_of_run)
    if differences:
        raise ConfigurationError(
            f"the data are not those of {run}, as its {RECORD} tells: {'; '.join(differences)}. Give it the data that "
            "it was run on."
        )


def _changed_settings(identity: Identity, config_file: Path) -> list[str]:
    """Describe each setting that differs from the run's, except the number of rounds."""
    ignored_settings = ["trainer.max_epochs"]
    for argument in SILENT_ARGUMENTS:
        name, _, _value = argument.partition("=")
        ignored_settings.append(name.lstrip("-"))

    run_settings = config_settings(yaml.safe_load(config_file.read_text()))
    for name in ignored_settings:
        run_settings[name] = identity.settings.get(name, "None")  # the same on both sides
    return identity.other_settings(Identity(run_settings, {}), "{} instead of {}")


def performance_by(loop: FederatedLoop) -> tuple[str, str | None]:
    """Return the arguments ``(performance, mode)`` of a run's metrics, by default accuracy."""
    # By metric name. The loop has read those of contribution metrics.
    performances: dict[str, Any] = {}
    for metric_name, metric in loop.metrics.items():
        if hasattr(metric, "performance"):
            performances[metric_name] = metric.performance
    performances |= loop.contribution_metrics.performances

    choices: list[tuple[Any, str | None]] = []  # names and modes, without repetitions
    for performance in performances.values():
        choice = _performance_and_mode(performance)
        if choice not in choices:
            choices.append(choice)
    if not choices:
        return "accuracy", None
    name, mode = choices[0]
    if len(choices) > 1 or not isinstance(name, str):
        names = ", ".join(str(name) for name, _mode in choices)
        raise ConfigurationError(f"the run's metrics value by {names}: choose one with --metric.")
    return name, mode


def _performance_and_mode(performance: Any) -> tuple[Any, str | None]:
    if isinstance(performance, str):
        name = performance
    else:
        name = performance.called  # the name that the user gave, may be empty
    if name == "per_class_accuracy":
        return "balanced_accuracy", None
    if name:
        return name, None
    return performance.of, performance.mode  # the logged value that is the score


def _judges_of(loop: FederatedLoop) -> Judges:
    """Return ``"clients"`` if the clients scored the models for all metrics of a run, else ``"server"``."""
    judges_of_metrics = set()
    for name in loop.contribution_metrics.performances:
        judges_of_metrics.add(getattr(loop.metrics[name], "judges", "server"))
    if judges_of_metrics == {"clients"}:
        return "clients"
    return "server"


def _checkpoint_or_reason(
    run: Path, seed: int, rounds: int | None, changed_settings: Sequence[str]
) -> tuple[Path | None, str | None]:
    """Return the run's last checkpoint, or None and the reason."""
    if changed_settings:
        return None, "; ".join(changed_settings)
    folder = run / "checkpoints"
    oldest_first = sorted(folder.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not oldest_first:
        return None, f"{folder} has no last.ckpt"

    path = oldest_first[-1]
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        reason = f"{path.name} holds objects that may run code of their own when they are loaded"
        return None, reason
    saved_rounds = checkpoint["epoch"] + 1
    loop_state = checkpoint["callbacks"].get("FederatedLoop", {})
    saved_seed = loop_state.get("seed")
    if saved_rounds != rounds:
        return None, f"{path.name} was saved after {saved_rounds} rounds, and they have {rounds}"
    if saved_seed != seed:
        return None, f"{path.name} is of seed {saved_seed}, and they have seed {seed}"
    return path, None


def _majority(cli: FederatedCLI) -> float:
    """Return the fraction of the validation set's most frequent class."""
    # The module's hooks may turn the loaders' batches into pairs (x, y).
    cli.trainer.strategy.connect(cli.model)
    batches = all_on_device(cli.trainer, cli.datamodule.val_dataloader())
    labels = torch.cat([y for _, y in batches])
    return float(labels.bincount().max()) / len(labels)


def copy_of_saved_run(summary: RunSummary, seed: int) -> RunCopy:
    """Rebuild a run's federation by a seed, and return its copy before the fit."""
    states = global_rngs()
    try:
        cli = make_run(summary.arguments, seed)
        return copy_of_run(cli.trainer, cli.model, cli.datamodule)
    finally:
        restore_global_rngs(states)


@contextmanager
def summarized_run(
    run: Path, overrides: Sequence[str], question: Question, coalitions: Trainings
) -> Iterator[RunSummary]:
    """Make the summary of a saved run, and yield it. See :func:`summarize` for the arguments."""
    with saved_run(run, overrides) as (arguments, seed):
        try:
            summary = summarize(run, arguments, seed, question, coalitions)
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:  # whatever the run's own code raises
            raise ConfigurationError(
                f"{run}: the federation of its configuration cannot be made: "
                f"{type(error).__name__}: {error}"
            ) from error
        if summary.is_strict:
            refuse_other_versions()
        yield summary
