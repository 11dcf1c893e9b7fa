"""Noise of a site, drawn from a secret key by a cryptographic generator."""

from __future__ import annotations

import math
from hashlib import shake_256

import torch
from torch import Tensor

#: Number of elements of a vector to which noise is added at a time.
BLOCK_SIZE = 2**18
#: Bits of a double-precision number's mantissa.
_MANTISSA_BITS = 53


def add_secret_noise(
    vector: Tensor,
    scale: float,
    key: bytes,
) -> None:
    """Add normal noise of standard deviation ``scale`` to a vector, in place. The noise is derived from ``key``, which
    must be used only once.
    """
    # torch's generators use 32 bits of their seed on the CPU. An attacker could try all seeds, and compare the noise
    # with the sent numbers where the update is 0. So the bits come from SHAKE-256 (FIPS 202) of the key. Sums of
    # rounded numbers reveal more than sums of real numbers (Mironov, CCS 2012), so noise of 53 bits is added in double
    # precision, and only the sum is rounded.
    for number, block in enumerate(vector.split(BLOCK_SIZE)):
        block_key = key + number.to_bytes(8, "big")
        noise = scale * _normal(len(block), block_key)
        exact_sum = block.to("cpu", torch.float64) + noise
        block.copy_(exact_sum)


def _normal(count: int, key: bytes) -> Tensor:
    """Return independent standard normal numbers, float64 ``[count]``, that are determined by a secret key."""
    num_pairs = (count + 1) // 2
    random_bytes = shake_256(key).digest(16 * num_pairs)  # two words of 8 bytes for each pair
    words = torch.frombuffer(bytearray(random_bytes), dtype=torch.int64)
    num_values = 2**_MANTISSA_BITS
    low_bits = words & (num_values - 1)
    uniform = (low_bits.double() + 0.5) / num_values  # in (0, 1]

    # Box and Muller: two independent normal numbers from two uniform ones.
    for_radius, for_angle = uniform.tensor_split(2)
    radius = (-2 * for_radius.log()).sqrt()
    angle = 2 * math.pi * for_angle
    first_numbers = radius * angle.cos()
    second_numbers = radius * angle.sin()
    numbers = torch.cat([first_numbers, second_numbers])
    return numbers[:count]
