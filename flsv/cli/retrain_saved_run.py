"""flsv retrain: each client's value by training a run's federation without it.

    flsv retrain lightning_logs/version_0
    flsv retrain lightning_logs/version_0 --trainings all --rounds 10
    flsv retrain lightning_logs/version_0 --jobs 4

Repeats the run with three seeds, the first its own, and with ShadowShapley as
its only metric, which trains coalitions of the clients after each run: all of
them if they can be trained at once, which is exact for these trainings. If not,
it trains each client alone and all but one (2 n for n clients), and from their
outputs predicts those of all other coalitions (from their scores if there are
no outputs). The first repetition chooses, and the others train the same
coalitions. --trainings all trains all in any case. The first repetition must
come to the weights of the run's last checkpoint, and data that differ from the
run's are refused. Finished trainings are kept: start a stopped command again to
continue, or name other coalitions.

The repetitions are in the folder "retrained" of the run, and their means in its
repeat.csv. flsv report of the run shows them.
"""

from __future__ import annotations

import importlib
import json
import pickle
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import joblib
import torch
import yaml
from pandas import DataFrame

from flsv.cli.checkpoints import modified
from flsv.cli.command import (
    QUIET_FIT_ARGUMENTS,
    command_parser,
    display_path,
    printer,
)
from flsv.cli.parser import FederatedCLI, make_cli
from flsv.cli.runs_with_seeds import (
    config_with_seeds,
    listed_folders,
    runs_with_seeds,
    saved_summary,
)
from flsv.configuration.identity import Identity
from flsv.configuration.option_texts import config_settings
from flsv.federation import FederatedLoop
from flsv.results.basis import RETRAINED_METRIC, basis_by_retraining
from flsv.results.folder import OPTIONS, RECORD, RETRAINED, RUNS_SETTINGS, find_config_of
from flsv.results.reading import CHANGED, Run, open_run, other_options_of_repetition
from flsv.results.terminal import print_lines, print_table, share_column
from flsv.results.text import with_intervals
from flsv.retraining.coalition_fit import metrics_in_use, only_watches_clients
from flsv.retraining.coalition_store import EARLIER_FOLDER
from flsv.retraining.price import max_fits_of_retraining
from flsv.scores.class_scores import CLASS_SCORES
from flsv.scores.performance import CLASSIFICATION, Evaluators, Measure, measure_of
from flsv.utilities.atomic_files import FolderLock, replacing
from flsv.utilities.choices import Trainings
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.formats import VERSION_PREFIX
from flsv.values.coalition_files import copy_coalitions

#: Default number of seeds.
NUM_SEEDS = 3
#: Setting of the list of runs: the coalitions, and by which score their values are. Runs of others are replaced.
COALITIONS_ASKED_FOR = "coalitions"


@checked
def retrain(
    run: Path,
    coalitions: Trainings = "auto",
    *,
    metric: str | None = None,
    mode: str | None = None,
    evaluators: Evaluators | None = None,
    rounds: Count | None = None,
    seeds: Count = NUM_SEEDS,
    halvings: Count | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> tuple[DataFrame, Path]:
    """Repeat a run with seeds and :class:`ShadowShapley`. Return a table of the clients' mean values, and its file."""
    # None takes the run's own performance and evaluators, and its rounds.
    _check_metric(metric, mode)
    options = list(overrides)
    if rounds is not None:
        options.append(f"--trainer.max_epochs={rounds}")
    config_of_run = yaml.safe_load(find_config_of(run).read_text())
    record = open_run(run).record
    seed: int = record["settings"]["federation_seed"]
    cli, run_identity, changes = _saved_federation(run, config_of_run, record, options)
    config = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    num_rounds = _num_rounds(cli, record, options)
    performance = metric
    if performance is None:
        performance, mode = performance_by(cli.loop)
    max_fits = None
    if coalitions == "auto":
        max_fits = max_fits_of_retraining(cli.loop.config.sampler, len(record["clients"]))
    game = {  # arguments of ShadowShapley
        "coalitions": coalitions,
        "max_fits": max_fits,
        "evaluators": evaluators or _evaluators_of(cli.loop),
        "every": num_rounds,  # only the last rounds are valued
        "halvings": halvings,
        "mode": mode,
    }
    performances = _performances(performance, game)
    _set_metrics(config, cli.loop, game, performances)
    add_same_run(config, run, seed, rounds=num_rounds, changes=changes, say=say)

    out = run / RETRAINED
    settings = {
        **run_identity.settings,
        CHANGED: "; ".join(changes),
        "rounds": f"{num_rounds}",
        **_settings_of_game(game, performances),
    }
    identity = Identity(settings, run_identity.samples)
    _remove_other_runs(out, identity, config, seed)
    is_same_training = not changes and num_rounds == record.get("rounds_done")
    if is_same_training:
        _copy_trainings(run, out / f"seed_{seed}")
    seeds_of_runs = range(seed, seed + seeds)
    repetitions = runs_with_seeds(config, identity, seeds_of_runs, out, say=say)
    for repetition in repetitions:
        for name in ("checkpoints", EARLIER_FOLDER):  # which a stopped command needs
            shutil.rmtree(repetition.folder / name, ignore_errors=True)
    return saved_summary(out)


def _saved_federation(
    run: Path, config: Mapping[str, Any], record: Mapping[str, Any], options: Sequence[str]
) -> tuple[FederatedCLI, Identity, list[str]]:
    """Return a command line with the run's configuration and options, its identity, and the settings that differ."""
    seed = int(config.get("seed_everything") or record["settings"]["federation_seed"])
    own_options = [f"--seed_everything={seed}", f"--trainer.default_root_dir={run}"]
    with config_with_seeds(config, seed) as arguments:
        cli = _cli_without_outputs([*arguments, *options, *own_options])
        identity = cli.identity()
        changes = _changed_settings(identity, arguments)
    _check_data(run, record, cli.datamodule.client_names, identity)
    return cli, identity, changes


def _copy_trainings(run: Path, repetition_folder: Path) -> None:
    """Let the repetition with the run's own seed find the coalitions that the run has trained, unless it has begun."""
    if not repetition_folder.exists():
        copy_coalitions(run, repetition_folder / EARLIER_FOLDER)


def _check_metric(metric: str | None, mode: str | None) -> None:
    if mode is not None and metric is None:
        raise ConfigurationError(f"mode={mode!r} needs a logged value: add --metric NAME.")
    if metric == "per_class_accuracy":
        raise ConfigurationError(
            "metric='per_class_accuracy' has a number per class: use balanced_accuracy."
        )


def _cli_without_outputs(arguments: Sequence[str]) -> FederatedCLI:
    """Return a command line that has read its arguments, and fits nothing."""
    silent_arguments = ["--trainer.logger=false", *QUIET_FIT_ARGUMENTS]
    return make_cli([*arguments, *silent_arguments], run=False, quiet=True)


def _settings_of_game(
    game: Mapping[str, Any],
    performances: Mapping[str, str],
) -> dict[str, str]:
    """Return the settings of the list of runs that tell which coalitions are trained, and how they are scored."""
    scores = f"{sorted(performances.values())} {game['mode']} {game['evaluators']}"
    coalitions = f"{game['coalitions']} {game['halvings']} {performances[RETRAINED_METRIC]}"
    return {"scores": scores, COALITIONS_ASKED_FOR: coalitions}


def _changed_settings(
    identity: Identity,
    arguments: Sequence[str],
) -> list[str]:
    """Describe each setting that differs from those of ``--config FILE``, except the number of rounds."""
    _option, file = arguments
    run_settings = config_settings(yaml.safe_load(Path(file).read_text(encoding="utf-8")))
    rounds = "trainer.max_epochs"
    run_settings[rounds] = identity.settings.get(rounds, "None")
    return identity.other_settings(Identity(run_settings, {}), "{} instead of {}")


def _num_rounds(
    cli: FederatedCLI,
    record: Mapping[str, Any],
    options: Sequence[str],
) -> int:
    planned_rounds = cli.trainer.max_epochs or 0
    is_asked_for = any(option.startswith("--trainer.max_epochs") for option in options)
    num_rounds = planned_rounds
    if not is_asked_for:
        num_rounds = record.get("rounds_done", planned_rounds)
    if num_rounds < 1:
        raise ConfigurationError("the run has no number of rounds: add --rounds.")
    return num_rounds


def _performances(performance: str, game: Mapping[str, Any]) -> dict[str, str]:
    """Return the performances ``{metric: performance}`` by which coalitions are scored, that of the values first."""
    performances = {RETRAINED_METRIC: performance}
    is_of_classes = performance in (*CLASSIFICATION, *CLASS_SCORES)
    if not is_of_classes or game["evaluators"] == "clients":
        return performances
    for name in CLASSIFICATION:
        if name != performance:
            performances[f"by_{name}"] = name
    return performances


def _set_metrics(
    config: dict[str, Any],
    loop: FederatedLoop,
    game: Mapping[str, Any],
    performances: Mapping[str, str],
) -> None:
    """Let a run have only the metrics that its strategies read, and those of the game. A client algorithm that only
    watches has no metric then, and is left out.
    """
    federation = config["federation"]
    if only_watches_clients(loop):
        federation["client_algorithm"] = None
    metrics = {}
    for name in metrics_in_use(loop):
        metrics[name] = federation["metrics"][name]
    for name, measure in performances.items():
        arguments = {**game, "performance": measure}
        metrics[name] = {"class_path": "flsv.metrics.ShadowShapley", "init_args": arguments}
    federation["metrics"] = metrics
    federation["evaluation"] = {**federation["evaluation"], "every": 0}
    federation["reporting"] = {"figures": 0, "table": False}
    # Without a logger, Lightning refuses callbacks such as LearningRateMonitor.
    config["trainer"]["logger"] = {"class_path": "flsv.isolation.silent_logger.SilentLogger"}


def add_same_run(
    config: dict[str, Any],
    run: Path,
    seed: int,
    rounds: int,
    changes: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Let a fit have the run's rounds, and compare itself with its last checkpoint, if there is one of as many."""
    arguments: dict[str, Any] = {"rounds": rounds, "seed": seed}
    why_not = "; ".join(changes)
    if not why_not:
        arguments["checkpoint"], why_not = checkpoint_or_reason(run, rounds)
    if why_not:
        say(f"the trainings are not compared with the run's own weights: {why_not}")
    trainer = config["trainer"]
    trainer["max_time"] = None
    repetition = {"class_path": "flsv.cli.same_run.SameRun", "init_args": arguments}
    callbacks = trainer["callbacks"] or []
    if isinstance(callbacks, Mapping):  # one without a list
        callbacks = [callbacks]
    trainer["callbacks"] = [*callbacks, repetition]


def checkpoint_or_reason(run: Path, rounds: int) -> tuple[str | None, str]:
    """Return the run's last checkpoint, or None and the reason."""
    folder = run / "checkpoints"
    path = max(folder.glob("last*.ckpt"), key=modified, default=None)
    if path is None:
        return None, f"{folder} has no last.ckpt"
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        reason = f"{path.name} holds objects that may run code of their own when they are loaded"
        return None, reason
    saved_rounds = checkpoint["epoch"] + 1
    if saved_rounds != rounds:
        return None, f"{path.name} was saved after {saved_rounds} rounds, and they have {rounds}"
    return str(path.absolute()), ""


def _remove_other_runs(out: Path, identity: Identity, config: Mapping[str, Any], seed: int) -> None:
    """Remove finished runs that differ only in coalitions and scores, or whose configuration an earlier version has
    written with other options. Their trainings stay.
    """
    settings_file = out / RUNS_SETTINGS
    if not settings_file.is_file():
        return
    stored_settings = json.loads(settings_file.read_text())
    differences = stored_settings.items() ^ identity.flat().items()
    names = {name for name, _text in differences}
    names_of_different = {name for name in names if not name.startswith(VERSION_PREFIX)}
    if names_of_different - {COALITIONS_ASKED_FOR}:
        return  # other differences are refused
    if not names_of_different and not _have_other_options(out, config, seed):
        return
    for folder in out.glob("seed_*"):
        copy_coalitions(folder, folder / EARLIER_FOLDER)
        for path in folder.iterdir():
            if path.name == EARLIER_FOLDER:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    settings_file.unlink()


def _have_other_options(out: Path, config: Mapping[str, Any], seed: int) -> bool:
    """Return whether the configuration of a finished run below ``out`` differs from ``config``, with its unset seeds
    set to ``seed``.
    """
    with config_with_seeds(config, seed) as (_option, file):
        planned_config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    for folder in listed_folders(out).values():
        config_of_run = yaml.safe_load(find_config_of(out / folder).read_text(encoding="utf-8"))
        if other_options_of_repetition(planned_config, config_of_run):
            return True
    return False


def performance_by(loop: FederatedLoop) -> tuple[str, str | None]:
    """Return the arguments ``(performance, mode)`` of a run's metrics, by default accuracy. Those of trained coalitions
    precede others.
    """
    # By metric name. The loop has read those of contribution metrics.
    performances = {}
    for metric_name, metric in loop.metrics.items():
        measure = measure_of(metric)
        if measure is not None:
            performances[metric_name] = measure
    performances |= loop.contribution_metrics.performances
    trained_names = loop.contribution_metrics.trained_names
    if trained_names:
        performances = {name: performances[name] for name in trained_names}

    repeated = map(_performance_and_mode, performances.values())
    names_and_modes = list(dict.fromkeys(repeated))
    if not names_and_modes:
        return "accuracy", None
    name, mode = names_and_modes[0]
    if len(names_and_modes) > 1 or not isinstance(name, str):
        names = ", ".join(str(name) for name, _mode in names_and_modes)
        raise ConfigurationError(f"the run's metrics value by {names}: choose one with --metric.")
    return name, mode


def _performance_and_mode(measure: Measure) -> tuple[Any, str | None]:
    if measure.called == "per_class_accuracy":
        return "balanced_accuracy", None
    if measure.called:
        return measure.called, None
    return measure.of, measure.mode  # the logged value that is the score


def _evaluators_of(loop: FederatedLoop) -> Evaluators:
    """Return ``"clients"`` if the clients scored the models for all metrics of a run, else ``"server"``."""
    names = loop.contribution_metrics.performances
    evaluators_of_metrics = {getattr(loop.metrics[name], "evaluators", "server") for name in names}
    return "clients" if evaluators_of_metrics == {"clients"} else "server"


def _check_data(
    run: Path,
    record: Mapping[str, Any],
    names: Sequence[str],
    identity: Identity,
) -> None:
    """Raise ConfigurationError unless the clients and their samples are the run's."""
    names_in_run = record["clients"]
    if list(names) != names_in_run:
        differences = [
            f"its clients are {', '.join(names_in_run)}, and these are {', '.join(names)}"
        ]
    else:
        differences = identity.differences(Identity(identity.settings, record["hashes"]))
    if differences:
        raise ConfigurationError(
            f"the data are not those of {run}, as its {RECORD} tells: {'; '.join(differences)}. Give it the data that "
            "it was run on."
        )


def _show(run: Run) -> None:
    basis = basis_by_retraining(run)
    columns = {"value": with_intervals(basis.estimates)}
    columns |= share_column(basis)
    print_table(f"{basis.by}, by retraining ({basis.origin})", run.client_names, columns)
    print_lines(basis.lines)


@checked
@contextmanager
def _workers(jobs: Count, backend: str | None) -> Iterator[None]:
    """Train coalitions in several processes, or on the workers of a joblib backend, within this context."""
    # Dask's scheduler is the one of its own configuration, such as DASK_SCHEDULER_ADDRESS, else one of this machine.
    connection: Any = nullcontext()
    try:
        if backend == "dask":
            connection = importlib.import_module("distributed").Client()
        workers: Any = nullcontext()
        if backend:
            workers = joblib.parallel_config(backend)
        elif jobs > 1:
            workers = joblib.parallel_config(n_jobs=jobs)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigurationError(f"--backend {backend}: {error}") from error
    with connection, workers:
        yield


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv retrain`` with the command-line arguments ``args``."""
    further = "Further arguments are those of flsv fit and override the run's configuration."
    parser = command_parser("flsv retrain", __doc__, further)
    options, fit_arguments = parser.parse_known_args(list(args))
    typed_options = shlex.join(word for word in args if Path(word) != options.run)
    arguments = vars(options)  # of retrain, once these two are removed
    backend = arguments.pop("backend")
    jobs = arguments.pop("jobs")
    if backend and jobs > 1:
        raise ConfigurationError(
            f"--jobs and --backend {backend}: its workers are as many as it has."
        )
    lock = FolderLock(options.run) if options.run.is_dir() else nullcontext()
    with _workers(jobs, backend), lock:
        _summary, path = retrain(**arguments, overrides=fit_arguments, say=printer(quiet))
    with replacing(path.with_name(OPTIONS)) as file:
        file.write(typed_options.encode())
    if not quiet:
        _show(open_run(options.run))
    print(f"Retrained: {display_path(path)}")
