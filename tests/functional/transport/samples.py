"""Samples that the tests of transport share."""

import ot
import torch

from helpers import make_generator


def make_blobs(count, seed):
    generator = make_generator(seed)
    y = torch.randint(4, (count,), generator=generator)
    centers = 2 * torch.randn(4, 8, generator=make_generator(9))
    noise = torch.randn(count, 8, generator=generator)
    return centers[y] + noise, y


def make_labeled(seed, m=40, d=3):
    generator = make_generator(seed)
    x = torch.randn(
        m,
        d,
        generator=generator,
        dtype=torch.float64,
    )
    classes = torch.tensor([0, 2, 5])
    y = classes[
        torch.randint(
            3,
            (m,),
            generator=generator,
        )
    ]
    return x + y[:, None], y


def wasserstein_distance(x, x2, p=2):
    """POT's distance of two sets of equally weighted samples."""
    steps = x.double()[:, None] - x2.double()
    costs = steps.norm(dim=-1) ** p
    cost = ot.emd2([], [], costs.numpy())
    return x.new_tensor(cost ** (1 / p))
