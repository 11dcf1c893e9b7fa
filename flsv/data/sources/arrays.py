"""Arrays ``(X, y)``, and two columns of a Hugging Face data set, as a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torchvision.transforms.functional import to_tensor

from flsv.data.sources.base import image_tensor
from flsv.data.tables.table import column_keys, column_values, is_columnar
from flsv.errors import ConfigurationError


def is_array(value: Any) -> bool:
    """Whether it is a NumPy array or a tensor.

    Example:
        >>> is_array(np.zeros(2)), is_array([0.0, 0.0])
        (True, False)
    """
    return isinstance(value, np.ndarray | Tensor)


def is_pair_of_arrays(value: Any) -> bool:
    """Whether it is ``(X, y)``: an array of inputs, and an array or a list of what is to be predicted.

    Example:
        >>> is_pair_of_arrays((np.zeros((2, 3)), ["a", "b"])), is_pair_of_arrays((np.zeros((2, 3)), (np.zeros(2),) * 2))
        (True, False)
    """
    if not isinstance(value, list | tuple) or len(value) != 2 or not is_array(value[0]):
        return False
    y = value[1]
    if isinstance(y, list | tuple):
        return not any(is_array(entry) or isinstance(entry, list | tuple) for entry in y)
    # A pandas Series has a shape, too.
    return is_array(y) or (hasattr(y, "shape") and not isinstance(y, Dataset) and not is_columnar(y))


def array_set(x: Any, y: Any = None) -> TensorDataset:
    """Inputs, and perhaps what is to be predicted, as tensors.

    Floating-point inputs become float32; 8-bit pixels ``[N, H, W]`` or ``[N, H, W, 1 or 3]`` images ``[N, C, H, W]`` in
    0 .. 1; other whole numbers int64, which are tokens to a model. Whole numbers and words to be predicted are classes,
    words in sorted order; floating-point numbers are numbers (float32).

    Args:
        x: ``[N, ...]``.
        y: ``[N]``, ``[N, 1]`` or, for numbers, ``[N, ...]``; None: nothing is to be predicted.

    Returns:
        With the attribute ``classes``, if ``y`` are words.

    Raises:
        ConfigurationError: no numbers, other lengths, or a target that is missing.

    Example:
        >>> data = array_set(np.eye(3), ["ill", "well", "ill"])
        >>> data.tensors[1], data.classes
        (tensor([0, 1, 0]), ('ill', 'well'))
    """
    inputs = _inputs(x)
    if y is None:
        return TensorDataset(inputs)
    targets = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if targets.ndim == 0 or len(targets) != len(inputs):
        raise ConfigurationError(
            f"(X, y): X has {len(inputs)} entries and y the shape {list(targets.shape)}. One target per input is "
            "needed; a training and a test set are given as ((X, y), (X, y))."
        )
    if targets.ndim == 2 and targets.shape[1] == 1 and targets.dtype.kind != "f":
        targets = targets[:, 0]
    if targets.dtype.kind in "biu":
        return TensorDataset(inputs, torch.from_numpy(targets.astype(np.int64)))
    if targets.dtype.kind == "f":
        missing = np.flatnonzero(~np.isfinite(targets.reshape(len(targets), -1)).all(1))
        if len(missing):
            raise ConfigurationError(
                f"(X, y): {len(missing)} of {len(targets)} entries of y are NaN or infinite, such as entry "
                f"{missing[0]}. Leave these samples out."
            )
        return TensorDataset(inputs, torch.from_numpy(targets.astype(np.float32)))
    strange = [entry for entry in targets.reshape(-1).tolist() if not isinstance(entry, str)][:1]
    if targets.ndim != 1 or strange:
        raise ConfigurationError(
            f"(X, y): y is {targets.dtype} {list(targets.shape)}{f' with {strange[0]!r} in it' if strange else ''}. "
            "Classes are whole numbers or words, one each; what is to be predicted otherwise, floating-point numbers."
        )
    classes, numbers = np.unique(targets.astype(str), return_inverse=True)
    data = TensorDataset(inputs, torch.from_numpy(numbers.reshape(-1).astype(np.int64)))
    data.classes = tuple(classes.tolist())  # type: ignore[attr-defined]
    return data


def _inputs(x: Any) -> Tensor:
    found = x.detach().cpu() if isinstance(x, Tensor) else None
    if found is None:
        array = np.asarray(x)
        # A tensor shares an array's memory, which has to lie in order, be writable and in native byte order.
        array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"]) if array.ndim else array
        if array.dtype.kind not in "biuf":
            raise ConfigurationError(
                f"(X, y): X is {array.dtype} {list(array.shape)}; numbers are needed. A table with words in it is read "
                "from a DataFrame or a CSV file, with label=..."
            )
        array = array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype != np.uint8 else array
        found = torch.from_numpy(array)
    if found.ndim == 0:
        raise ConfigurationError("(X, y): X is a single number; [N, ...] is needed.")
    if found.dtype == torch.uint8 and (found.ndim == 3 or (found.ndim == 4 and found.shape[3] in (1, 3))):
        return image_tensor(found)
    if found.is_floating_point():
        return found.float()
    return found if found.is_complex() else found.long()


def is_plain(value: Any) -> bool:
    """Whether it is a single number, a word or a truth value, or missing.

    Example:
        >>> is_plain("Lyon"), is_plain(torch.tensor(3)), is_plain([3.0])
        (True, True, False)
    """
    return value is None or isinstance(value, str | bool | int | float | np.generic) or getattr(value, "ndim", 1) == 0


class ColumnSamples(Dataset):
    """Rows as ``(input, target)``, read on access.

    Images become float32 ``[C, H, W]`` in 0 .. 1, of 1 channel if they are grey, else 3; arrays as
    :func:`array_set` has them. A target is a class if the column's are whole numbers or words.

    Args:
        frame: rows by number, columns by name.
        inputs: the column with the inputs.
        label: the column with the targets.

    Attributes:
        targets: int64 or float32 ``[N]``.
        classes: their names, if the data set or the targets themselves have names.

    Raises:
        ConfigurationError: targets that are missing or of several kinds; when it is read, an input that is no image or
            array.
    """

    def __init__(self, frame: Any, inputs: str, label: str) -> None:
        keys = column_keys(frame) or {}
        self.frame, self.inputs, self._key = frame, inputs, keys[inputs]
        values = column_values(frame, keys[label])
        missing = [row for row, value in enumerate(values) if value is None]
        if missing:
            raise ConfigurationError(
                f"{type(frame).__name__}: {len(missing)} of {len(values)} rows have no {label!r} (labels), such as row "
                f"{missing[0]}. Leave them out."
            )
        found = array_set(
            torch.zeros(len(values), 0), np.array([v.item() if hasattr(v, "item") else v for v in values])
        )
        self.targets = found.tensors[1]
        # ClassLabel's names: Hugging Face numbers the classes by their place among them.
        names: Any = getattr(frame.features.get(keys[label]), "names", None) or getattr(found, "classes", ())
        if names:
            self.classes = tuple(map(str, names))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row: Mapping[str, Any] = self.frame[int(index)]
        return self._tensor(row[self._key], index), self.targets[index]

    def _tensor(self, value: Any, index: int) -> Tensor:
        if isinstance(value, Image):
            if value.mode.startswith(("I", "F")):
                raise ConfigurationError(
                    f"{type(self.frame).__name__}, row {index}: {self.inputs!r} has more than 8 bits per pixel "
                    f"(Pillow's mode {value.mode}), whose scale is unknown. Save it with 8."
                )
            return to_tensor(
                value if value.mode in ("L", "RGB") else value.convert("L" if value.mode == "1" else "RGB")
            )
        try:
            array = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{type(self.frame).__name__}, row {index}: {self.inputs!r} is a {type(value).__name__}, which is no "
                f"image and no array of numbers ({error})."
            ) from error
        if array.dtype == torch.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))):
            return image_tensor(array[None])[0]
        return array.float() if array.is_floating_point() else array.long()
