"""In-run data Shapley: the effect of each sample of a training step on the validation loss.

Wang, Mittal, Song and Jia, "Data Shapley in One Training Run", ICLR 2025, arXiv 2406.11011. The players are the samples
z of a step with learning rate lr from the weights w. The utility of a subset S of the samples is the decrease of the
validation loss L in a step with these samples only,

    U(S) = L(w) - L(w - lr sum_{z in S} grad l_z),

expanded around w. l_z is the part of sample z in the training loss: 1/B of its own loss in a mean over B samples. With
g and H the gradient and the Hessian of L at w, the Shapley value of sample z is

    phi_z = lr g . grad l_z - lr^2/2 grad l_z^T H sum_j grad l_j.

A first-order expansion has the first term only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.functional.shapley.gradient import gradient_shapley
from flsv.utilities.declared import checked


@checked
def step_weights(lrs: Sequence[float], momentum: float = 0.0) -> Tensor:
    """Compute the factor f_t with which the gradient of each step t enters the final model, in SGD with momentum.

    With the momentum buffer b_s = momentum b_{s-1} + grad_s and the steps w_{s+1} = w_s - lr_s b_s of the weights w,
    grad_t changes the final weights by -f_t grad_t, where f_t = sum_{s >= t} lr_s momentum^(s - t). The paper has no
    momentum: f_t = lr_t.

    Args:
        lrs: the learning rates of the T steps, in order.
        momentum: the optimizer's momentum, without dampening and not Nesterov's.

    Returns:
        float64 ``[T]``, the factors f_t.

    Example:
        >>> step_weights([1.0, 1.0, 1.0], momentum=0.5)
        tensor([1.7500, 1.5000, 1.0000], dtype=torch.float64)
    """
    weights = torch.zeros(len(lrs), dtype=torch.float64)
    later = 0.0
    for t in reversed(range(len(lrs))):
        later = lrs[t] + momentum * later
        weights[t] = later
    return weights


def client_in_run_values(
    class_values: Tensor,
    gradient_products: Tensor,
    aggregation_weights: Tensor,
    hessian_products: Tensor | None = None,
    server_lr: float = 1.0,
) -> Tensor:
    """Split each client's value in a round into a part for each class of its samples, and a rest.

    The value to split is that of :func:`flsv.functional.gradient_shapley` with fixed weights, which is computed from
    the updates alone. The part for a class is the sum of the in-run values of the client's samples of this class; the
    rest is the client's value minus all these parts.

    Args:
        class_values: ``[k, M]``, for each of k clients and M classes the sum of the in-run values of the client's
            samples of this class, in a round in which the client's update would be the only one, with weight 1.
        gradient_products: ``[k]``, the scalar products of the validation loss's gradient with the clients' updates d_i.
        aggregation_weights: ``[k]``, the updates' weights in the aggregate.
        hessian_products: ``[k, k]``, d_i^T H d_j with H the validation loss's Hessian; None: values of first order.
        server_lr: the factor by which the server multiplies the aggregated update.

    Returns:
        float64 ``[k, M + 1]``: the M parts by class, and the rest. With ``hessian_products`` float64 ``[k, M + 2]``,
        with the second-order part of the value as the last column. A row sums to the client's value.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> classes, weights = torch.tensor([[0.75, 0.5], [0.5, 0.0]]), torch.tensor([0.5, 0.5])
        >>> client_in_run_values(classes, torch.tensor([-1.25, -0.25]), weights)
        tensor([[ 0.3750,  0.2500,  0.0000],
                [ 0.2500,  0.0000, -0.1250]], dtype=torch.float64)
    """
    if class_values.ndim != 2 or len(class_values) != len(gradient_products):
        raise ValueError(f"class_values {list(class_values.shape)}: expected [{len(gradient_products)}, M].")
    weights = aggregation_weights.double()
    products, parts = gradient_products.to(weights), class_values.to(weights)
    value = gradient_shapley(products, weighting=weights, server_lr=server_lr)
    parts = server_lr * weights[:, None] * parts
    columns = [parts, (value - parts.sum(1))[:, None]]
    if hessian_products is not None:
        second = gradient_shapley(products, hessian_products.to(weights), weighting=weights, server_lr=server_lr)
        columns.append((second - value)[:, None])
    return torch.cat(columns, dim=1)
