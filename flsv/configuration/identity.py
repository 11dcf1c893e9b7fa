"""Identity: the fingerprint of an experiment, texts and hashes of everything that determines its results.

Stored results (a resumable run, trained coalitions, runs of other seeds, scores) are reused only for the same identity.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from flsv.configuration.federation_config import ROLES, FederationConfig
from flsv.data import FederatedDataModule
from flsv.scores.performance import Measure
from flsv.utilities.errors import listed
from flsv.utilities.plain_values import digest
from flsv.utilities.seeding import seed_or_default

#: Arguments of strategies, metrics and privacy that may change when a run is resumed, such as the privacy budget.
CHANGEABLE_ON_RESUME = {"max_epsilon", "workers", "server_lr"}
# Runs were saved with these names of the class Measure, and of attributes that hold a measure.
_CLASS_NAME_OF_MEASURES = "ModelScore"
_ATTRIBUTE_NAMES_OF_MEASURES = {"measure": "measured_by"}


@dataclass(frozen=True)
class Identity:
    """Settings, and hashes of samples, that determine an experiment's results."""

    settings: Mapping[str, str]
    samples: Mapping[str, str]

    def plain(self) -> dict[str, dict[str, str]]:
        """Return settings and hashes as nested dictionaries of texts."""
        return {"settings": dict(self.settings), "samples": dict(self.samples)}

    def flat(self) -> dict[str, str]:
        settings = dict(self.settings)
        for owner, sample_hash in self.samples.items():
            settings[f"samples of {_title_of_owner(owner)}"] = sample_hash
        return settings

    @property
    def key(self) -> str:
        """Return a fingerprint of settings and samples, 12 hexadecimal digits."""
        return digest(self.plain()).hex()[:12]

    def differences(self, earlier: Identity) -> list[str]:
        """Describe each setting that differs from ``earlier``, and name the clients with other samples."""
        differences = self.other_settings(earlier)
        owners = self.owners_of_other_samples(earlier)
        if owners:
            differences.append(f"other samples or labels for {owners}")
        return differences

    def other_settings(self, reference: Identity, template: str = "is {} and was {}") -> list[str]:
        """Describe each setting that differs from ``reference`` by ``template``."""
        differences = []
        all_settings = {**reference.settings, **self.settings}
        for name in all_settings:
            # A configuration may name a class without arguments with or without an empty `init_args`.
            default = "{}" if name.endswith(".init_args") else "None"
            value = self.settings.get(name, default)
            reference_value = reference.settings.get(name, default)
            if value != reference_value:
                differences.append(f"{name} {template.format(value, reference_value)}")
        return differences

    def owners_of_other_samples(self, reference: Identity) -> str:
        """Name the clients, and the server, if their samples differ from ``reference``."""
        owners = []
        all_samples = {**reference.samples, **self.samples}
        for owner in all_samples:
            if self.samples.get(owner) != reference.samples.get(owner):
                owners.append(owner)

        texts = []
        clients = [owner for owner in owners if owner != "server"]
        if clients:
            texts.append(f"clients [{listed(clients, 10)}]")
        if "server" in owners:
            texts.append(_title_of_owner("server"))
        return " and ".join(texts)


def settings_of(config: FederationConfig, metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Describe a federation's arguments that determine its results, ``{option: text}``."""
    values: dict[str, Any] = {role: getattr(config, role) for role in ROLES}
    values["uploads"] = config.uploads
    values["filters"] = [part for part in config.filters if not part.may_change]
    values["optimizer_state"] = config.optimizer_state
    values["share"] = config.share
    values["evaluation.models"] = config.evaluation.models
    for name, metric in metrics.items():
        values[f"metrics.{name}"] = metric
    return {f"federation.{name}": described(value) for name, value in values.items()}


def changeable_settings_of(config: FederationConfig, data: FederatedDataModule) -> dict[str, str]:
    """Describe the settings that a resumed run may change, and on which its models depend."""
    settings = {
        "local_epochs": repr(config.local_epochs),
        "batch_size": repr(data.describe().get("batch_size")),
    }
    for role, strategy in config.strategies.items():
        for name in CHANGEABLE_ON_RESUME & vars(strategy).keys():
            settings[f"{role}.{name}"] = repr(getattr(strategy, name))
    return settings


def fit_identity(settings: Mapping[str, str], data: FederatedDataModule) -> Identity:
    """Return the identity of a training run, from its settings and data. A resumed run must have the same."""
    data_settings = {
        **data.describe(),
        "splits.max_samples": data.splits.max_samples,
        "class_names": data.class_names,
    }
    data_settings.pop("batch_size", None)
    if "client_names" in data_settings:
        data_settings["client_names"] = data.client_names  # in place of the shortened list
    if isinstance(data.source, str):
        # The same data in another folder are the same.
        data_settings["source"] = PurePath(data.source).name

    all_settings = dict(settings)
    for name, value in data_settings.items():
        if isinstance(value, str):  # such as a partitioner's repr
            text = _without_addresses(value)
        else:
            text = described(value)
        all_settings[f"data.{name}"] = text
    return Identity(all_settings, sample_hashes(data))


def described(value: Any, depth: int = 4) -> str:
    """Describe an object by its class and arguments, with the same text in every process."""
    if isinstance(value, list | tuple):
        items = [described(item, depth) for item in value]
        return f"[{', '.join(items)}]"
    if isinstance(value, Mapping):
        items = [f"{key}: {described(item, depth)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, nn.Module) and not isinstance(value, Metric):
        return type(value).__name__
    is_named_measure = isinstance(value, Measure) and value.is_of_classifier
    if _is_plain(value) or is_named_measure or depth == 0:
        return _without_addresses(repr(value))

    assignments = []
    names_of_arguments = _names_of_arguments(value) - CHANGEABLE_ON_RESUME
    for name in sorted(names_of_arguments):
        argument = getattr(value, name)
        if name == "seed":
            argument = seed_or_default(argument)  # None stands for the seed of seed_everything
        if not isinstance(argument, Tensor):
            text = described(argument, depth - 1)
            assignments.append(f"{_described_name(name, argument)}={text}")
    class_name = _CLASS_NAME_OF_MEASURES if isinstance(value, Measure) else type(value).__name__
    return f"{class_name}({', '.join(assignments)})"


def _described_name(name: str, argument: Any) -> str:
    if isinstance(argument, Measure):
        name = _ATTRIBUTE_NAMES_OF_MEASURES.get(name, name)
    return name.lstrip("_")


def _is_plain(value: Any) -> bool:
    """Return whether an object's ``repr`` describes it."""
    if isinstance(value, type | partial | Tensor) or inspect.isroutine(value):
        return True
    return not hasattr(value, "__dict__")


def _names_of_arguments(value: Any) -> set[str]:
    """Return the names of the attributes that hold an object's constructor arguments."""
    attributes = vars(value)
    names = {name for name in attributes if not name.startswith("_")}
    for name in inspect.signature(type(value).__init__).parameters:
        if f"_{name}" in attributes:
            names.add(f"_{name}")
    if isinstance(value, Metric):
        state_names = set(value._defaults)
        names -= _ATTRIBUTES_OF_EVERY_METRIC | state_names
    return names


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


# Attributes that torchmetrics sets, and those that the federation sets.
_ATTRIBUTES_OF_EVERY_METRIC = {
    *vars(SumMetric()),
    "num_clients",
    "num_classes",
    "class_names",
    "client_names",
    "class_counts",
}


def sample_hashes(data: FederatedDataModule) -> dict[str, str]:
    """Return hashes of samples and labels, ``{client's id or "server": hash}``."""
    contents = data.content_hashes()
    server_digest = digest([contents["server"], data.server_val_indices])
    hashes = {"server": server_digest.hex()[:16]}
    for client in range(data.num_clients):
        tensors = data.indices_and_labels(client)
        # The list has indices and labels for train, val and test, one after the other.
        all_indices = tensors[::2]
        all_labels = tensors[1::2]
        train_indices = all_indices[0]
        first_index = 0
        if len(train_indices) > 0:
            first_index = int(train_indices[0])

        # Indices count from the client's first sample, so that a copy of another client's data has the same hash.
        hashed_parts = []
        for indices, labels in zip(all_indices, all_labels):
            hashed_parts += [indices - first_index, labels]
        content = contents.get(str(client), "")
        hashes[str(client)] = digest([content, *hashed_parts]).hex()[:16]
    return hashes


def _title_of_owner(name: str) -> str:
    if name == "server":
        return "the server's validation set"
    return f"client {name}"


# ---- texts for people


def hyperparameters(
    config: FederationConfig, metrics: Mapping[str, Metric], data: FederatedDataModule, seed: int
) -> dict[str, Any]:
    """Return a run's hyper-parameters for loggers, as a flat dictionary."""
    parameters: dict[str, Any] = {
        "local_epochs": config.local_epochs,
        "optimizer_state": config.optimizer_state,
        "federation_seed": seed,
    }
    if config.share != "all":
        parameters["share"] = described(config.share)
    parameters |= _described_strategies(config)
    for name, metric in metrics.items():
        parameters[f"metric/{name}"] = repr(metric)
    for name, value in data.describe().items():
        parameters[f"data/{name}"] = value
    validation = data.validation()
    if validation is not None and validation["rows"] is not None:
        # This includes validation samples that are not among the clients' data.
        parameters["data/server_val_samples"] = validation["rows"]
    return parameters


def _described_strategies(config: FederationConfig) -> dict[str, str]:
    strategies: dict[str, Any] = dict(config.strategies)
    if config.uploads:
        strategies["uploads"] = list(config.uploads)
    if config.filters:
        strategies["filters"] = list(config.filters)
    return {role: repr(strategy) for role, strategy in strategies.items()}
