"""Leave-one-out values of samples: what a model's validation loss gains from each of them.

The model is a ridge regression to one-hot classes, because leaving a sample out of it needs no training: with A = X'X +
r I and leverage h = x' A^-1 x, the weights without the sample are W - A^-1 x (y - x'W) / (1 - h) (Sherman and
Morrison). The paper does not say which model its leave-one-out baseline trains.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leave_one_out(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, ridge: float = 1.0) -> Tensor:
    """Validation loss with all samples less the loss without each, by the sum of squared errors.

    Args:
        x: ``[m, d]`` training samples.
        y: ``[m]`` their integer classes.
        x2: ``[m2, d]`` validation samples.
        y2: ``[m2]`` their classes.
        ridge: r, in parts of the mean squared norm of the centered training samples, above 0.

    Returns:
        ``[m]`` float64; positive means that the sample does harm.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]])
        >>> leave_one_out(x, torch.tensor([0, 0, 1, 1, 1]), x[:4], torch.tensor([0, 0, 1, 1])).argmax()  # mislabeled
        tensor(4)
    """
    classes = int(max(y.max(), y2.max())) + 1
    targets, wanted = (torch.nn.functional.one_hot(labels, classes).double() for labels in (y, y2))
    center = x.double().mean(0)
    # The constant is as long as a sample, so that it is penalized like the rest.
    constant = float((x.double() - center).square().sum(1).mean().sqrt())
    points, others = (torch.nn.functional.pad(samples.double() - center, (0, 1), value=constant) for samples in (x, x2))
    gram = points @ points.T
    regular = gram + ridge * float(gram.diagonal().mean()) * torch.eye(len(x), dtype=gram.dtype)
    # In the space of the samples, not of the features: A^-1 X' = X' (X X' + r I)^-1.
    inverse = torch.linalg.inv(regular)
    errors = targets - gram @ (inverse @ targets)
    leverage = (gram * inverse).sum(1)
    moved = (others @ points.T) @ inverse  # [m2, m]: predictions for a unit error of each sample
    steps = errors / (1 - leverage)[:, None]
    missed = others @ points.T @ (inverse @ targets) - wanted
    # |missed - moved_i steps_i'|^2 - |missed|^2 is what leaving sample i out adds.
    added = -2 * ((missed.T @ moved).T * steps).sum(1) + moved.square().sum(0) * steps.square().sum(1)
    return -added
