"""Samples out of two columns of a Hugging Face data set: an image or an array, and what is to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_tensor

from flsv.data.parts.arrays import array_set
from flsv.data.parts.frames import column_keys, column_values
from flsv.data.sets.base import image_tensor
from flsv.errors import ConfigurationError


def is_plain(value: Any) -> bool:
    """Whether it is a single number, a word or a truth value, or missing.

    Example:
        >>> is_plain("Lyon"), is_plain(torch.tensor(3)), is_plain([3.0])
        (True, True, False)
    """
    return value is None or isinstance(value, str | bool | int | float | np.generic) or getattr(value, "ndim", 1) == 0


class ColumnSamples(Dataset):
    """Rows as ``(input, target)``, read when they are needed.

    Images become float32 ``[C, H, W]`` in 0 .. 1, of 1 channel if they are grey, else 3; arrays as
    :func:`~flsv.data.parts.arrays.array_set` has them. A target is a class if the column's are whole numbers or words.

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
                f"{type(frame).__name__}: {len(missing)} of {len(values)} rows have no {label!r} (label), such as row "
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
