"""What crosses between processes: plain values and tensors, by name, and never code or pickled objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flsv.errors import ConfigurationError

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Packet:
    """One message.

    Args:
        kind: what it is about.
        plain: what JSON can say.
        tensors: by name; dense ones.

    Raises:
        ValueError: it is none, whatever was said to be one.
    """

    kind: str
    plain: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not isinstance(self.plain, Mapping):
            raise ValueError(
                f"a packet has a kind and named values, and this one {self.kind!r:.40}, {self.plain!r:.40}."
            )
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
                raise ValueError(f"{name!r:.40} is no dense tensor.")


def pack(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Numbers, words, tensors, random generators, and lists, tuples and dictionaries of them, as what JSON can say and
    tensors by name.

    Raises:
        ConfigurationError: something else is in it.

    Example:
        >>> import torch
        >>> plain, tensors = pack({"a": [1, torch.tensor(2.0)], "b": (None, "x")})
        >>> plain
        {'dict': [['a', {'list': [1, {'tensor': '0'}]}], ['b', {'tuple': [None, 'x']}]]}
        >>> unpack(plain, tensors)
        {'a': [1, tensor(2.)], 'b': (None, 'x')}
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, tensors), tensors


def unpack(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`pack`.

    Raises:
        ValueError, TypeError, RuntimeError: this is nothing that :func:`pack` makes.
    """
    if isinstance(plain, _PLAIN):
        return plain
    if isinstance(plain, Mapping) and len(plain) == 1:
        ((kind, content),) = plain.items()
        if kind == "tensor" and content in tensors:
            return tensors[content]
        if kind == "generator" and content in tensors:
            return torch.Generator().set_state(tensors[content])
        if kind in ("list", "tuple") and isinstance(content, Sequence):
            values = [unpack(part, tensors) for part in content]
            return values if kind == "list" else tuple(values)
        if kind == "dict" and isinstance(content, Sequence):
            return {key: unpack(part, tensors) for key, part in content}
    raise ValueError(f"{plain!r} is no packed value.")


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor | torch.Generator):
        name = str(len(tensors))
        tensors[name] = value.detach() if isinstance(value, Tensor) else value.get_state()
        return {"tensor" if isinstance(value, Tensor) else "generator": name}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {"dict": [[key, _pack(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {type(value).__name__: [_pack(part, tensors) for part in value]}
    raise ConfigurationError(
        f"{type(value).__name__} cannot cross between processes: only numbers, words, tensors, and lists, tuples and "
        "dictionaries of them can."
    )
