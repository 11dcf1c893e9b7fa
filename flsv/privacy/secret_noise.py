"""Normal noise that follows from a secret key, and that nobody can predict without the key.

torch's generators are made for simulations, not for secrets. On the CPU a generator uses 32 bits of its seed, so that
an attacker can try all streams. An attacker who sees part of a stream, in entries in which the update is 0, can compute
the rest of it. Here SHAKE-256 (FIPS 202) of the key gives the bits, and the Box-Muller transform turns them into normal
numbers.

Sums of rounded numbers reveal more than sums of real numbers (Mironov, "On Significance of the Least Significant Bits
for Differential Privacy", CCS 2012). So noise of 53 bits is added in double precision, and only the sum is rounded.
"""

from __future__ import annotations

import math
from hashlib import shake_256

import torch
from torch import Tensor

#: Number of entries of a vector that get their noise at a time.
BLOCK = 2**18
_BITS = 53


def add_secret_noise(vector: Tensor, scale: float, key: bytes) -> None:
    """Add normal noise to ``vector``, in place; the noise is determined by ``key``.

    Args:
        vector: floating-point ``[P]``, on any device.
        scale: the noise's standard deviation.
        key: a secret of 32 bytes. Use it for this vector only, since the same key gives the same noise.

    Example:
        >>> vector = torch.zeros(100_000)
        >>> add_secret_noise(vector, 3.0, bytes(32))
        >>> round(vector.mean().item(), 1), round(vector.std().item(), 1)
        (0.0, 3.0)
    """
    for number, block in enumerate(vector.split(BLOCK)):
        noise = scale * _normal(len(block), key + number.to_bytes(8, "big"))
        block.copy_(block.to("cpu", torch.float64) + noise)


def _normal(count: int, key: bytes) -> Tensor:
    """Return independent standard normal numbers, float64 ``[count]``, that follow from a key."""
    pairs = (count + 1) // 2
    bits = torch.frombuffer(bytearray(shake_256(key).digest(16 * pairs)), dtype=torch.int64)
    uniform = ((bits & (2**_BITS - 1)).double() + 0.5) * 2.0**-_BITS  # in (0, 1]
    radius, angle = (-2 * uniform[:pairs].log()).sqrt(), 2 * math.pi * uniform[pairs:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
