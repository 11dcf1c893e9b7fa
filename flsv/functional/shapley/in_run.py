"""In-run data Shapley: the effect of each training sample of a step on the validation loss.

Wang, Mittal, Song and Jia, "Data Shapley in One Training Run", ICLR 2025, arXiv 2406.11011. The players are the samples
of a step, and the utility of a part S of them is how much lower the validation loss is after a step with only these,

    U(S) = L(w) - L(w - lr sum_{z in S} grad l_z),

in its Taylor expansion around w. Its Shapley values are, with g and H
the gradient and the Hessian of L at w (first order: the first term),

    phi_z = lr g . grad l_z - lr^2/2 grad l_z^T H sum_j grad l_j.

Here l_z is a sample's part of the loss that is trained on: of a mean over B samples, 1/B of its own loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.functional.shapley.gradient import gradient_shapley
from flsv.utilities.declared import checked


@checked
def step_weights(lrs: Sequence[float], momentum: float = 0.0) -> Tensor:
    """The factor by which the gradient of each step has moved the model by the end, in SGD with momentum.

    With the buffer b_s = momentum b_{s-1} + grad_s and steps w_{s+1} = w_s - lr_s b_s, the gradient of step t has moved
    the model by -f_t grad_t after the last step, f_t = sum_{s >= t} lr_s momentum^(s - t). The paper's step is f_t =
    lr_t, without momentum.

    Args:
        lrs: of the steps, in their order.
        momentum: of the optimizer, without dampening and not Nesterov's.

    Returns:
        float64 ``[T]``.

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
    """What clients are worth to a round, and the part of it that each class of their samples has.

    A client's own value is that of :func:`flsv.functional.gradient_shapley` with fixed weights: it
    follows from the update alone. The samples' values say where it comes from, and what they leave is the rest.

    Args:
        class_values: ``[k, M]``, the values of a client's samples, summed by class, as if its update were the round's.
        gradient_products: ``[k]``, g . d_i, with d_i the clients' updates.
        aggregation_weights: ``[k]``, w_i.
        hessian_products: ``[k, k]``, d_i^T H d_j; None: first order.
        server_lr: eta.

    Returns:
        float64 ``[k, M + 1]``: by class, and the rest; of the second order ``[k, M + 2]``: and the curvature. A row
        sums to the client's value.

    Raises:
        ValueError: shapes that do not fit.

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
