"""Gaussian noise on the inputs.

Sun et al., "ShapleyFL", KDD 2023, appendix B.3, "Malicious clients with data noise": D_m = D_h + N(0, I).

Guo et al. have a scenario with 0, 5, 10, 15 and 20 % of Gaussian noise by client and do not say of what. In the code of
GTG-Shapley (Liu et al. 2022), whose scenarios these are, it is the standard deviation of noise on every pixel;
``pixel_rate`` is there for the other reading. FedBary adds standard Gaussian noise to 5, 15 or 30 % of the samples
(``sample_rate``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flsv.data.corruption.base import Corruption, some
from flsv.errors import ConfigurationError


class GaussianNoise(Corruption):
    """Adds ``N(mean, std^2)`` to the inputs, drawn once: a sample is the same in every round.

    The unit is that of the inputs as the network sees them. The named data sets are normalised by their mean and
    deviation, so ``std=1`` is as strong as the images themselves. Nothing is clipped.

    Args:
        std: standard deviation, at least 0.
        mean: mean of the noise.
        sample_rate: share of each client's samples that get noise, to the nearest whole number of samples.
        pixel_rate: probability with which a pixel of such a sample gets noise, in all its channels.
        clients: whom it concerns, see :class:`~flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of the noise.

    Raises:
        ConfigurationError: arguments out of range; at the call, inputs that are not floating-point numbers.

    Example:
        >>> x, y = torch.zeros(1000, 1, 8, 8), torch.zeros(1000, dtype=torch.long)
        >>> noisy, _ = GaussianNoise(std=0.1)(x, y, num_classes=10, generator=torch.Generator().manual_seed(0))
        >>> round(float(noisy.std()), 3)
        0.1
    """

    needs_classes = False

    def __init__(
        self,
        std: float = 1.0,
        mean: float = 0.0,
        sample_rate: float = 1.0,
        pixel_rate: float = 1.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.std = std
        self.mean = mean
        self.sample_rate = sample_rate
        self.pixel_rate = pixel_rate
        self._check_rate("sample_rate")
        self._check_rate("pixel_rate")
        if not (math.isfinite(std) and std >= 0 and math.isfinite(mean)):
            raise ConfigurationError(f"{self!r}: std must be a finite number from 0 up, and mean finite.")

    def corrupt(self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if not x.is_floating_point():
            raise ConfigurationError(
                f"{self!r} adds to floating-point inputs, and these are {x.dtype}. Convert them in the data "
                f"set, not in train_transform, which comes after the noise."
            )
        noisy = some(len(x), self.sample_rate, generator)
        noise = torch.randn(len(noisy), *x.shape[1:], generator=generator) * self.std + self.mean
        if self.pixel_rate < 1:
            # The channels of an image [C, H, W] share their pixels; of anything else, every entry is for itself.
            shape = (len(noisy), 1, *x.shape[2:]) if x.ndim == 4 else noise.shape
            noise *= torch.rand(shape, generator=generator) < self.pixel_rate
        x[noisy] += noise.to(x.dtype)
        return x, y
