"""The identity of an experiment: everything that determines its numbers, as text and hashes.

What is kept of one (a resumable run, trainings, runs of other seeds, scores) is used again only where this is equal.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePath
from pydoc import locate
from typing import Any

#: Options that change no number: where things lie and are written, what is shown, and how fast it goes.
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


@dataclass(frozen=True)
class Identity:
    """The identity of an experiment.

    Args:
        settings: by dotted name, in words.
        samples: hashes by holder, see :func:`flsv.server.fingerprint.fingerprint`.

    Example:
        >>> before = Identity({"data.batch_size": "32"}, {"server": "ab", "0": "cd"})
        >>> Identity({"data.batch_size": "64"}, {"server": "ab", "0": "ef"}).differences(before)
        ['data.batch_size is 64 and was 32', 'other samples or labels for clients [0]']
    """

    settings: Mapping[str, str]
    samples: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Identity:
        """What :meth:`plain` gave, from a JSON file; of anything else, an experiment without settings and samples."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return cls(dict(kept["settings"]), dict(kept["samples"]))
        except (FileNotFoundError, LookupError, TypeError, ValueError):
            return cls({}, {})

    def plain(self) -> dict[str, dict[str, str]]:
        """As JSON can hold it."""
        return {"settings": dict(self.settings), "samples": dict(self.samples)}

    def flat(self) -> dict[str, str]:
        """By one name each."""
        return {**self.settings, **{f"samples of {_holder(name)}": each for name, each in self.samples.items()}}

    @property
    def key(self) -> str:
        """A short hash of all of it."""
        return hashlib.sha256(json.dumps(self.plain(), sort_keys=True).encode()).hexdigest()[:12]

    def differences(self, before: Identity) -> list[str]:
        """Every setting that is another, and whose samples are others, in words."""
        mine, theirs = self.settings, before.settings
        if not theirs:
            return ["nothing tells which"]
        differ = [
            f"{name} is {mine.get(name, 'None')} and was {theirs.get(name, 'None')}"
            for name in {**theirs, **mine}
            if mine.get(name, "None") != theirs.get(name, "None")
        ]
        holders = [name for name in {**before.samples, **self.samples} if not self._same(before, name)]
        clients = [name for name in holders if name != "server"]
        who = [f"clients {_some(clients)}"] if clients else []
        who += [_holder("server")] if "server" in holders else []
        return [*differ, *([f"other samples or labels for {' and '.join(who)}"] if who else [])]

    def _same(self, other: Identity, holder: str) -> bool:
        return self.samples.get(holder) == other.samples.get(holder)


def versions() -> dict[str, str]:
    """Of the packages whose code makes the numbers, as an identity's settings.

    Example:
        >>> sorted(versions())
        ['version of flsv', 'version of lightning', 'version of torch']
    """
    return {f"version of {name}": version(name) for name in PACKAGES}


def configured(config: Mapping[str, Any]) -> dict[str, str]:
    """A resolved configuration of ``flsv fit`` as an identity's settings: what changes no number is left out; the
    source of the user's own classes is in, and the versions of the packages.

    Args:
        config: its sections ``model``, ``data``, ``federation`` and ``trainer``. The seed is none of it.

    Example:
        >>> files = {"root": "there"}
        >>> found = configured({"data": {"source": "here/a.csv", "files": files}, "trainer": {"max_epochs": 3}})
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
    """A hash of the code of a class, its bases and whatever else is in their files, or of a function; the empty string
    for what is installed, whose version tells.

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


def _some(clients: list[str]) -> str:
    return f"[{', '.join(clients[:10])}{', ...' if len(clients) > 10 else ''}]"
