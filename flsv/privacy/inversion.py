"""Gradient inversion: the image that a client trained on, from what it sent.

Zhu, Liu and Han, "Deep Leakage from Gradients" (DLG), NeurIPS 2019: search for the image whose gradient is the one
observed, by L-BFGS. The label is not searched for but read off the gradient: Zhao, Mopuri and Bilen, "iDLG: Improved
Deep Leakage from Gradients", arXiv 2001.02610, 2020. Gradients are compared by their angle, and images preferred that
are smooth: Geiping, Bauermeister, Dröge and Moeller, "Inverting Gradients: How easy is it to break privacy in federated
learning?", NeurIPS 2020, equation 4. Clipping, which is a change of length, therefore hides nothing from it.

The search starts from an empty image, where the papers start from noise: it finds the same image in fewer steps, and
needs no random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace


class Inversion(NamedTuple):
    """The attacker's result: the image ``[C, H, W]``, its label, and the distance 1 - cos of its gradient from the
    observed one, in [0, 2]."""

    image: Tensor
    label: int
    distance: float


def invert_gradient(
    module: nn.Module,
    gradient: Tensor,
    input_shape: Sequence[int],
    *,
    label: int | None = None,
    smoothness: float = 0.0,
    iterations: int = 150,
) -> Inversion:
    """Find the one image behind a gradient.

    Args:
        module: the model that the gradient was taken at; gives logits ``[1, M]``, is left as it is, and used in eval
            mode. It has to be twice differentiable to be of use: sigmoid or tanh, not ReLU.
        gradient: of the image's cross entropy, ``[P]`` in the order of :class:`flsv.ParameterSpace`, times any
            positive number. After one step of plain SGD: minus the client's update.
        input_shape: of one image, (C, H, W).
        label: the image's class, if the attacker knows it. By default the one whose logit the gradient would raise.
        smoothness: weight of the image's mean total variation against the distance of the gradients. A little of it,
            such as 0.01, makes up for noise in the gradient; without noise 0 is best.
        iterations: the most steps of L-BFGS.

    Returns:
        The image, the label and how well the image explains the gradient.

    Raises:
        ConfigurationError: a gradient of the wrong length, or one that is zero or not finite; a module without a
            classifier head where the label is to be read off.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3))
        >>> image = torch.tensor([[[0.1, 0.9], [0.5, 0.3]]])
        >>> loss = nn.functional.cross_entropy(net(image[None]), torch.tensor([2]))
        >>> gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
        >>> found = invert_gradient(net, gradient, (1, 2, 2))
        >>> found.label, bool(torch.allclose(found.image, image, atol=1e-3))
        (2, True)
    """
    check_number("invert_gradient", "smoothness", smoothness, least=0)
    check_number("invert_gradient", "iterations", iterations, least=1, whole=True)
    space = ParameterSpace(module)
    if gradient.shape not in ((space.num_parameters,), (space.size,)):
        raise ConfigurationError(
            f"the gradient has shape {list(gradient.shape)}, and the module has {space.num_parameters} parameters."
        )
    observed = gradient[: space.num_parameters].double()
    length = observed.norm()
    if not 0 < length < torch.inf:
        raise ConfigurationError("the gradient is zero or not finite: there is nothing to look for.")
    if label is None:
        if space.head is None:
            raise ConfigurationError("the module has no linear layer to read the label off: pass label=...")
        # Of one image's logits only the true class's has a negative gradient; a row is that times positive features.
        label = int(space.head.rows(gradient).sum(-1).argmin())
    network = copy.deepcopy(module).double().eval().requires_grad_(True)
    parameters = list(network.parameters())
    image = observed.new_zeros(1, *input_shape).requires_grad_()
    target = torch.tensor([label], device=image.device)

    def distance() -> Tensor:
        loss = nn.functional.cross_entropy(network(image), target)
        mine = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
        return 1 - torch.dot(mine, observed) / (mine.norm() * length)

    def objective() -> float:
        image.grad = None
        value = distance()
        if smoothness:
            value = value + smoothness * _total_variation(image)
        value.backward(inputs=[image])
        return value.item()

    torch.optim.LBFGS(
        [image],
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=50,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    ).step(objective)
    return Inversion(image.detach()[0].to(gradient.dtype), label, distance().item())


def _total_variation(image: Tensor) -> Tensor:
    """The mean absolute difference of neighbours, down and across."""
    return image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()
