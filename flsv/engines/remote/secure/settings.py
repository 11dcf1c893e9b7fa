"""SecureSums: what a federation agrees on whose server sees sums only; and how numbers become whole ones and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from lightning_utilities.core.imports import RequirementCache
from numpy.typing import NDArray

from flsv.arguments import check_number
from flsv.errors import ConfigurationError

#: Of two, each knows the other's part of a sum.
LEAST = 3
#: As :attr:`Packet.tensors` carry them.
SIGNED = {32: np.int32, 64: np.int64}
Whole = NDArray[Any]


@dataclass(frozen=True)
class SecureSums:
    """The server sees sums over sites, and no site's update: the protocol of Bonawitz et al.,
    :mod:`flsv.engines.remote.secure.protocol`.

    An update is the step from the start point. Its entries are clipped to [-clip, clip], rounded to the nearest of
    2^bits - 1 steps, weighted by the site's samples, and summed modulo 2^64 (2^32 with up to 16 bits, half the bytes).
    No sum can overflow: a site refuses to take part if it has more samples than 2^(64 - bits), or 2^(32 - bits),
    divided by the number of sites.

    Args:
        threshold: how many sites of a round must be left at its end, at least 3 and more than half. Of the others, who
            went away, the sum is cleaned. None: 3, or two thirds of the sites and one more where that is more.
        clip: the largest step of an entry. What is cut off is counted, in a sum, and the server warns.
        bits: of a rounded entry.

    Raises:
        ConfigurationError: an argument out of range; ``cryptography`` is not installed.

    Example:
        >>> sums = SecureSums(clip=1.0, bits=16)
        >>> whole, cut = sums.to_whole(np.array([0.25, -7.0]), weight=3)
        >>> whole.tolist(), cut, (whole / sums.scale / 3).round(4).tolist()
        ([24576, -98301], 1, [0.25, -1.0])
        >>> [SecureSums().threshold_of(sites) for sites in (3, 4, 5, 10)]
        [3, 3, 4, 7]
    """

    threshold: int | None = None
    clip: float = 16.0
    bits: int = 32

    def __post_init__(self) -> None:
        if self.threshold is not None:
            hint = "Of a sum of two, each knows the other's update."
            check_number(self, "threshold", self.threshold, least=LEAST, whole=True, hint=hint)
        check_number(self, "clip", self.clip, above=0)
        check_number(self, "bits", self.bits, least=8, most=40, whole=True)
        if not (found := RequirementCache("cryptography>=42")):
            raise ConfigurationError(f"SecureSums needs a library: pip install 'flsv[secure]'. {found}")

    @classmethod
    def of(cls, secure: SecureSums | bool) -> SecureSums | None:
        """What a user says: True for the defaults, False for none.

        Raises:
            ConfigurationError: something else.
        """
        if not isinstance(secure, bool | cls):
            raise ConfigurationError(f"secure={secure!r}: expected True, False or SecureSums(...).")
        return (cls() if secure else None) if isinstance(secure, bool) else secure

    def threshold_of(self, sites: int) -> int:
        """How many of so many sites must be left.

        Raises:
            ConfigurationError: there are too few of them for any, or too many for :attr:`threshold`: a server could
                then ask one half for what hides a site's update, and the other half for the rest.
        """
        least = max(LEAST, 2 * sites // 3 + 1) if self.threshold is None else self.threshold
        if sites < least:
            raise ConfigurationError(f"secure sums of {sites} sites: expected {least} or more.")
        if 2 * least <= sites:
            raise ConfigurationError(
                f"SecureSums(threshold={least}) is not more than half of {sites} sites, which is where no server can "
                "ask two halves for different things. Raise it, or leave it out."
            )
        return least

    @property
    def ring(self) -> int:
        """Sums are modulo 2 to the power of it."""
        return 32 if self.bits <= 16 else 64

    @property
    def top(self) -> int:
        """The largest rounded entry."""
        return 2 ** (self.bits - 1) - 1

    @cached_property
    def scale(self) -> float:
        """Of an entry to its rounded one."""
        return self.top / self.clip

    def most_weight(self, sites: int) -> int:
        """What a site of so many can weigh: the sum of all is then below half of the ring."""
        return 2 ** (self.ring - self.bits) // sites

    def to_whole(self, values: NDArray[Any], weight: int, clip: float | None = None) -> tuple[NDArray[np.int64], int]:
        """Weighted whole numbers, and how many values were clipped.

        Args:
            values: finite ones.
            weight: of the site.
            clip: another one, for another kind of number.
        """
        most = self.clip if clip is None else clip
        values = np.asarray(values, dtype=np.float64)
        cut = int((np.abs(values) > most).sum())
        rounded = np.rint(values.clip(-most, most) * (self.top / most)).astype(np.int64)
        return rounded * weight, cut

    def in_ring(self, whole: NDArray[np.int64]) -> Whole:
        """Whole numbers modulo 2^ring, without a sign."""
        return whole.astype(f"u{self.ring // 8}")

    def signed(self, ring: Whole) -> Whole:
        """The same bits, with a sign."""
        return ring.view(SIGNED[self.ring])
