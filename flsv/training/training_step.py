"""Functions that call a module's ``training_step`` as Lightning does, and read the loss that it returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flsv.utilities.errors import ConfigurationError, listed

#: Matches torch's messages on tensors of unexpected types.
_TYPE_MESSAGE = re.compile(
    r"dtype|scalar type|Tensor\) and weight type|not implemented for '|result type", re.IGNORECASE
)


def step_arguments(module: nn.Module, batch: Any, batch_idx: Any) -> tuple[Any, ...]:
    """Return the arguments of ``training_step``, with ``batch_idx`` if it takes it."""
    hook: Any = module.training_step
    if is_param_in_hook_signature(hook, "batch_idx", min_args=2):
        return batch, batch_idx
    return (batch,)


def training_loss(outputs: Any) -> Tensor:
    """Extract the loss, a scalar, from the value that ``training_step`` returned.

    Raises:
        ConfigurationError: the value is no tensor of one number, and has none as ``"loss"``.
    """
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = outputs
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())

    if isinstance(loss, Tensor):
        description = f"a tensor {list(loss.shape)}"
    else:
        description = type(outputs).__name__
    raise ConfigurationError(
        f"training_step must return a loss, a tensor of one number, for every batch, but it returned {description}."
    )


def is_type_error(error: BaseException) -> bool:
    """Return whether torch raised the error because of the types of tensors."""
    return _TYPE_MESSAGE.search(str(error)) is not None


def note_on_types(error: BaseException, batch: Any) -> str:
    """Describe the types of a batch if they caused the error, otherwise return an empty string."""
    types = [
        f"{value.dtype} {list(value.shape)}"
        for value in tree_leaves(batch)
        if isinstance(value, Tensor)
    ]
    if not types or not is_type_error(error):
        return ""
    return (
        f"The batch holds {listed(types)}. Most layers take torch.float32, and losses take classes as torch.int64. "
        "Convert them in the data set or in the module, as in x.float() and y.long()."
    )
