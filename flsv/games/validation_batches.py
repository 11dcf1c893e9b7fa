"""Functions that read the validation batches once, check and keep them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from flsv.utilities.errors import ConfigurationError

#: A batch: a pair of an input and labels.
Pair = tuple[Any, Any]


@torch.inference_mode(False)
def read_batches(
    batches: Iterable[Any], device: torch.device, num_classes: int | None, size: int | None = None
) -> tuple[list[Pair], Tensor | None]:
    """Move batches to a device, and cut them to ``size`` samples. Also return the number of samples of each class,
    int64 ``[M]`` on the CPU.
    """
    pairs: list[Pair] = []
    support = None if num_classes is None else torch.zeros(num_classes, dtype=torch.int64)
    for x, y in (
        batches if num_classes is None else (checked_pair(batch, num_classes) for batch in batches)
    ):
        if support is not None:
            support += torch.bincount(y.cpu(), minlength=len(support))
        if support is None or len(y):
            pairs.append(apply_to_collection(move_data_to_device((x, y), device), Tensor, _plain))
    if not pairs:
        raise ConfigurationError(
            "there are no validation samples: models cannot be evaluated on nothing."
        )
    return (pairs if support is None or size is None else _recut(pairs, size)), support


def _recut(batches: list[Pair], size: int) -> list[Pair]:
    """Cut batches to ``size`` samples if all inputs are tensors of one shape."""
    kinds = {(x.shape[1:], x.dtype) if isinstance(x, Tensor) else None for x, _ in batches}
    if len(kinds) > 1 or None in kinds:
        return batches
    inputs, labels = (torch.cat(parts).split(size) for parts in zip(*batches))
    return list(zip(inputs, labels))


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor, or a clone if it was made in inference mode, which autograd refuses."""
    return tensor.clone() if tensor.is_inference() else tensor


def checked_pair(batch: Any, num_classes: int) -> tuple[Any, Tensor]:
    """Return a batch as ``(x, y)``. Raise ConfigurationError unless it is a pair of inputs and labels ``[B]`` below
    ``num_classes``.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigurationError(
            f"a validation batch is a {type(batch).__name__}, expected a pair (x, y)."
        )
    x, y = batch
    if not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
        raise ConfigurationError(
            f"the labels of a validation batch are {kind_of(y)}, expected integer classes [B]."
        )
    if isinstance(x, Tensor) and len(x) != len(y):
        raise ConfigurationError(f"a validation batch has {len(x)} inputs and {len(y)} labels.")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= num_classes):
        raise ConfigurationError(
            f"validation labels lie in {int(y.min())} .. {int(y.max())}, but num_classes={num_classes}: expected "
            f"0 .. {num_classes - 1}."
        )
    return x, y.long()


def checked_logits(logits: Any, y: Tensor, classes: int, or_more: bool = False) -> Tensor:
    """Return ``logits``. Raise ConfigurationError unless they are ``[B, classes]``, or with ``or_more`` have more
    columns.
    """
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    if shape == (len(y), classes) or (
        or_more and len(shape) == 2 and shape[0] == len(y) and shape[1] > classes
    ):
        return logits
    raise ConfigurationError(
        f"the module's forward gives {kind_of(logits)} for {len(y)} samples of {classes} classes; expected logits "
        f"[{len(y)}, {classes}]."
    )


def kind_of(value: Any) -> str:
    """Describe a tensor by dtype and shape, any other object by its type."""
    return (
        f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    )
