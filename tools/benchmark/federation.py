"""Federations of the benchmark, each given by a YAML file in this package."""
# They are so small that all coalitions of clients, or a random part of them, can be trained.

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from flsv.attacks import Attack, Collusion
from flsv.configuration.identity import Identity, sample_hashes
from flsv.data import FederatedDataModule
from flsv.scores.performance import Mode, performance_of
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError, nearest
from flsv.utilities.formats import version_settings

#: Environment variable with the folder of the data.
ROOT_VARIABLE = "FLSV_DATA_ROOT"
FOLDER = Path(__file__).parent / "federations"
QUIET_TRAINER = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
SETS = ("tuning", "held_out", "fresh")
#: Share of their samples that clients hold out for validation if they evaluate models for a metric.
CLIENT_VAL_FRACTION = 0.2


#: Fields of a federation that influence no metric's values.
NOT_IN_IDENTITY = ("name", "title", "set", "needs")


@checked
@dataclass(frozen=True)
class Federation:
    """Federation of the benchmark, described by a YAML file.

    Args:
        name: name of the YAML file without its ending.
        title: description of the federation in words.
        set: ``"tuning"`` (used for design choices in flsv), ``"held_out"`` (not used for any choice) or ``"fresh"``
            (created later, with data on which metrics often fail, see ``docs/benchmark.md``). A file without ``set`` is
            held out.
        rounds: number of rounds.
        data: section ``data`` of a configuration of ``flsv fit``.
        model: section ``model`` of a configuration of ``flsv fit``.
        performance: score of a model on the server's validation set, see :mod:`flsv.scores.performance`.
        mode: whether lower (``"min"``) or higher (``"max"``) values of ``performance`` are better. None for the
            performance's own.
        attacks: class paths and arguments of attacks on the clients' uploads, see :mod:`flsv.attacks`.
        local_epochs: number of local epochs of a client per round.
        needs: paths, relative to ``$FLSV_DATA_ROOT``, of the files that the federation needs.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> digits = federation("digits_sizes")
        >>> digits.set, digits.available, digits.datamodule().num_samples.tolist()
        ('tuning', True, [48, 96, 143, 192, 240, 287])
    """

    name: str
    title: str
    set: Literal["tuning", "held_out", "fresh"]
    rounds: Count
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    performance: str = "accuracy"
    mode: Mode | None = None
    attacks: list[dict[str, Any]] = field(default_factory=list)
    local_epochs: Count = 1
    needs: Sequence[str] = ()

    def check(self) -> None:
        """Raise ConfigurationError if data, module, attacks or performance cannot be created."""
        num_clients = len(self.num_samples)
        # These are made, and thrown away, for the errors that they raise.
        for attack in self.attackers():
            attack.chosen(num_clients)
        self.module()
        performance_of(self.name, self.performance, self.mode)

    @property
    def available(self) -> bool:
        """Return whether all files that the federation needs exist."""
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """Return the files that the federation needs and that do not exist."""
        root = os.environ.get(ROOT_VARIABLE)
        if root is None:
            return list(self.needs)
        return [path for path in self.needs if not Path(root, path).exists()]

    @cached_property
    def classifies(self) -> bool:
        """Return whether the federation's samples have classes."""
        return self.datamodule().no_classes is None

    def datamodule(self) -> FederatedDataModule:
        """Return the partitioned data, the same object until :meth:`release`."""
        return self._datamodule

    def release(self) -> None:
        """Free the memory of the data until their next use."""
        for name in ("_datamodule", "with_client_validation"):
            self.__dict__.pop(name, None)

    @cached_property
    def num_samples(self) -> torch.Tensor:
        """Number of training samples of each client, int64 ``[n]``."""
        return self.datamodule().num_samples

    @cached_property
    def identity(self) -> Identity:
        """Settings, versions and hashes of data on which all metrics' values in this federation depend."""
        settings = version_settings()
        for option in fields(self):
            if option.name not in NOT_IN_IDENTITY:
                value = getattr(self, option.name)
                settings[option.name] = json.dumps(value, sort_keys=True)
        return Identity(settings, sample_hashes(self.datamodule()))

    @cached_property
    def _datamodule(self) -> FederatedDataModule:
        if self.missing:
            raise ConfigurationError(
                f"{self.name} needs {', '.join(self.missing)}, which is not below "
                f"{os.environ.get(ROOT_VARIABLE, '$FLSV_DATA_ROOT, which is not set')}. "
                "Set it to the folder that has it."
            )
        section = copy.deepcopy(dict(self.data))
        if self.needs:
            root = os.environ[ROOT_VARIABLE]
            section["files"] = {**section.get("files", {}), "root": root}
            source = section.get("source")
            if isinstance(source, dict):
                source["init_args"] = {**source.get("init_args", {}), "root": root}
        data = self._instantiate(FederatedDataModule, section)
        data.prepare_data()
        data.setup("fit")
        return data

    @cached_property
    def with_client_validation(self) -> Federation:
        """This federation, or a copy in which a fifth of each client's samples is its validation set."""
        # Corruptions do not change the validation sets.
        splits = self.data.get("splits", {})
        if splits.get("client_val"):
            return self
        splits_with_val = {**splits, "client_val": CLIENT_VAL_FRACTION}
        return replace(self, data={**self.data, "splits": splits_with_val})

    def module(self) -> L.LightningModule:
        """Return a new LightningModule, whose network is built when training starts."""
        return self._instantiate(L.LightningModule, dict(self.model))

    def attackers(self) -> list[Attack | Collusion]:
        """Return new objects of the federation's attacks."""
        return self._instantiate(list[Attack | Collusion], copy.deepcopy(list(self.attacks)))

    def trainer(self, *callbacks: L.Callback) -> L.Trainer:
        """Return a new trainer for all rounds on the CPU, which writes no files."""
        return L.Trainer(
            max_epochs=self.rounds,
            accelerator="cpu",
            devices=1,
            callbacks=list(callbacks),
            num_sanity_val_steps=0,
            limit_val_batches=0,
            **QUIET_TRAINER,  # all are bool options
        )

    def _instantiate(self, expected_type: Any, section: Any) -> Any:
        """Build the object of the type that a section of the file describes."""
        parser = ArgumentParser(exit_on_error=False)
        if expected_type is FederatedDataModule:
            parser.add_class_arguments(expected_type, "part")
        else:
            parser.add_argument("--part", type=expected_type)
        # The second name before jsonargparse 4.49.
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
        try:
            config = parser.parse_object({"part": section})
            return instantiate(config).part
        except ArgumentError as error:
            raise ConfigurationError(f"the federation {self.name}: {error}") from error


def federation(name: str) -> Federation:
    """Read a federation from its YAML file.

    Args:
        name: name of one of the package's federations, or path of a file.

    Raises:
        ConfigurationError: there is no federation of this name, or the file has unknown or wrong entries.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    else:
        path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        kind = "file" if path == Path(name) else "federation"
        files_here = map(str, Path().glob("*.yaml"))
        raise ConfigurationError(
            f"there is no {kind} {name!r}.{nearest(name, [*files_here, *names()])} python tools/bench.py "
            "--list shows all federations. Your own is a YAML file."
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Federation)
    try:
        fields_of_file = yaml.safe_load(path.read_text(encoding="utf-8"))
        defaults = {"title": path.stem, "set": "held_out"}
        arguments = {**defaults, **fields_of_file, "name": path.stem}
        parser.parse_object(copy.deepcopy(arguments))  # for its errors alone
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ArgumentError) as error:
        text_in_one_line = " ".join(str(error).split())
        raise ConfigurationError(f"{path} is no federation: {text_in_one_line}") from error
    return Federation(**arguments)


def names(set_name: str | None = None) -> list[str]:
    """Return the names of the package's federations, or of those in one set, such as ``"tuning"``."""
    all_names = [path.stem for path in sorted(FOLDER.glob("*.yaml"))]
    if set_name is None:
        return all_names
    return [name for name in all_names if federation(name).set == set_name]


def available_federations(
    requested: Sequence[str],
    say: Callable[[str], None],
) -> list[Federation]:
    """Read federations by names, sets and files. Leave out those without data, and ``say`` which."""
    requested_names: dict[str, None] = {}  # an ordered set
    for name_or_set in requested:
        is_set = name_or_set in SETS
        members = names(set_name=name_or_set) if is_set else [name_or_set]
        requested_names.update(dict.fromkeys(members))

    federations = []
    for candidate in map(federation, requested_names):
        if candidate.available:
            federations.append(candidate)
            continue
        missing = ", ".join(candidate.missing)
        say(f"{candidate.name} is left out: {missing} is not there. Set FLSV_DATA_ROOT.")
    if not federations:
        raise ConfigurationError(
            "there is no federation to run: the data of none of those asked for are there."
        )
    return federations


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's log and all warnings within the context."""
    logger = logging.getLogger("lightning.pytorch")
    log_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(log_level)
