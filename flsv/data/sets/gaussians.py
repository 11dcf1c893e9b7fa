"""Four Gaussian classes in the plane: the synthetic data of ShapFed's figure 3.

Tastan et al., "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024, figure 3. The paper shows the
picture only; the centres here are a choice, see ``CENTRES``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.data.sets.base import ImageData, tensor_set
from flsv.seeding import generator_for

#: Classes 0 and 1 lie on one axis, 2 and 3 on the other, each a little off it.
CENTRES = ((2.0, 0.2), (-2.0, -0.2), (0.2, 2.0), (-0.2, -2.0))
SPREAD = 0.8
TRAIN, TEST = 4000, 2000


def gaussians() -> ImageData:
    """4,000 training and 2,000 test points of four equally large classes, always the same ones.

    Items are ``(float32 [5], class)``: x, y, x^2, y^2, xy of a point.

    Example:
        >>> data = gaussians()
        >>> len(data.train), data.train[0][0].shape, data.num_classes
        (4000, torch.Size([5]), 4)
    """
    sets = [tensor_set(*_draw(size, split)) for size, split in ((TRAIN, "train"), (TEST, "test"))]
    return ImageData(sets[0], sets[1], None, 4, ("0", "1", "2", "3"))


def _draw(size: int, split: str) -> tuple[Tensor, Tensor]:
    labels = torch.arange(size) % 4
    noise = torch.randn(size, 2, generator=generator_for(0, "gaussians", split))
    x, y = (torch.tensor(CENTRES)[labels] + SPREAD * noise).unbind(1)
    return torch.stack([x, y, x * x, y * y, x * y], dim=1), labels
