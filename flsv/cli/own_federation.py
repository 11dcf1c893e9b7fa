"""A run as one of the benchmark's federations: its own data, module, loop and trainer, so that clients can be let cheat
in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor
from torchmetrics import Metric

from flsv.benchmark.federation import Federation
from flsv.benchmark.registry import Entry
from flsv.cli.command import NO_BARS
from flsv.cli.parser import FederatedCLI, loop_of, make_cli
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.report.folder import RECORD
from flsv.report.record import read_record
from flsv.seeding import isolated_rngs
from flsv.server.identity import Identity

#: Sections of a saved configuration that say what a federation is.
SECTIONS = ("seed_everything", "trainer", "model", "data", "federation")
#: Every training says, saves, validates and draws nothing.
QUIET = (
    *NO_BARS,
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.limit_val_batches=0",
    "--federation.reporting.figures=0",
    "--federation.reporting.table=false",
    "--federation.evaluation.every=0",
)
#: Callbacks that watch a run for its own sake, or end it.
OF_THE_RUN = (Checkpoint, EarlyStopping, LearningRateMonitor)


@dataclass(frozen=True)
class RunFederation(Federation):
    """A run's federation.

    Args:
        make: reads the run's configuration anew, and seeds everything with a seed, as ``flsv fit`` does.
        loop: further arguments of :class:`flsv.FederatedLoop`, as the run had them.
        seed: the run's.
    """

    make: Callable[[int], FederatedCLI] = field(default=lambda seed: make_cli())
    loop: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @cached_property
    def identity(self) -> Identity:
        with isolated_rngs(0, "identity"):
            return self.make(0).identity()

    def trainer(self, *callbacks: L.Callback) -> L.Trainer:
        """The run's own, with these callbacks in the place of its loop; it writes nothing."""
        seed = next(each.seed for each in callbacks if isinstance(each, FederatedLoop))
        made = self.make(int(seed or 0))
        trainer, gone = made.trainer, loop_of(made.trainer)
        self.__dict__["made"] = made.model
        others = [each for each in trainer.callbacks if each is not gone and not isinstance(each, OF_THE_RUN)]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, *callbacks]  # type: ignore[attr-defined]
        return trainer

    def module(self) -> L.LightningModule:
        """The one made with the last trainer, in the run's order: it has the weights that the run began with."""
        made: L.LightningModule | None = self.__dict__.pop("made", None)
        return super().module() if made is None else made


@dataclass(frozen=True)
class RunMetric(Entry):
    """A metric of the run, as the run had it.

    Args:
        metric: before any round.
    """

    metric: Metric = field(default_factory=Metric, repr=False)

    def build(self, federation: Federation) -> Metric:
        return copy.deepcopy(self.metric)


def configuration_of(run: Path) -> dict[str, Any]:
    """The sections of a run's saved configuration that say what its federation is.

    Raises:
        ConfigurationError: the folder holds none.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigurationError(f"{run} holds no config.yaml: name the folder of a run of flsv fit.")
    return {name: value for name, value in yaml.safe_load(file.read_text()).items() if name in SECTIONS}


def federation_of(run: Path, scratch: Path) -> tuple[RunFederation, dict[str, RunMetric]]:
    """The federation of a run, and those of its metrics by which clients could be paid, by name.

    Args:
        run: its folder.
        scratch: a folder for its configuration, which must stay as long as the federation is used.

    Raises:
        ConfigurationError: the folder holds no configuration, or the data are not those of the run.
    """
    config = configuration_of(run)
    file = scratch / "federation.yaml"
    file.write_text(yaml.safe_dump(config))

    def make(seed: int) -> FederatedCLI:
        further = (*QUIET, f"--trainer.default_root_dir={scratch}", f"--seed_everything={seed}")
        return make_cli(["--config", str(file), *further], run=False, quiet=True)

    seed = int(config.get("seed_everything") or 0)
    cli = make(seed)
    loop = loop_of(cli.trainer)
    check_data(run, read_record(run / RECORD), cli.identity(), cli.datamodule.client_names)
    # Each metric of the run keeps its own; this one is what the last model is judged by, and what others are given.
    named = [each for each in performances_of(loop) if isinstance(each[0], str)]
    performance, mode = named[0] if named else performance_by(loop)
    apart = {"metrics", "local_epochs", "evaluation", "reporting", "seed"}
    if any(strategy.metric is not None for strategy in loop.strategies.values()):
        apart -= {"metrics"}  # which are read by these names
    federation = RunFederation(
        name=run.resolve().name,
        title=str(run),
        set="held_out",
        rounds=int(cli.trainer.max_epochs or 1),
        data=config["data"],
        model=config["model"],
        performance=performance,
        mode=mode,  # type: ignore[arg-type]
        local_epochs=loop.local_epochs,
        make=make,
        seed=seed,
        loop={each.name: getattr(loop.config, each.name) for each in fields(loop.config) if each.name not in apart},
    )
    told = config["federation"].get("metrics") or {}
    metrics = {
        name: RunMetric(name, said["class_path"], said.get("init_args") or {}, metric=loop.config.metrics[name])
        for name, said in told.items()
        if loop.config.metrics[name].higher_is_better is not False
    }
    return federation, metrics


def check_data(run: Path, record: Mapping[str, Any], identity: Identity, names: Sequence[str]) -> None:
    """Whether the clients and their samples are those of the run.

    Raises:
        ConfigurationError: by name, who took no part in the run, who is missing, and whose samples are others.
    """
    before = record.get("clients", [])
    strangers = [name for name in names if name not in before]
    gone = [name for name in before if name not in names]
    found = [f"no part in the run was taken by {', '.join(strangers)}"] if strangers else []
    found += [f"there are no data of {', '.join(gone)}"] if gone else []
    if not found:
        found = identity.differences(Identity(identity.settings, record.get("hashes", {})))
    if found:
        raise ConfigurationError(
            f"the data are not those of {run}, as its {RECORD} tells: {'; '.join(found)}. Give it the data that it was "
            "run on."
        )


def performances_of(loop: FederatedLoop) -> list[tuple[Any, Any]]:
    """Those by which a run's metrics valued, each once, with their modes, in the metrics' order. Of values per class,
    which are of the classes' accuracies, it is their mean; of an object that the command line cannot name, itself."""
    found: dict[str, Any] = {
        name: metric.performance for name, metric in loop.metrics.items() if hasattr(metric, "performance")
    }
    found |= loop.board.performances
    told = ["balanced_accuracy" if by == "per_class_accuracy" else by for by in found.values()]
    return list(
        dict.fromkeys(
            (by, None) if isinstance(by, str) else (by.called, None) if by.called else (by.of, by.mode) for by in told
        )
    )


def performance_by(loop: FederatedLoop) -> tuple[str, str | None]:
    """The one by which a run's metrics valued, and its mode; accuracy where none has any.

    Raises:
        ConfigurationError: they valued by several, or by an object that the command line cannot name.
    """
    named = performances_of(loop)
    if len(named) > 1 or not all(isinstance(of, str) for of, _ in named):
        raise ConfigurationError(
            f"the run's metrics value by {', '.join(str(of) for of, _ in named)}: say which one by --metric."
        )
    return next(iter(named), ("accuracy", None))
