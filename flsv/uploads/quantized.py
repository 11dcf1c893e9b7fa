"""Quantized (QSGD): compression of an update to a few bits per entry.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn.functional import pad

from flsv.core import Traffic
from flsv.uploads.compression import Compression
from flsv.utilities.declared import Count


class Quantized(Compression):
    """Compression that encodes each entry p as a signed integer of ``bits`` bits, times the scale of the entry's
    bucket.

    The scale is the bucket's largest magnitude divided by L = 2^(bits-1) - 1, as in QSGD's experiments (its theory uses
    the Euclidean norm). The integer is floor(p / scale + u).

    Args:
        bits: the number of bits per entry, 2 to 8.
        bucket: number of consecutive entries that share a scale.
        stochastic: True: u is drawn uniformly from [0, 1), which is unbiased. False: u = 1/2, which rounds to the
            nearest integer.
        error_feedback: whether a client adds the part that it did not send to the update of its next round, see
            :class:`flsv.uploads.Compression`.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> coarse = Quantized(bits=3, bucket=2, stochastic=False)  # L = 3
        >>> coarse.compress(torch.tensor([3.0, 0.9, -6.0, 1.1]), torch.Generator())
        tensor([ 3.,  1., -6.,  2.])
        >>> coarse.size(entries=4, entry_bytes=4)
        Traffic(numbers=6, bytes=10.0)
    """

    def __init__(
        self,
        bits: Annotated[int, Ge(2), Le(8)] = 8,
        bucket: Count = 512,
        stochastic: bool = True,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(error_feedback)
        self.bits = bits
        self.bucket = bucket
        self.stochastic = stochastic

    def compress(self, update: Tensor, generator: torch.Generator) -> Tensor:
        entries, levels = len(update), 2 ** (self.bits - 1) - 1
        buckets = pad(update, (0, -entries % self.bucket)).view(-1, self.bucket)
        scale = buckets.abs().amax(1, keepdim=True) / levels
        steps = buckets / torch.where(scale == 0, 1, scale)
        if self.stochastic:
            steps += torch.rand(steps.shape, generator=generator, dtype=steps.dtype).to(steps.device)
        else:
            steps += 0.5
        return (steps.floor_().clamp_(-levels, levels) * scale).flatten()[:entries]

    def size(self, entries: int, entry_bytes: int) -> Traffic:
        scales = math.ceil(entries / self.bucket)
        return Traffic(entries + scales, float(math.ceil(entries * self.bits / 8) + scales * entry_bytes))
