"""Samples that the tests of transport share."""

import ot
import torch
from torch import Tensor

from helpers import make_generator


def make_blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = make_generator(seed)
    y = torch.randint(4, (count,), generator=generator)
    centers = 2 * torch.randn(4, 8, generator=make_generator(9))
    return torch.randn(
        count,
        8,
        generator=generator,
    ) + centers[y], y


def make_labeled(
    seed: int,
    m: int = 40,
    d: int = 3,
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = make_generator(seed)
    x = torch.randn(
        m,
        d,
        generator=generator,
        dtype=torch.float64,
    )
    classes = torch.tensor([0, 2, 5])
    y = classes[torch.randint(3, (m,), generator=generator)]
    return x + y[:, None], y


def wasserstein_distance(
    x: Tensor,
    x2: Tensor,
    p: float = 2,
) -> Tensor:
    """POT's distance of two sets of equally weighted samples."""
    steps = x.double()[:, None] - x2.double()
    costs = steps.norm(dim=-1) ** p
    cost = ot.emd2([], [], costs.numpy())
    return x.new_tensor(cost ** (1 / p))
