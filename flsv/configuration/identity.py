"""Identity: texts and hashes of everything that determines an experiment's results.

Stored results (a resumable run, trained coalitions, runs of other seeds, scores) are reused only for the same identity.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from pydoc import locate
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from flsv.configuration.federation_config import ROLES, FederationConfig
from flsv.data import FederatedDataModule
from flsv.utilities.digest import digest
from flsv.utilities.errors import listed
from flsv.utilities.formats import PACKAGES, package_versions
from flsv.utilities.seeding import seed_or_default

#: Options that change no result: those for folders, output and speed. ``loader.eval_batch_size`` does change results if
#: a module logs values with a batch_size of its own.
IDLE = {
    "trainer": {
        "logger", "default_root_dir", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar",
        "enable_model_summary", "num_sanity_val_steps", "profiler", "devices", "num_nodes", "strategy", "benchmark",
    },
    "data": {
        "files.root", "files.download", "loader.num_workers", "loader.pin_memory", "loader.on_device",
        "loader.eval_batch_size",
    },
    "federation": {"reporting", "seed"},
}  # fmt: skip
#: Sections of a configuration that determine a run's results.
SECTIONS = ("model", "data", "federation", "trainer")
#: Packages whose classes' source is not hashed.
INSTALLED = {*PACKAGES, "torchvision", "torchmetrics", "timm", *sys.stdlib_module_names}
#: Arguments of strategies, metrics and privacy that may change when a run is resumed, such as the privacy budget.
FREE = {"max_epsilon", "workers", "server_lr"}


@dataclass(frozen=True)
class Identity:
    """Settings, and hashes of samples, that determine an experiment's results."""

    settings: Mapping[str, str]
    samples: Mapping[str, str]

    def plain(self) -> dict[str, dict[str, str]]:
        """Return settings and hashes as nested dictionaries of texts."""
        return {"settings": dict(self.settings), "samples": dict(self.samples)}

    def flat(self) -> dict[str, str]:
        return {
            **self.settings,
            **{f"samples of {_holder(name)}": each for name, each in self.samples.items()},
        }

    @property
    def key(self) -> str:
        """Return a fingerprint of settings and samples, 12 hexadecimal digits."""
        return digest(self.plain()).hex()[:12]

    def differences(self, before: Identity) -> list[str]:
        """Describe each setting that differs from ``before``, and name the clients with other samples."""
        if not before.settings:
            return ["nothing tells which"]
        who = self.other_holders(before)
        return [
            *self.other_settings(before),
            *([f"other samples or labels for {who}"] if who else []),
        ]

    def other_settings(self, other: Identity, words: str = "is {} and was {}") -> list[str]:
        """Describe each setting that differs from ``other`` by the template ``words``."""
        here, there = self.settings, other.settings
        pairs = {
            name: (here.get(name, "None"), there.get(name, "None")) for name in {**there, **here}
        }
        return [
            f"{name} {words.format(mine, theirs)}"
            for name, (mine, theirs) in pairs.items()
            if mine != theirs
        ]

    def other_holders(self, other: Identity) -> str:
        """Name the clients, and the server, if their samples differ from ``other``."""
        names = [
            n
            for n in {**other.samples, **self.samples}
            if self.samples.get(n) != other.samples.get(n)
        ]
        clients = [name for name in names if name != "server"]
        who = [f"clients [{listed(clients, 10)}]"] if clients else []
        return " and ".join(who + [_holder("server")] * ("server" in names))


def settings_of(config: FederationConfig, metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Describe a federation's arguments that determine its results, ``{option: text}``."""
    held = {role: getattr(config, role) for role in ROLES}
    held |= {
        "uploads": config.uploads,
        "filters": [each for each in config.filters if not each.may_change],
    }
    held |= {"optimizer_state": config.optimizer_state, "share": config.share}
    held |= {"evaluation.models": config.evaluation.models}
    settings = {f"federation.{name}": described(value) for name, value in held.items()}
    return settings | {
        f"federation.metrics.{name}": described(metric) for name, metric in metrics.items()
    }


def fit_identity(settings: Mapping[str, str], data: FederatedDataModule) -> Identity:
    """Return the identity of a training run, from its settings and data. A resumed run must have the same."""
    facts = {
        **data.describe(),
        "splits.max_samples": data.splits.max_samples,
        "class_names": data.class_names,
    }
    if "client_names" in facts:
        facts["client_names"] = data.client_names  # in place of the shortened list
    if isinstance(data.source, str):
        facts["source"] = PurePath(data.source).name  # the same data in another folder are the same
    # A partitioner is given as its repr already.
    texts = {
        name: _anywhere(v) if isinstance(v, str) else described(v) for name, v in facts.items()
    }
    told = {f"data.{name}": text for name, text in texts.items() if name != "batch_size"}
    return Identity({**settings, **told}, sample_hashes(data))


def versions() -> dict[str, str]:
    """Return ``{"version of ...": version}`` of flsv, torch and lightning."""
    return {f"version of {name}": number for name, number in package_versions().items()}


def config_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{dotted name: text}`` of the options and the code of ``flsv fit`` that determine its results."""
    settings = versions() | option_texts(config)
    for section in filter(config.get, SECTIONS):
        for name, value in _leaves(config[section], section):
            if name not in settings or not name.endswith("class_path"):
                continue
            source = source_of(locate(str(value)))
            if source:
                settings[f"{name}, its code"] = source
    return settings


def option_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{dotted name: text}`` of the options of ``flsv fit`` that determine its results."""
    texts = {}
    for section in filter(config.get, SECTIONS):
        is_data = section == "data"
        for name, value in _leaves(config[section], section):
            words = name.split(".")
            is_idle = bool({words[1], ".".join(words[1:3])} & IDLE.get(section, set()))
            is_root = is_data and words[-1] == "root"
            if is_idle or is_root or value is None:
                continue
            # The same data in another folder are the same data: hashes of the samples compare them.
            if is_data and isinstance(value, str):
                value = PurePath(value).name
            texts[name] = repr(value)
    return texts


def source_of(made_by: Any) -> str:
    """Compute a hash of the source files of a class and its bases, or of a function. "" for installed packages."""
    kinds = made_by.__mro__ if isinstance(made_by, type) else [made_by]
    own = [
        kind
        for kind in kinds
        if (getattr(kind, "__module__", None) or "builtins").split(".")[0] not in INSTALLED
    ]
    files = [inspect.getsourcefile(kind) for kind in own]
    codes = [
        Path(f).read_text() if f and Path(f).is_file() else inspect.getsource(k)
        for k, f in zip(own, files)
    ]
    return digest(codes).hex()[:12] if own else ""


def described(value: Any, depth: int = 4) -> str:
    """Describe an object by its class and arguments, with the same text in every process."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(described(item, depth) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(item, depth)}' for key, item in value.items())}}}"
    kind = type(value)
    if isinstance(value, nn.Module) and not isinstance(value, Metric):
        return kind.__name__
    plain = (
        isinstance(value, type | partial | Tensor)
        or inspect.isroutine(value)
        or not hasattr(value, "__dict__")
    )
    if plain or not depth:
        return _anywhere(repr(value))
    held = {name: getattr(value, name) for name in sorted(_made_with(value) - FREE)}
    if "seed" in held:
        held["seed"] = seed_or_default(held["seed"])  # None stands for the seed of seed_everything
    shown = [
        f"{k.lstrip('_')}={described(v, depth - 1)}"
        for k, v in held.items()
        if not isinstance(v, Tensor)
    ]
    return f"{kind.__name__}({', '.join(shown)})"


def _made_with(value: Any) -> set[str]:
    """Return the names of the attributes that hold an object's constructor arguments."""
    names = {name for name in vars(value) if not name.startswith("_")}
    names |= {
        f"_{name}"
        for name in inspect.signature(type(value).__init__).parameters
        if f"_{name}" in vars(value)
    }
    if isinstance(value, Metric):
        names -= _OF_EVERY_METRIC | set(value._defaults)
    return names


def _anywhere(text: str) -> str:
    """Remove memory addresses from a text."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


# Attributes that torchmetrics sets, and those that the federation sets.
_OF_EVERY_METRIC = {
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
    result = {"server": digest([contents["server"], data.server_val_indices])}
    for client in range(data.num_clients):
        parts = data.dealt_to(client)
        # Positions count from the client's first sample, so that a copy of another client's data has the same hash.
        parts[::2] = [indices - parts[0][:1].sum() for indices in parts[::2]]
        result[str(client)] = digest([contents.get(str(client), ""), *parts])
    return {holder: each.hex()[:16] for holder, each in result.items()}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}.{place}")
    else:
        yield name, value


def _holder(name: str) -> str:
    return "the server's validation set" if name == "server" else f"client {name}"


# ---- texts for people


def hyperparameters(
    config: FederationConfig, metrics: Mapping[str, Metric], data: FederatedDataModule, seed: int
) -> dict[str, Any]:
    """Return a run's hyper-parameters for loggers, as a flat dictionary."""
    result: dict[str, Any] = {
        "local_epochs": config.local_epochs,
        "optimizer_state": config.optimizer_state,
    }
    result |= {"federation_seed": seed}
    result |= {} if config.share == "all" else {"share": described(config.share)}
    result |= {role: repr(strategy) for role, strategy in config.strategies.items()}
    result |= {
        name: repr(list(parts))
        for name in ("uploads", "filters")
        if (parts := getattr(config, name))
    }
    result |= {f"metric/{name}": repr(metric) for name, metric in metrics.items()}
    return {**result, **{f"data/{name}": value for name, value in data.describe().items()}}
