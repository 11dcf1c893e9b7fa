"""Plain values: numbers, text, tensors, arrays and collections of them, which can be copied, compared and hashed."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from copy import copy
from enum import Enum
from itertools import compress
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Types of values that nothing can change.
CONSTANT_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    Enum,
    np.generic,
    torch.dtype,
    torch.device,
)
_CONSTANTS = frozenset(CONSTANT_TYPES)
#: Types of collections other than dictionaries.
COLLECTION_TYPES = (list, tuple, set, frozenset, deque)

#: Largest number of entries of what may be a state of a data module. More are data.
MAX_ENTRIES = 10_000

#: Constants that are saved as they are.
_SAVED_AS_THEY_ARE = (bool, int, float, complex, str, type(None))
#: Key that tells which type :func:`packed` has converted.
_KIND_KEY = "flsv_kind"


_TENSOR_TYPES = {float: torch.float64, int: torch.int64}


def to_three_digits(value: Any) -> Any:
    """Round a number, or the numbers of a tensor, to three significant digits, whole ones towards zero.

    Example:
        >>> to_three_digits(0.123456), to_three_digits(torch.tensor([0, 87, 12_345]))
        (0.123, tensor([    0,    87, 12300]))
    """
    if type(value) in (float, int):
        number = torch.tensor(value, dtype=_TENSOR_TYPES[type(value)])
        return to_three_digits(number).item()
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return value
    if value.is_floating_point():
        rounded_numbers = [float(f"{number:.3g}") for number in value.flatten().tolist()]
        return value.new_tensor(rounded_numbers).view(value.shape)
    magnitude = value.abs()
    step = torch.ones_like(value)  # 1, 10, 100, ...: that of the third digit
    smallest = 1000  # of the numbers with one digit too many
    while bool((magnitude >= smallest).any()):
        step[magnitude >= smallest] = smallest // 100
        smallest *= 10
    return value - value.fmod(step)


def is_plain(value: Any) -> bool:
    """Return whether a value is a constant, a dense tensor, an array or a collection of plain values.

    Parameters, and other leaves that require a gradient, are not plain: a copy is another one."""
    if type(value) in _CONSTANTS:  # mostly, and fast. Subclasses follow at the end
        return True
    if isinstance(value, Tensor):
        is_parameter = isinstance(value, nn.Parameter)
        is_trained = value.requires_grad and value.is_leaf
        return is_dense(value) and not is_parameter and not is_trained
    if isinstance(value, np.ndarray):
        return value.dtype != object

    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, COLLECTION_TYPES):
        return all(map(is_plain, [entry for entry in value if type(entry) not in _CONSTANTS]))
    return isinstance(value, CONSTANT_TYPES)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has a number for each entry, unlike sparse, nested, quantized and meta tensors."""
    has_entries = tensor.layout == torch.strided and not tensor.is_meta
    return has_entries and not tensor.is_nested and not tensor.is_quantized


#: The number of entries that stands for any number above the limit.
_MANY_ENTRIES = MAX_ENTRIES + 1


def is_large(value: Any) -> bool:
    """Return whether a value has many entries, as data have: a tensor, an array, a collection, any object of a length.

    Example:
        >>> is_large({"level": 3, "names": ["a"]}), is_large([torch.zeros(200, 200)])
        (False, True)
    """
    return _num_entries(value) > MAX_ENTRIES


def _num_entries(value: Any) -> int:
    if isinstance(value, CONSTANT_TYPES):
        return 1
    if isinstance(value, Tensor) and not is_dense(value):
        return _MANY_ENTRIES
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, COLLECTION_TYPES) and len(value) <= MAX_ENTRIES:
        return sum(map(_num_entries, value))
    try:
        return len(value)
    except Exception:  # it has no length, or its own code raises
        return 1


def has_floats(value: Any) -> bool:
    """Return whether a dense tensor, an array or a number is of a floating-point or complex type."""
    if isinstance(value, Tensor):
        is_floating = value.is_floating_point() or value.is_complex()
        return is_floating and is_dense(value)
    return np.issubdtype(np.asarray(value).dtype, np.inexact)


def copied(value: Any) -> Any:
    """Copy a plain value, down to its tensors. The keys of a dictionary are not copied."""
    if isinstance(value, CONSTANT_TYPES):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if is_dense(value) else value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        result = copy(value)
        for key, entry in value.items():
            if type(entry) not in _CONSTANTS:
                result[key] = copied(entry)
        return result

    entries = value
    has_constants_only = _CONSTANTS.issuperset(map(type, value))
    if not has_constants_only:
        entries = map(copied, value)
    if isinstance(value, deque):
        return deque(entries, maxlen=value.maxlen)
    is_named_tuple = hasattr(value, "_fields")
    if is_named_tuple:
        return type(value)(*entries)
    return type(value)(entries)


def are_equal(value: Any, other_value: Any) -> bool:
    """Return whether two plain values are equal, of one type, shape and order. NaN equals NaN."""
    if value is other_value:
        return True
    if type(value) is not type(other_value):
        return False
    if isinstance(value, Tensor):
        return _are_equal_tensors(value, other_value)
    if isinstance(value, np.ndarray):
        return _are_equal_arrays(value, other_value)
    if isinstance(value, dict):
        if value.keys() != other_value.keys():
            return False
        return _are_all_equal(list(value.values()), [other_value[key] for key in value])
    if isinstance(value, list | tuple | deque):
        if len(value) != len(other_value):
            return False
        return _are_all_equal(value, other_value)
    is_nan = value != value
    if is_nan:
        return bool(other_value != other_value)
    return bool(value == other_value)


def _are_all_equal(values: Any, other_values: Any) -> bool:
    are_others = list(map(is_not, values, other_values))  # few, and all calls below take longer
    return all(map(are_equal, compress(values, are_others), compress(other_values, are_others)))


def _are_equal_arrays(array: np.ndarray, other_array: np.ndarray) -> bool:
    if array.shape != other_array.shape:
        return False
    if array.dtype != other_array.dtype:
        return False
    return array.tobytes() == other_array.tobytes()


def _are_equal_tensors(tensor: Tensor, other_tensor: Tensor) -> bool:
    if _is_sparse(tensor) and _is_sparse(other_tensor):
        has_same_shape = tensor.shape == other_tensor.shape
        return has_same_shape and _are_all_equal(_entries_of(tensor), _entries_of(other_tensor))
    if not is_dense(tensor) or not is_dense(other_tensor):
        return False
    if tensor.shape != other_tensor.shape:
        return False
    if tensor.dtype != other_tensor.dtype:
        return False
    other_tensor = other_tensor.to(tensor.device)
    are_nan = (tensor != tensor) & (other_tensor != other_tensor)
    return bool(((tensor == other_tensor) | are_nan).all())


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.is_sparse or tensor.is_sparse_csr


def _entries_of(tensor: Tensor) -> list[Tensor]:
    """Return the places and the numbers of a sparse tensor's entries."""
    coalesced = tensor.to_sparse().coalesce()
    return [coalesced.indices(), coalesced.values()]


def packed(value: Any) -> Any:
    """Convert a plain value to types that ``torch.load(weights_only=True)`` reads.

    Raises:
        TypeError: the value holds another type.
    """
    kind = type(value)
    if kind in _SAVED_AS_THEY_ARE or isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return {_KIND_KEY: kind.__name__, "value": torch.from_numpy(np.array(value))}
    if kind is deque:
        entries = [packed(entry) for entry in value]
        return {_KIND_KEY: "deque", "value": entries, "maxlen": value.maxlen}
    if kind is dict:
        return {packed(key): packed(entry) for key, entry in value.items()}
    if kind in (list, tuple, set):
        return kind(map(packed, value))
    raise TypeError(f"{kind.__name__} is not saved")


def unpacked(value: Any) -> Any:
    """Convert a value back that :func:`packed` has returned."""
    if isinstance(value, list | tuple | set):
        return type(value)(map(unpacked, value))
    if not isinstance(value, dict):
        return value
    match value.get(_KIND_KEY):
        case None:
            return {key: unpacked(entry) for key, entry in value.items()}
        case "deque":
            return deque(unpacked(value["value"]), maxlen=value["maxlen"])
        case "ndarray":
            return value["value"].cpu().numpy()
        case _:  # a scalar of NumPy, which [()] takes out of an array without dimensions
            return value["value"].cpu().numpy()[()]


def digest(value: Any) -> bytes:
    """Compute the SHA-256 hash of numbers, texts and tensors, nested to any depth."""
    sha256 = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            sha256.update(f"tensor {part.dtype} {list(part.shape)}:".encode())
            sha256.update(_bytes_of(part).numpy().data)
        elif isinstance(part, Mapping):
            sha256.update(f"mapping {len(part)}:".encode())
            for name in sorted(part, key=repr):
                add(name)
                add(part[name])
        elif isinstance(part, list | tuple):
            sha256.update(f"{type(part).__name__} {len(part)}:".encode())
            for entry in part:
                add(entry)
        elif isinstance(part, np.ndarray):  # a long one's text leaves out entries
            add([part.dtype.str, part.shape, part.tobytes()])
        else:
            text = repr(part).encode()
            sha256.update(f"{type(part).__name__} {len(text)}:".encode() + text)

    add(value)
    return sha256.digest()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's entries as bytes, on the host."""
    entries = tensor.detach().cpu().reshape(-1)
    # A copy, since torch does not view every tensor as bytes: it refuses a single entry with a stride above 1.
    dense_entries = torch.empty(len(entries), dtype=entries.dtype)
    dense_entries.copy_(entries)
    return dense_entries.view(torch.uint8)
