"""Whether two runs are the same to the bit."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

#: Of a process alone: Lightning's counts of its own batches, beside the totals that all have, and where it writes.
OWN = re.compile(r"'zero_grad'|scheduler_progress|progress'.*'current'|is_last_batch|\['csv'\]|path|best_k_models")


def differences(a: Path, b: Path) -> list[str]:
    """Of two folders of runs: what their last checkpoints hold, what they logged, their CSVs."""
    one, other = (leaves_of(torch.load(folder / "last.ckpt", weights_only=True)) for folder in (a, b))
    found = [place for place in {**one, **other} if one.get(place) != other.get(place)]
    for name in ("contributions.csv", "metrics.txt"):
        if (a / name).is_file() and (a / name).read_bytes() != (b / name).read_bytes():
            found.append(name)
    return found


def leaves_of(checkpoint: Any) -> dict[str, Any]:
    leaves = {keystr(place): leaf for place, leaf in tree_flatten_with_path(checkpoint)[0]}
    return {place: held(leaf) for place, leaf in leaves.items() if not OWN.search(place)}


def held(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.numpy().tobytes()
    return repr(leaf)  # NaN is NaN
