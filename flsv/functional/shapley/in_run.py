"""In-run data Shapley: the effect of each training sample of a step on the validation loss.

Wang, Mittal, Song and Jia, "Data Shapley in One Training Run", ICLR 2025, arXiv 2406.11011. The players are the samples
of a step, and the utility of a subset S is by how much the validation loss falls in a step with these samples only,

    U(S) = L(w) - L(w - lr sum_{z in S} grad l_z),

in its Taylor expansion around w. With g and H, the gradient and the Hessian of L at w, its Shapley values are (to first
order: the first term)

    phi_z = lr g . grad l_z - lr^2/2 grad l_z^T H sum_j grad l_j.

Here l_z is a sample's part of the training loss: 1/B of its own loss in a mean over B samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.functional.shapley.gradient import gradient_shapley
from flsv.utilities.declared import checked


@checked
def step_weights(lrs: Sequence[float], momentum: float = 0.0) -> Tensor:
    """Compute by which factor each step's gradient has moved the model after the last step, in SGD with momentum.

    With the buffer b_s = momentum b_{s-1} + grad_s and steps w_{s+1} = w_s - lr_s b_s, the gradient of step t has moved
    the model by -f_t grad_t after the last step, f_t = sum_{s >= t} lr_s momentum^(s - t). The paper's step is f_t =
    lr_t, without momentum.

    Args:
        lrs: the learning rates of the T steps, in order.
        momentum: the optimizer's, without dampening and not Nesterov's.

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
    """Split the clients' values in a round into parts by the classes of their samples, and a rest.

    A client's own value is that of :func:`flsv.functional.gradient_shapley` with fixed weights, which depends on its
    update only. The samples' values attribute it to classes; the rest is what they do not explain.

    Args:
        class_values: ``[k, M]``, the sums over each class of the values of a client's samples, as if its update were
            the round's.
        gradient_products: ``[k]``, g . d_i, with d_i the clients' updates.
        aggregation_weights: ``[k]``, w_i.
        hessian_products: ``[k, k]``, d_i^T H d_j; None: first order.
        server_lr: eta.

    Returns:
        float64 ``[k, M + 1]``: the parts by class, and the rest; of second order ``[k, M + 2]``: and the curvature's
        part. A row sums to the client's value.

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
