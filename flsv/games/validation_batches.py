"""Functions that read and check validation batches, and compute models' outputs for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flsv.utilities.errors import ConfigurationError

#: A batch: a pair of an input and labels.
Pair = tuple[Any, Any]


@torch.inference_mode(False)
def read_batches(
    batches: Iterable[Any],
    device: torch.device,
    num_classes: int | None,
    size: int | None = None,
) -> tuple[list[Pair], Tensor | None]:
    """Move batches to a device, and split or merge them to ``size`` samples. Also return the number of samples of each
    class, int64 ``[M]`` on the CPU.
    """
    if num_classes is None:
        pairs = [_on_device((x, y), device) for x, y in batches]
        _check_has_samples(pairs)
        return pairs, None

    pairs = []
    support = torch.zeros(num_classes, dtype=torch.int64)
    for batch in batches:
        x, y = checked_pair(batch, num_classes)
        support += torch.bincount(y.cpu(), minlength=num_classes)
        if len(y):
            pairs.append(_on_device((x, y), device))
    _check_has_samples(pairs)
    if size is not None:
        pairs = _with_batch_size(pairs, size)
    return pairs, support


def _on_device(pair: Pair, device: torch.device) -> Pair:
    device_pair = move_data_to_device(pair, device)
    return apply_to_collection(device_pair, Tensor, _without_inference_mode)


def _check_has_samples(pairs: list[Pair]) -> None:
    if pairs:
        return
    raise ConfigurationError(
        "there are no validation samples on which models could be evaluated. Hold out some, for example with "
        "Splits(server_val=0.1)."
    )


def _with_batch_size(batches: list[Pair], size: int) -> list[Pair]:
    """Split or merge batches to ``size`` samples if all inputs are tensors of one shape."""
    inputs = [x for x, _ in batches]
    labels = [y for _, y in batches]
    sample_forms = set()
    for x in inputs:
        if not isinstance(x, Tensor):
            return batches
        sample_forms.add((x.shape[1:], x.dtype))
    can_be_joined = len(sample_forms) == 1
    if not can_be_joined:
        return batches

    input_parts = torch.cat(inputs).split(size)
    label_parts = torch.cat(labels).split(size)
    return list(zip(input_parts, label_parts))


def _without_inference_mode(tensor: Tensor) -> Tensor:
    """Return the tensor, or a clone if it was created in inference mode, since autograd refuses such tensors."""
    return tensor.clone() if tensor.is_inference() else tensor


def checked_pair(batch: Any, num_classes: int | None) -> tuple[Any, Tensor]:
    """Return a batch as ``(x, y)``. Raise ConfigurationError unless it is a pair of inputs and labels ``[B]`` below
    ``num_classes``, if this is known.
    """
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair:
        raise ConfigurationError(
            f"a validation batch is a {type(batch).__name__}, but a pair (x, y) is expected."
        )
    x, y = batch
    if not _are_classes(y):
        raise ConfigurationError(
            f"the labels of a validation batch are {description_of(y)}, but integer classes [B] are expected."
        )
    if isinstance(x, Tensor) and len(x) != len(y):
        raise ConfigurationError(f"a validation batch has {len(x)} inputs and {len(y)} labels.")
    if len(y) and num_classes is not None:
        lowest = int(y.min())
        highest = int(y.max())
        if lowest < 0 or highest >= num_classes:
            raise ConfigurationError(
                f"validation labels lie in {lowest} .. {highest}, but with num_classes={num_classes} labels in "
                f"0 .. {num_classes - 1} are expected."
            )
    return x, y.long()


def _are_classes(y: Any) -> bool:
    if not isinstance(y, Tensor) or y.ndim != 1:
        return False
    return not y.is_floating_point() and y.dtype != torch.bool


def checked_logits(
    logits: Any, y: Tensor, num_classes: int | None, allow_more_columns: bool = False
) -> Tensor:
    """Return ``logits``. Raise ConfigurationError unless they are ``[B, num_classes]``, or have more columns if these
    are allowed. ``num_classes`` None: any number of columns.
    """
    if isinstance(logits, Tensor) and logits.ndim == 2:
        num_rows, num_columns = logits.shape
        if num_classes is None:
            has_columns = True
        elif allow_more_columns:
            has_columns = num_columns >= num_classes
        else:
            has_columns = num_columns == num_classes
        if num_rows == len(y) and has_columns:
            return logits
    raise ConfigurationError(
        f"the module's forward returns {description_of(logits)} for {len(y)} samples of {num_classes or 'M'} classes, "
        f"but logits [{len(y)}, {num_classes or 'M'}] are expected."
    )


def description_of(value: Any) -> str:
    """Describe a tensor by dtype and shape, any other object by its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def no_forward(module: nn.Module, x: Any, error: Exception) -> ConfigurationError:
    """Return the error for a module whose ``forward(x)`` raised ``error``."""
    return ConfigurationError(
        f"{type(module).__name__}.forward(x) raised {type(error).__name__}: {str(error).rstrip('.')}. flsv calls "
        f"forward with the first part of a validation batch, here {description_of(x)}. Let forward accept this, and "
        "return the logits [B, M]."
    )


def outputs_of(module: nn.Module, x: Any) -> Any:
    """Return a module's outputs ``[1, B, ...]`` for the inputs ``x``."""
    outputs = module(x)
    return outputs[None] if isinstance(outputs, Tensor) else [outputs]


def outputs_of_stacked(module: nn.Module, stacked_state: dict[str, Tensor], x: Any) -> Tensor:
    """Return the outputs ``[c, B, ...]`` of c models, whose states are stacked ``{name: [c, ...]}``, for the inputs
    ``x``.
    """

    def outputs_of_one(state: dict[str, Tensor]) -> Any:
        return functional_call(module, state, (x,))

    outputs = vmap(outputs_of_one, randomness="same")(stacked_state)
    if not isinstance(outputs, Tensor):
        raise TypeError(f"forward returns a {type(outputs).__name__}")
    return outputs


def free_cached_memory(device: torch.device) -> None:
    """Release the memory that torch caches on a device."""
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache"):
        backend.empty_cache()
