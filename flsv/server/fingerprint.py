"""The fingerprint of a run: saved with it, and compared when it is resumed."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.server.config import ROLES, FederationConfig
from flsv.server.identity import Identity

#: Arguments of strategies, metrics and privacy that may change too: a larger budget lets a stopped run go on.
FREE = {"max_epsilon", "workers", "server_lr"}
_METRICS = "federation.metrics."


def settings_of(config: FederationConfig, metrics: Mapping[str, Metric]) -> dict[str, str]:
    """A loop's settings that make a run what it is, by the names of the options; as it was made, before any round.

    The others (``local_epochs``, what is evaluated, logged and drawn) may change between two rounds.
    """
    held = {role: getattr(config, role) for role in ROLES}
    held |= {"uploads": config.uploads, "filters": [each for each in config.filters if not each.may_change]}
    held |= {"client_optimizer": config.client_optimizer, "share": config.share}
    held |= {"evaluation.models": config.evaluation.models}
    settings = {f"federation.{name}": described(value) for name, value in held.items()}
    return settings | {f"{_METRICS}{name}": described(metric) for name, metric in metrics.items()}


def fingerprint(settings: Mapping[str, str], data: FederatedDataModule) -> dict[str, dict[str, str]]:
    """The settings and hashes that must be equal when a run is resumed.

    Args:
        settings: see :func:`settings_of`.
        data: dealt out.

    Returns:
        ``"settings"``: of the federation and its data. ``"samples"``: a hash of which samples every client holds, of
        what is in them and with which labels, by its number; ``"server"`` for the validation set. Only strings, so that
        checkpoints load without pickle.
    """
    facts = {**data.describe(), "splits.max_samples": data.splits.max_samples, "class_names": data.class_names}
    if "client_names" in facts:
        facts["client_names"] = data.client_names  # all of them
    if isinstance(data.source, str):
        facts["source"] = PurePath(data.source).name  # the same data in another folder are the same
    # A partitioner comes as its repr already.
    texts = {name: _anywhere(v) if isinstance(v, str) else described(v) for name, v in facts.items()}
    told = {f"data.{name}": text for name, text in texts.items() if name != "batch_size"}
    return {"settings": {**settings, **told}, "samples": dealt(data)}


def check_same(saved: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> None:
    """Compare two fingerprints.

    Raises:
        ConfigurationError: naming every setting that differs, and the clients that hold other samples.
    """
    before, after = saved["settings"], now["settings"]
    theirs, mine = ([n.removeprefix(_METRICS) for n in side if n.startswith(_METRICS)] for side in (before, after))
    if sorted(theirs) != sorted(mine):
        raise ConfigurationError(
            f"the checkpoint holds the metrics {sorted(theirs)}, the loop has {sorted(mine)}: resume with the metrics "
            "that the run was started with."
        )
    # Checkpoints of versions that had no names yet hold none.
    named = {name: text for name, text in after.items() if name == "data.client_names"}
    differ = Identity(after, now["samples"]).differences(Identity({**named, **before}, saved["samples"]))
    if differ:
        raise ConfigurationError(
            f"the checkpoint is of another federation: {'; '.join(differ)}. Resume with what the run was started with, "
            "or start a new one without ckpt_path."
        )


def check_seed(saved: int, given: Any) -> None:
    """``given`` is the loop's or ``seed_everything``'s, or None.

    Raises:
        ConfigurationError: it is not the one that the run was started with.
    """
    if given is not None and int(given) != saved:
        raise ConfigurationError(
            f"the seed is {given} and was {saved} when the run was started, from which every choice of its rounds "
            f"derives: it cannot be changed. Give federation.seed={saved} (or seed_everything), or start a new run "
            "without ckpt_path."
        )


def described(value: Any, depth: int = 4) -> str:
    """An object by its class and what it was made with, the same in every process. Tensors are left out: they are what
    it has learnt.

    Example:
        >>> from flsv.aggregation import ShapFedWA
        >>> described([ShapFedWA("cssv"), None, 0.5])
        "[ShapFedWA(metric='cssv'), None, 0.5]"
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
    names = {name for name in vars(value) if not name.startswith("_")}
    names |= {f"_{name}" for name in inspect.signature(kind.__init__).parameters if f"_{name}" in vars(value)}
    if isinstance(value, Metric):
        names -= _OF_EVERY_METRIC | set(value._defaults)
    unsaid = getattr(value, "unsaid", {})
    held = {name: getattr(value, name) for name in sorted(names - FREE)}
    held = {name: each for name, each in held.items() if name not in unsaid or unsaid[name] != each}
    told = [f"{k.lstrip('_')}={described(v, depth - 1)}" for k, v in held.items() if not isinstance(v, Tensor)]
    return f"{kind.__name__}({', '.join(told)})"


def _anywhere(text: str) -> str:
    """Without addresses in this process's memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


# What torchmetrics keeps, and what the federation tells.
_OF_EVERY_METRIC = {*vars(SumMetric()), "num_clients", "num_classes", "class_names", "client_names", "class_counts"}


def dealt(data: FederatedDataModule) -> dict[str, str]:
    """A hash of every holder's samples and labels, see :func:`fingerprint`."""
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
