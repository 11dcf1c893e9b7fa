"""flsv retrain: each client's value by training a run's federation without it.

    flsv retrain lightning_logs/version_0
    flsv retrain lightning_logs/version_0 --trainings all --rounds 10
    flsv retrain lightning_logs/version_0 --jobs 4

Repeats the run with three seeds, the first its own, and with ShadowShapley as
its only metric, which trains coalitions of the clients after each run: by
default each client alone and all but one. The first repetition must come to
the weights of the run's last checkpoint, and data that differ from the run's
are refused. Finished trainings are kept: start a stopped command again to
continue.

The repetitions are in the folder "retrained" of the run. flsv report of the run
shows their means, and shares by other scores.
"""

from __future__ import annotations

import importlib
import pickle
import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import joblib
import lightning as L
import torch
import yaml
from pandas import DataFrame

from flsv._lightning.patches import callbacks_of, find_loop
from flsv._lightning.rounding import rounding_of
from flsv.cli.command import command_parser, display_path, from_1, printer
from flsv.cli.parser import make_cli
from flsv.cli.saved_run import config_with_seeds, runs_with_seeds
from flsv.configuration.identity import Identity
from flsv.federation import FederatedLoop
from flsv.report.basis import RETRAINED_METRIC, basis_by_retraining
from flsv.report.reading import SUMMARY_FILE, Run, open_run, seed_summary
from flsv.results.folder import RECORD, RETRAINED, find_config_of, run_folder
from flsv.results.terminal import filled, print_table
from flsv.results.text import percent, shares_in, with_intervals
from flsv.scores.performance import CLASSIFICATION, Judges
from flsv.utilities.atomic_files import FolderLock
from flsv.utilities.choices import Trainings
from flsv.utilities.csv_files import save_table
from flsv.utilities.declared import Count, checked
from flsv.utilities.display import BRACKETS_NOTE
from flsv.utilities.errors import ConfigurationError

#: Default number of seeds.
NUM_SEEDS = 3


@checked
def retrain(
    run: Path,
    coalitions: Trainings = "both",
    *,
    metric: str | None = None,
    mode: str | None = None,
    judges: Judges | None = None,
    seeds: Count = NUM_SEEDS,
    halvings: int | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> tuple[DataFrame, Path]:
    """Repeat a run with seeds and :class:`ShadowShapley`. Return a table of the clients' mean values, and its file."""
    config = yaml.safe_load(find_config_of(run).read_text())
    seed = int(config.get("seed_everything") or 0)
    out = run / RETRAINED
    with config_with_seeds(config, seed) as arguments:
        options = [*overrides, f"--trainer.default_root_dir={out}", "--trainer.logger=false"]
        cli = make_cli([*arguments, *options, f"--seed_everything={seed}"], run=False, quiet=True)
        identity = cli.identity()
        _check_data(run, identity, cli.datamodule.client_names)
        config = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    if coalitions == "auto":
        coalitions = "both"
    # Values are computed after the last round.
    game = {"coalitions": coalitions, "every": cli.trainer.max_epochs, "halvings": halvings}
    measure, mode_of_run = (metric, mode) if metric else performance_by(cli.loop)
    game["judges"] = judges or _judges_of(cli.loop)
    game["mode"] = mode_of_run
    _set_metrics(config, cli.loop, game, measure)
    if not overrides:
        _add_comparison(config, run, seed, say)
    settings = Identity({**identity.settings, "game": f"{game} {measure}"}, identity.samples)
    repetitions = runs_with_seeds(config, settings, range(seed, seed + seeds), out, say=say)
    summary = seed_summary(repetitions)
    save_table(out / SUMMARY_FILE, summary)
    return summary, out / SUMMARY_FILE


def _set_metrics(
    config: dict[str, Any], loop: FederatedLoop, game: Mapping[str, Any], measure: str
) -> None:
    """Let a run have only the metrics that its strategies read, and those of the game."""
    federation = config["federation"]
    metrics_in_use = {strategy.metric for strategy in loop.strategies.values()}
    metrics = {}
    for name, metric in (federation["metrics"] or {}).items():
        if name in metrics_in_use:
            metrics[name] = metric
    measures = {RETRAINED_METRIC: measure}
    if measure in CLASSIFICATION and game["judges"] == "server":
        measures |= {f"by_{name}": name for name in CLASSIFICATION if name != measure}
    for name, performance in measures.items():
        arguments = {**game, "performance": performance}
        metrics[name] = {"class_path": "flsv.metrics.ShadowShapley", "init_args": arguments}
    federation["metrics"] = metrics
    federation["evaluation"] = {"every": 0}
    federation["reporting"] = {"figures": 0, "table": False}


#: Error if all clients, trained again, come to other weights than the run.
MESSAGE_IF_DIFFERENT = (
    "there are no values: the run, trained again from its configuration, came to another model than its last "
    "checkpoint ({:.2g} of the norm of its weights lie between them). Code, data or packages have changed since, or "
    "its training does not follow from configuration and seed. Train the run again (flsv fit --config "
    "RUN/config.yaml), and retrain that."
)


class SameModel(L.Callback):
    """Callback that ends the fit of a seed with an error unless it comes to the weights of a checkpoint.

    Args:
        checkpoint: path of the checkpoint.
        seed: the seed of the checkpoint's run. Fits with other seeds are not compared.
    """

    only_watches = True  # it takes part in no coalition

    def __init__(self, checkpoint: str, seed: int) -> None:
        self.checkpoint = checkpoint
        self.seed = seed

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop: Any = find_loop(callbacks_of(trainer))
        if loop.state.seed != self.seed:
            return
        checkpoint: Any = torch.load(
            self.checkpoint, map_location=pl_module.device, weights_only=True
        )
        expected = _weights(checkpoint["state_dict"])
        distance = (_weights(trainer.strategy.lightning_module_state_dict()) - expected).norm()
        if distance > rounding_of(trainer).run_tolerance * expected.norm():
            shutil.rmtree(run_folder(trainer))
            raise ConfigurationError(MESSAGE_IF_DIFFERENT.format(distance / expected.norm()))


def _weights(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in state.values()])


def _add_comparison(
    config: dict[str, Any], run: Path, seed: int, say: Callable[[str], None]
) -> None:
    """Let a fit compare itself with the run's last checkpoint, unless that is of other rounds."""
    checkpoints = sorted(
        (run / "checkpoints").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime
    )
    reason = f"{run / 'checkpoints'} has no last.ckpt"
    if checkpoints:
        try:
            checkpoint: Any = torch.load(checkpoints[-1], map_location="cpu", weights_only=True)
            rounds = checkpoint["epoch"] + 1
            reason = f"last.ckpt was saved after {rounds} rounds"
            if rounds == open_run(run).record.get("rounds_done"):
                comparison = {
                    "class_path": "flsv.cli.retrain.SameModel",
                    "init_args": {"checkpoint": str(checkpoints[-1].absolute()), "seed": seed},
                }
                callbacks = config["trainer"]["callbacks"] or []
                config["trainer"]["callbacks"] = [*callbacks, comparison]
                return
        except pickle.UnpicklingError:
            reason = "last.ckpt holds objects that may run code of their own when they are loaded"
    say(f"the trainings are not compared with the run's own weights: {reason}")


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


def _check_data(run: Path, identity: Identity, names: Sequence[str]) -> None:
    """Raise ConfigurationError unless the clients and their samples are the run's."""
    record = open_run(run).record
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
    verdict = basis.verdict()
    if not verdict.forbids_payment:
        columns["share"] = [percent(share) for share in shares_in(basis.values)]
    print_table(f"{basis.by}, by retraining ({basis.origin})", run.client_names, columns)
    print(BRACKETS_NOTE)
    if verdict.reasons:
        print(filled(verdict.text))


@contextmanager
def _workers(jobs: int, backend: str | None) -> Iterator[None]:
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
    parser.add_argument("--halvings", type=from_1, help=halvings)
    performances = "accuracy, balanced_accuracy, negative_loss, auroc, average_precision, f1"
    parser.add_argument(
        "--metric",
        help=f"score of a model: {performances}, or a value that the module logs. Default: as in the run's metrics",
    )
    parser.add_argument(
        "--mode", choices=("min", "max"), help="whether less or more of a logged value is better"
    )
    parser.add_argument(
        "--judges",
        choices=get_args(Judges),
        help="whose samples models are scored on: the server's, or those that all clients hold out. "
        "Default: as in the run",
    )
    parser.add_argument("--seeds", type=from_1, default=NUM_SEEDS, help="repetitions. Default: 3")
    jobs = "coalitions trained at once, each in a process of its own. Default: 1"
    parser.add_argument("--jobs", type=from_1, default=1, help=jobs)
    backend = "joblib backend whose workers train, such as dask"
    parser.add_argument("--backend", metavar="NAME", help=backend)
    return parser


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv retrain`` with the command-line arguments ``args``."""
    options, fit_arguments = _parser().parse_known_args(list(args))
    backend = vars(options).pop("backend")
    jobs = vars(options).pop("jobs")
    if backend and jobs > 1:
        raise ConfigurationError(
            f"--jobs and --backend {backend}: its workers are as many as it has."
        )
    lock = FolderLock(options.run) if options.run.is_dir() else nullcontext()
    with _workers(jobs, backend), lock:
        _summary, path = retrain(**vars(options), overrides=fit_arguments, say=printer(quiet))
    if not quiet:
        _show(open_run(options.run))
    print(f"Retrained: {display_path(path)}")
