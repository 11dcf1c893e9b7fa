"""An input of ``fuzz_inputs.py``, and what has to become of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flsv.cli import main

Make = Callable[[Path], str]


@dataclass(frozen=True)
class Case:
    """An input.

    Args:
        kind: of input.
        run: hands it to flsv in a folder, and gives what came out, as text.
        expected: ``"same"``, ``"refused"``, ``"either"``, ``"taken"`` or ``"warned"``, see ``fuzz_inputs.py``.
        names: what the error has to name.
    """

    kind: str
    run: Make
    expected: str = "refused"
    names: str = ""

    @property
    def ordinary(self) -> str:
        """Name of the case whose result it must have."""
        return f"{self.kind}: ordinary"


#: By name. Each kind has one that is called ordinary.
CASES: dict[str, Case] = {}


def add(kind: str, name: str, run: Make, expected: str = "refused", names: str = "") -> None:
    assert f"{kind}: {name}" not in CASES, name
    CASES[f"{kind}: {name}"] = Case(kind, run, expected, names)


def digest(*parts: Any) -> str:
    """Of tensors, and of all else by its text."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
    return sha.hexdigest()[:12]


def command(*arguments: str) -> None:
    """A command line; its exit status is raised, as a shell sees it."""
    status = main(list(arguments))
    if status:
        raise SystemExit(status)


def fitted(folder: Path) -> str:
    """What the last checkpoint of a fit holds."""
    saved = torch.load(next(folder.rglob("last.ckpt")), weights_only=True)
    return digest(*saved["state_dict"].values())
