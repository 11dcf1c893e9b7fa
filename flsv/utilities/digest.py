"""Hashes of nested values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(value: Any) -> bytes:
    """Compute the SHA-256 hash of numbers, texts and tensors, nested to any depth."""
    sha256 = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            sha256.update(f"tensor {part.dtype} {list(part.shape)}:".encode())
            entries = part.detach().cpu().contiguous().reshape(-1)
            entry_bytes = entries.view(torch.uint8)
            sha256.update(entry_bytes.numpy().data)
        elif isinstance(part, Mapping):
            sha256.update(f"mapping {len(part)}:".encode())
            for name in sorted(part, key=repr):
                add(name)
                add(part[name])
        elif isinstance(part, list | tuple):
            sha256.update(f"{type(part).__name__} {len(part)}:".encode())
            for entry in part:
                add(entry)
        else:
            text = repr(part).encode()
            sha256.update(f"{type(part).__name__} {len(text)}:".encode() + text)

    add(value)
    return sha256.digest()
