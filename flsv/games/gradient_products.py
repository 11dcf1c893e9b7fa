"""Products of clients' updates with the gradient and the Hessian of the validation loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from flsv.core import ClientMatrix
from flsv.core.parameter_space import ParameterSpace
from flsv.games.validation_batches import Pair, checked_logits


class GradientProducts(NamedTuple):
    """Products of clients' updates with the validation loss's gradient and Hessian, float64.

    They are the input of :func:`flsv.functional.gradient_shapley`.

    Attributes:
        gradient: ``[k]``, the dot products g . d_i of the gradient g with the update d_i of each of k clients.
        hessian: ``[k, k]``, the products d_i^T H d_j with the Hessian H, symmetric. None if they were not requested.
    """

    gradient: Tensor
    hessian: Tensor | None


@torch.inference_mode(False)
def gradient_products(
    module: nn.Module,
    space: ParameterSpace,
    batches: Sequence[Pair],
    support: Tensor,
    vector: Tensor,
    updates: ClientMatrix,
) -> GradientProducts:
    """Compute g . d_i and d_i^T H d_j of the mean validation cross-entropy at the model ``vector``."""
    # BatchNorm's statistics are constants here, so the buffers' part of the updates is ignored. ReLU and max-pooling
    # have no curvature of their own: the Hessian is that of the network with its active units held fixed.
    cut = space.num_parameters
    gradient = torch.zeros(cut, dtype=torch.float64, device=vector.device)
    products = torch.zeros(len(updates), cut, dtype=vector.dtype, device=vector.device)
    for slope, parameters in _slopes(module, space, batches, support, vector, create_graph=True):
        gradient += slope.detach()
        for client, product in enumerate(products):
            # A clone: a tensor made in inference mode cannot be part of a graph.
            along = slope @ updates.update(client)[:cut].clone().to(slope.dtype)
            product += torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)[0]
    first = updates.dot(gradient)
    hessian = torch.stack([updates.dot(product) for product in products], dim=1)
    return GradientProducts(first.cpu(), (hessian + hessian.T).cpu() / 2)


@torch.inference_mode(False)
def loss_gradient(
    module: nn.Module,
    space: ParameterSpace,
    batches: Sequence[Pair],
    support: Tensor,
    vector: Tensor,
    balanced: bool = False,
) -> Tensor:
    """Compute the gradient ``[P']`` of the mean cross-entropy, or of the classes' mean if ``balanced``."""
    gradient = torch.zeros(space.num_parameters, dtype=torch.float64, device=vector.device)
    weights = None
    if balanced:
        counts = support.to(vector.device, vector.dtype)
        weights = counts.sum() / (counts > 0).sum() / counts.clamp(min=1)
    for slope, _ in _slopes(module, space, batches, support, vector, weights=weights):
        gradient += slope.detach()
    return gradient


def _slopes(
    module: nn.Module,
    space: ParameterSpace,
    batches: Sequence[Pair],
    support: Tensor,
    vector: Tensor,
    create_graph: bool = False,
    weights: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each batch's part ``[P']`` of the mean loss's gradient, and the parameters ``[P']`` that it depends on."""
    cut, device = space.num_parameters, vector.device
    dtypes = {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    trained = {name for name, _ in module.named_parameters()}
    samples = int(support.sum())
    # Attention's fused kernels cannot be differentiated twice.
    with (
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        parameters, buffers = vector.detach().clone().split([cut, space.size - cut])
        parameters.requires_grad_()
        for x, y in batches:
            state = space.unflatten(torch.cat([parameters, buffers]))
            # Only the parameters: batch_norm refuses statistics that want a gradient.
            state = {n: (t if n in trained else t.detach()).to(dtypes[n]) for n, t in state.items()}
            logits = functional_call(module, state, (x,))
            logits = checked_logits(logits, y, len(support)).to(vector.dtype)
            loss = F.cross_entropy(logits, y, weights, reduction="sum")
            (slope,) = torch.autograd.grad(loss / samples, parameters, create_graph=create_graph)
            yield slope, parameters
