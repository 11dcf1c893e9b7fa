"""Noise in some clients' training data: Gaussian noise on inputs, closed-set and open-set label noise.

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, appendix B.3.

Data noise: malicious clients' data D_m are the honest data D_h plus Gaussian noise, D_m = D_h + N(0, I). In a scenario
of Guo et al., the clients have 0, 5, 10, 15 and 20 % of Gaussian noise. The paper does not define this percentage. In
the code of GTG-Shapley (Liu et al. 2022), from which the scenario comes, it is the standard deviation of the noise on
every pixel (``std``). It could also be the share of noisy pixels (``pixel_rate``). FedBary adds standard Gaussian noise
to 5, 15 or 30 % of the samples (``sample_rate``).

Closed-set label noise: the label of each training sample of a malicious client is flipped from L to (L + 1) mod C,
where C is the number of classes. FedBary's "noisy labels" flip only a share of each client's samples (0, 5, 10, 15 and
20 %).

Open-set label noise, "irrelevant data", after Nagalapatti and Narayanam (S-FedAvg, AAAI 2021) and Wang et al. (CVPR
2018): labels of known categories are assigned to data of unknown categories, to half of the training images. As in the
authors' code, the unknown categories are classes of the data set itself: five of ten are half of the images.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.data.corruption import Corruption, draw_share
from flsv.utilities.declared import NonNegative, Share
from flsv.utilities.errors import ConfigurationError


class GaussianNoise(Corruption):
    """Gaussian noise ``N(0, std^2)`` on the inputs, drawn once and the same in every round.

    ``std`` is in the unit of the network's inputs: torchvision's images have a standard deviation of 1, 8-bit images of
    an ``.npz`` file lie in -1 .. 1, digits in 0 .. 1. Noisy inputs are not clipped to these ranges.

    Args:
        std: standard deviation of the noise, at least 0.
        sample_rate: share of each client's samples that get noise, rounded to a whole number of samples.
        pixel_rate: probability with which a pixel of a noisy sample gets noise, in all its channels.
        clients: numbers of the clients whose data are changed, see :class:`~flsv.data.ClientChoice`.
        fraction: share of the clients whose data are changed, in place of ``clients``.
        seed: seed of the choice of clients and of the noise.

    Raises:
        ConfigurationError: at construction: an argument is out of range. At the call: the inputs are not floating-point
            numbers.

    Example:
        >>> x, y = torch.zeros(1000, 1, 8, 8), torch.zeros(1000, dtype=torch.long)
        >>> noisy, _ = GaussianNoise(std=0.1)(x, y, num_classes=10, generator=torch.Generator().manual_seed(0))
        >>> round(float(noisy.std()), 3)
        0.1
    """

    needs_classes = False

    def __init__(
        self,
        std: NonNegative = 1.0,
        sample_rate: Share = 1.0,
        pixel_rate: Share = 1.0,
        clients: list[int] | None = None,
        fraction: Share | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.std = std
        self.sample_rate = sample_rate
        self.pixel_rate = pixel_rate

    def corrupt(
        self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if not x.is_floating_point():
            raise ConfigurationError(
                f"{self!r} needs floating-point inputs, but these are {x.dtype}."
            )
        noisy_rows = draw_share(len(x), self.sample_rate, generator)
        noise_shape = [len(noisy_rows), *x.shape[1:]]
        noise = torch.randn(noise_shape, generator=generator) * self.std
        if self.pixel_rate < 1:
            mask_shape = list(noise_shape)
            if x.ndim == 4:
                # In images [N, C, H, W], the channels share their noisy pixels.
                mask_shape[1] = 1
            is_noisy_pixel = torch.rand(mask_shape, generator=generator) < self.pixel_rate
            noise *= is_noisy_pixel
        x[noisy_rows] += noise.to(x.dtype)
        return x, y


class ClosedSetLabelNoise(Corruption):
    """Label noise that flips labels to other classes of the task.

    With ``C`` classes, label ``y`` becomes ``(y + 1) mod C`` or a random other class.
    :meth:`flsv.data.FederatedDataModule.corrupted_samples` returns which samples were flipped.

    Args:
        rate: share of each client's samples whose label is flipped, rounded to a whole number of samples.
        to: ``"next"``: the next class, as in ShapleyFL. ``"random"``: any other class with equal probability.
        clients: numbers of the clients whose data are changed, see :class:`~flsv.data.ClientChoice`.
        fraction: share of the clients whose data are changed, in place of ``clients``.
        seed: seed of the choice of clients and of the flips.

    Raises:
        ConfigurationError: at construction: ``rate`` lies outside [0, 1], or ``to`` is unknown. At the call: there are
            fewer than 2 classes.

    Example:
        >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 2])
        >>> ClosedSetLabelNoise()(x, y, num_classes=3, generator=torch.Generator())[1]
        tensor([1, 2, 0, 0])
    """

    def __init__(
        self,
        rate: Share = 1.0,
        to: Literal["next", "random"] = "next",
        clients: list[int] | None = None,
        fraction: Share | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.rate = rate
        self.to = to

    def corrupt(
        self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if num_classes < 2:
            raise ConfigurationError(
                f"{self!r} needs at least 2 classes, but the data have {num_classes}."
            )
        flipped_rows = draw_share(len(y), self.rate, generator)
        true_labels = y[flipped_rows]
        if self.to == "random":
            # An offset of 1 to num_classes - 1 leads to each of the other classes.
            offsets = torch.randint(1, num_classes, flipped_rows.shape, generator=generator)
        else:
            offsets = torch.ones_like(true_labels)
        y[flipped_rows] = (true_labels + offsets) % num_classes
        return x, y


class OpenSetLabelNoise(Corruption):
    """Label noise in which chosen clients train on images of unknown classes under known labels.

    Unknown classes are not part of the task, so their samples are removed from all other clients and from all
    validation and test sets. ``num_classes`` stays unchanged. At the chosen clients, an image of an unknown class gets
    the label of the next known class, cyclically. In the authors' code, images of an even class get the next odd class.

    Args:
        unknown_classes: the classes that are not part of the task. At least one known class must be left.
        clients: numbers of the clients whose data are changed, see :class:`~flsv.data.ClientChoice`. By default all
            clients, as in the paper's code.
        fraction: share of the clients whose data are changed, in place of ``clients``.
        seed: seed of the choice of clients.

    Raises:
        ConfigurationError: at construction: ``unknown_classes`` is empty. At the call: no known class is left, or an
            unknown class does not exist.

    Example:
        >>> x, y = torch.zeros(5, 2), torch.tensor([0, 1, 2, 3, 2])
        >>> OpenSetLabelNoise([0, 2])(x, y, num_classes=4, generator=torch.Generator())[1]
        tensor([1, 1, 3, 3, 3])
    """

    def __init__(
        self,
        unknown_classes: list[Annotated[int, Ge(0)]],
        clients: list[int] | None = None,
        fraction: Share | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.unknown_classes = sorted({*unknown_classes})

    def corrupt(
        self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        unknown_classes = torch.tensor(self.unknown_classes)  # sorted
        all_classes = torch.arange(num_classes)
        known_classes = all_classes[~torch.isin(all_classes, unknown_classes)]
        if unknown_classes[-1] >= num_classes or len(known_classes) == 0:
            raise ConfigurationError(
                f"{self!r}: expected classes in 0 .. {num_classes - 1}, of which at least one is not unknown."
            )
        unknown_rows = torch.isin(y, unknown_classes).nonzero().flatten()
        # The next larger known class, and the first one after the last.
        positions = torch.searchsorted(known_classes, y[unknown_rows]) % len(known_classes)
        y[unknown_rows] = known_classes[positions]
        return x, y
