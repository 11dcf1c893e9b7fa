"""Whether two runs are the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def differences(a: Path, b: Path) -> list[str]:
    """Of two folders of runs: their last checkpoints without paths and batch counters, what they logged, their CSVs."""
    one, other = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (a, b))
    found = list(_differ(one, other, ""))
    for name in ("contributions.csv", "metrics.txt"):
        if (a / name).is_file() and (a / name).read_bytes() != (b / name).read_bytes():
            found.append(name)
    return found


def _differ(one: Any, other: Any, place: str) -> Iterator[str]:
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        if not same or one.numpy().tobytes() != other.numpy().tobytes():
            yield place
    elif isinstance(one, dict) and place.endswith("/best_k_models"):  # by path
        yield from _differ(list(one.values()), list(other.values()), place)
    elif isinstance(one, dict):
        if not isinstance(other, dict) or {str(key) for key in one} != {str(key) for key in other}:
            yield f"{place}: other keys"
            return
        for key in one:
            # Lightning's counts of a process' own batches, beside the totals that all processes have.
            own = (
                key == "zero_grad"
                or "scheduler_progress" in place
                or (key in ("current", "is_last_batch") and "progress" in place)
            )
            if not own and key != "csv" and "path" not in str(key):
                yield from _differ(one[key], other[key], f"{place}/{key}")
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{place}: other length"
            return
        for i, pair in enumerate(zip(one, other)):
            yield from _differ(*pair, f"{place}/{i}")
    elif one != other and not (one != one and other != other):
        yield f"{place}: {one!r} and {other!r}"
