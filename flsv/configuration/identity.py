"""The identity of an experiment: everything that determines its numbers, as text and hashes.

What is kept of one (a resumable run, trainings, runs of other seeds, scores) is used again only where this is equal.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path, PurePath
from pydoc import locate
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, SumMetric

from flsv.configuration.federation_config import ROLES, FederationConfig
from flsv.core.strategy import Strategy, without_wrappers
from flsv.data import FederatedDataModule
from flsv.utilities.errors import listed
from flsv.utilities.seeding import seed_or_default

#: Options that change no number: where things lie and are written, what is shown, and how fast it goes. Of the size of
#: evaluation batches it holds but for what a module logs with a batch_size of its own.
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
#: Whose versions tell what their code is.
PACKAGES = ("flsv", "torch", "lightning")
#: Whose classes' source is not looked at.
INSTALLED = {*PACKAGES, "torchvision", "torchmetrics", "timm", *sys.stdlib_module_names}
#: Arguments of strategies, metrics and privacy that may change too: a larger budget lets a stopped run go on.
FREE = {"max_epsilon", "workers", "server_lr"}


@dataclass(frozen=True)
class Identity:
    """The identity of an experiment.

    Args:
        settings: by dotted name, in words.
        samples: hashes by holder, see :func:`sample_hashes`.

    Example:
        >>> before = Identity({"data.batch_size": "32"}, {"server": "ab", "0": "cd"})
        >>> Identity({"data.batch_size": "64"}, {"server": "ab", "0": "ef"}).differences(before)
        ['data.batch_size is 64 and was 32', 'other samples or labels for clients [0]']
    """

    settings: Mapping[str, str]
    samples: Mapping[str, str]

    def plain(self) -> dict[str, dict[str, str]]:
        """Convert to JSON types."""
        return {"settings": dict(self.settings), "samples": dict(self.samples)}

    def flat(self) -> dict[str, str]:
        """Return settings and samples under one name each."""
        return {**self.settings, **{f"samples of {_holder(name)}": each for name, each in self.samples.items()}}

    @property
    def key(self) -> str:
        """Return a short hash of settings and samples."""
        return hashlib.sha256(json.dumps(self.plain(), sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, before: Identity) -> list[str]:
        """Say in words which settings differ from ``before``, and whose samples do."""
        if not before.settings:
            return ["nothing tells which"]
        who = self.other_holders(before)
        return [*self.other_settings(before), *([f"other samples or labels for {who}"] if who else [])]

    def other_settings(self, other: Identity, words: str = "is {} and was {}") -> list[str]:
        """Say which settings differ from ``other``'s, each in these words for the two values."""
        here, there = self.settings, other.settings
        pairs = {name: (here.get(name, "None"), there.get(name, "None")) for name in {**there, **here}}
        return [f"{name} {words.format(mine, theirs)}" for name, (mine, theirs) in pairs.items() if mine != theirs]

    def other_holders(self, other: Identity) -> str:
        """Name those who hold other samples than in ``other``; the empty string: nobody."""
        names = [n for n in {**other.samples, **self.samples} if self.samples.get(n) != other.samples.get(n)]
        clients = [name for name in names if name != "server"]
        who = [f"clients [{listed(clients, 10)}]"] if clients else []
        return " and ".join(who + [_holder("server")] * ("server" in names))


def settings_of(config: FederationConfig, metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return a loop's settings that determine its numbers, by the names of the options; as they were before any round.

    The others (``local_epochs``, what is evaluated, logged and drawn) may change between two rounds.
    """
    held = {role: getattr(config, role) for role in ROLES}
    held |= {"uploads": config.uploads, "filters": [each for each in config.filters if not each.may_change]}
    held |= {"optimizer_state": config.optimizer_state, "share": config.share}
    held |= {"evaluation.models": config.evaluation.models}
    settings = {f"federation.{name}": described(value) for name, value in held.items()}
    return settings | {f"federation.metrics.{name}": described(metric) for name, metric in metrics.items()}


def fit_identity(settings: Mapping[str, str], data: FederatedDataModule) -> Identity:
    """Return the identity of a fit, which must be equal when it is resumed.

    Args:
        settings: see :func:`settings_of`.
        data: the data module, set up.

    Returns:
        Its settings are of the federation and its data; its samples are a hash of which samples every client holds, of
        what is in them and with which labels, by its number, and ``"server"`` for the validation set.
    """
    facts = {**data.describe(), "splits.max_samples": data.splits.max_samples, "class_names": data.class_names}
    if "client_names" in facts:
        facts["client_names"] = data.client_names  # all of them
    if isinstance(data.source, str):
        facts["source"] = PurePath(data.source).name  # the same data in another folder are the same
    # A partitioner comes as its repr already.
    texts = {name: _anywhere(v) if isinstance(v, str) else described(v) for name, v in facts.items()}
    told = {f"data.{name}": text for name, text in texts.items() if name != "batch_size"}
    return Identity({**settings, **told}, sample_hashes(data))


def versions() -> dict[str, str]:
    """Return the versions of the packages whose code makes the numbers, as an identity's settings.

    Example:
        >>> sorted(versions())
        ['version of flsv', 'version of lightning', 'version of torch']
    """
    return {f"version of {name}": version(name) for name in PACKAGES}


def config_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Turn a resolved configuration of ``flsv fit`` into an identity's settings: without what changes no number, with
    the source of the user's own classes and the versions of the packages.

    Args:
        config: its sections ``model``, ``data``, ``federation`` and ``trainer``. The seed is none of it.

    Example:
        >>> files = {"root": "there"}
        >>> found = config_settings({"data": {"source": "here/a.csv", "files": files}, "trainer": {"max_epochs": 3}})
        >>> {name: text for name, text in found.items() if name not in versions()}
        {'data.source': "'a.csv'", 'trainer.max_epochs': '3'}
    """
    settings = versions()
    for section in ("model", "data", "federation", "trainer"):
        for name, value in _leaves(config[section], section) if config.get(section) else ():
            words = name.split(".")
            of_data = section == "data"
            idle = {words[1], ".".join(words[1:3])} & IDLE.get(section, set())
            if idle or value is None or (of_data and words[-1] == "root"):
                continue
            # The same data in another folder are the same: their hashes tell.
            settings[name] = repr(PurePath(value).name if of_data and isinstance(value, str) else value)
            if name.endswith("class_path") and (source := source_of(locate(str(value)))):
                settings[f"{name}, its code"] = source
    return settings


def source_of(made_by: Any) -> str:
    """Hash the code of a class, its bases and whatever else is in their files, or of a function; the empty string
    stands for installed code, whose version tells.

    Raises:
        OSError: nobody can tell the code, as of a class that was typed into Python.

    Example:
        >>> from flsv.metrics import LeaveOneOut
        >>> source_of(LeaveOneOut)
        ''
    """
    kinds = made_by.__mro__ if isinstance(made_by, type) else [made_by]
    own = [kind for kind in kinds if (getattr(kind, "__module__", None) or "builtins").split(".")[0] not in INSTALLED]
    digest = hashlib.sha256()
    for kind in own:
        file = inspect.getsourcefile(kind)
        digest.update(Path(file).read_bytes() if file and Path(file).is_file() else inspect.getsource(kind).encode())
    return digest.hexdigest()[:12] if own else ""


def described(value: Any, depth: int = 4) -> str:
    """Describe an object by its class and what it was made with, the same in every process. Tensors are left out: they
    are learnt.

    Example:
        >>> from flsv.aggregation import FedAvg
        >>> described([FedAvg(), None, 0.5])
        "[FedAvg(weighting='samples'), None, 0.5]"
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(described(item, depth) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(item, depth)}' for key, item in value.items())}}}"
    kind = type(value)
    if isinstance(value, nn.Module) and not isinstance(value, Metric):
        return kind.__name__
    plain = isinstance(value, type | partial | Tensor) or inspect.isroutine(value) or not hasattr(value, "__dict__")
    if plain or not depth:
        return _anywhere(repr(value))
    held = {name: getattr(value, name) for name in sorted(_made_with(value) - FREE)}
    if "seed" in held:
        held["seed"] = seed_or_default(held["seed"])  # an open one is what seed_everything says
    shown = [f"{k.lstrip('_')}={described(v, depth - 1)}" for k, v in held.items() if not isinstance(v, Tensor)]
    return f"{kind.__name__}({', '.join(shown)})"


def _made_with(value: Any) -> set[str]:
    """Name the attributes of an object that say what it was made with."""
    names = {name for name in vars(value) if not name.startswith("_")}
    names |= {f"_{name}" for name in inspect.signature(type(value).__init__).parameters if f"_{name}" in vars(value)}
    if isinstance(value, Metric):
        names -= _OF_EVERY_METRIC | set(value._defaults)
    return names


def _anywhere(text: str) -> str:
    """Remove addresses in this process's memory from a text."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


# What torchmetrics keeps, and what the federation tells.
_OF_EVERY_METRIC = {*vars(SumMetric()), "num_clients", "num_classes", "class_names", "client_names", "class_counts"}


def sample_hashes(data: FederatedDataModule) -> dict[str, str]:
    """Hash every holder's samples and labels, see :func:`fit_identity`."""
    contents = data.content_hashes()
    result = {"server": _hash(contents["server"], data.server_val_indices)}
    for client in range(data.num_clients):
        parts: list[Tensor] = []
        for split in ("train", "val", "test"):
            parts += [data.client_indices(client, split), data.client_labels(client, split)]
        result[str(client)] = _hash(contents.get(str(client), ""), *parts)
    return result


def _hash(contents: str, *parts: Tensor) -> str:
    digest = hashlib.sha256(contents.encode())
    for part in parts:
        digest.update(f"{len(part)}:".encode())
        digest.update(part.cpu().long().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


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


# ---- as people read it


def hyperparameters(
    config: FederationConfig, metrics: Mapping[str, Metric], data: FederatedDataModule, seed: int
) -> dict[str, Any]:
    """Return the run's hyper-parameters, flat.

    Args:
        config: the loop's.
        metrics: the live ones, by name.
        data: the data module, set up.
        seed: the run's.
    """
    result: dict[str, Any] = {"local_epochs": config.local_epochs, "optimizer_state": config.optimizer_state}
    result |= {"federation_seed": seed}
    result |= {} if config.share == "all" else {"share": described(config.share)}
    result |= {role: repr(strategy) for role, strategy in config.strategies.items()}
    result |= {name: repr(list(parts)) for name in ("uploads", "filters") if (parts := getattr(config, name))}
    result |= {f"metric/{name}": repr(metric) for name, metric in metrics.items()}
    return {**result, **{f"data/{name}": value for name, value in data.describe().items()}}


def algorithm_name(strategies: Mapping[str, Strategy]) -> str:
    """Name a federation of these strategies, from what is not the default.

    Args:
        strategies: by their roles.

    Example:
        >>> from flsv.aggregation import FedAvg, ShapFedWA
        >>> from flsv.personalization import Standalone
        >>> algorithm_name({"aggregator": FedAvg(), "personalizer": Standalone()})
        'Standalone'
        >>> algorithm_name({"aggregator": ShapFedWA("cssv")}), algorithm_name({"aggregator": FedAvg()})
        ('ShapFedWA', 'FedAvg')
        >>> from flsv.retraining.shadow import ShadowTraining
        >>> algorithm_name({"client_algorithm": ShadowTraining()})
        'FedAvg'
    """
    names = {role: type(strategy).__name__ for role, strategy in without_wrappers(strategies).items()}
    parts = [names[role] for role in ("personalizer", "client_algorithm") if role in names]
    if names.get("aggregator", "FedAvg") != "FedAvg" or not parts:
        parts.append(names.get("aggregator", "FedAvg"))
    return "+".join(parts)


def hparam_columns(
    strategies: Mapping[str, Strategy],
    data: FederatedDataModule,
    seed: int,
    rounds: int | None,
    optimizers: Sequence[Optimizer],
) -> dict[str, str | int | float]:
    """Return the settings that distinguish runs in a table of runs, under names that a narrow column does not cut.

    Args:
        strategies: by their roles.
        data: the data module, set up.
        seed: the run's.
        rounds: number of rounds to be run; None where that is open.
        optimizers: of the module, before the first round.
    """
    partitioner = getattr(data, "partitioner", None)
    facts = {
        "algorithm": algorithm_name(strategies),
        "aggregator": type(strategies["aggregator"]).__name__ if "aggregator" in strategies else "FedAvg",
        "partitioner": None if partitioner is None else type(partitioner).__name__.removesuffix("Partitioner"),
        "alpha": getattr(partitioner, "alpha", None),
        "clients": data.num_clients,
        "learning rate": next((float(each.param_groups[0]["lr"]) for each in optimizers), None),
        "seed": seed,
        "rounds": rounds,
    }
    return {name: fact for name, fact in facts.items() if isinstance(fact, str | int | float)}
