"""NaN and infinity in inputs that lie ready as tensors, found before they make every value NaN, or wrong."""

from __future__ import annotations

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from flsv.data.labels import in_words
from flsv.data.loaders import tensors_of
from flsv.data.names import client_called
from flsv.data.splits import FederatedSplits
from flsv.errors import ConfigurationError

_ROWS = 1024


def not_finite(dataset: Dataset, indices: Tensor | None = None) -> Tensor:
    """Which samples have an input that is not finite, int64 ``[k]``; none of data that are not held as tensors.

    Args:
        dataset: the last of several tensors are the labels, or what is to be predicted.
        indices: the samples to look at, int64 ``[n]``; None for all.

    Example:
        >>> not_finite(torch.utils.data.TensorDataset(torch.tensor([0.0, torch.nan, 1.0]), torch.zeros(3)))
        tensor([1])
    """
    tensors, rows = tensors_of(dataset, indices)
    held = tensors or ()
    inputs = [tensor for tensor in held[: max(1, len(held) - 1)] if tensor.is_floating_point() or tensor.is_complex()]
    if not inputs:
        return torch.empty(0, dtype=torch.long)
    found = torch.ones(len(inputs[0]) if rows is None else len(rows), dtype=torch.bool)
    # A few rows at a time: isfinite needs several times the memory of what it looks at.
    for start in range(0, len(found), _ROWS):
        part = slice(start, start + _ROWS)
        for x in inputs:
            found[part] &= _finite(x[part] if rows is None else x[rows[part].to(x.device)])
    broken = (~found).nonzero().flatten()
    return broken if indices is None else indices[broken]


def check_inputs(train: Dataset, splits: FederatedSplits, held_out: dict[str, Dataset | None]) -> None:
    """Refuse validation and test samples that are not finite; warn of training samples.

    Training goes on with such a sample in it, as it would in a real federation: its client is named and left out of the
    rounds that it spoils, and ``drop_flagged`` leaves out the sample. An evaluation on one only looks like one.

    Args:
        train: the training data that ``splits`` refer to.
        splits: who holds which sample.
        held_out: validation and test data by name.

    Raises:
        ConfigurationError: an evaluation sample that is not finite.
    """
    broken = not_finite(train)
    if len(broken):
        sets = {"the server's validation set": splits.server_val}
        sets |= {
            f"{client_called(i, splits.names)}'s {name} set": held[name]
            for i, held in enumerate(splits.clients)
            for name in held
        }
        for name, rows in sets.items():
            here = rows[torch.isin(rows, broken)]
            if len(here) and not name.endswith(" train set"):
                raise ConfigurationError(_said(name, here, len(rows), "the training data"))
        rank_zero_warn(_said("the training data", broken, len(train), "them"))  # type: ignore[arg-type]
    for name, dataset in held_out.items():
        found = torch.empty(0) if dataset is None else not_finite(dataset)
        if dataset is not None and len(found):
            raise ConfigurationError(_said(f"the {name} data", found, len(dataset), "them"))  # type: ignore[arg-type]


def _finite(x: Tensor) -> Tensor:
    """Which rows are, bool ``[n]``."""
    # NaN and infinity survive a sum, and one number is looked at faster than all.
    if torch.isfinite(x.sum()):
        return torch.ones(len(x), dtype=torch.bool)
    return torch.isfinite(x).reshape(len(x), -1).all(1).cpu()


def _said(name: str, broken: Tensor, total: int, where: str) -> str:
    return (
        f"{len(broken)} of {total} samples of {name} have NaN or infinite inputs: {in_words(broken.tolist())} of "
        f"{where}. Repair them or leave them out."
    )
