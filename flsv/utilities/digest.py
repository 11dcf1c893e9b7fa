"""Hashes of nested values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(value: Any) -> bytes:
    """Compute the SHA-256 hash of numbers, texts and tensors, nested to any depth."""
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            total.update(f"tensor {part.dtype} {list(part.shape)}:".encode())
            entries = part.detach().cpu().contiguous()
            total.update(entries.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(part, Mapping):
            total.update(f"mapping {len(part)}:".encode())
            for name in sorted(part, key=repr):
                add(name)
                add(part[name])
        elif isinstance(part, list | tuple):
            total.update(f"{type(part).__name__} {len(part)}:".encode())
            for entry in part:
                add(entry)
        else:
            text = repr(part).encode()
            total.update(f"{type(part).__name__} {len(text)}:".encode() + text)

    add(value)
    return total.digest()
