"""Exact Shapley values of the first-order expansion of the validation loss, for clients and for single samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from flsv.utilities.declared import checked


@checked
def gradient_shapley(
    gradient_products: Tensor,
    *,
    weighting: Annotated[
        Literal["uniform"] | Tensor, "Weights by samples have no closed form."
    ] = "uniform",
    server_lr: float = 1.0,
) -> Tensor:
    """Compute exact Shapley values of the validation loss's first-order expansion.

    The game is U(S) = -L(x + eta sum_{i in S} w_i(S) d_i), with L the validation loss, x the round's global model, d_i
    the clients' updates, w_i(S) their weights in a coalition S, and eta = ``server_lr``. With a_i = g . d_i and g the
    gradient of L at x, its expansion is

        v(S) = U(S) - U(empty) = -eta sum_{i in S} w_i(S) a_i.

    Args:
        gradient_products: ``[k]``, the products a_i.
        weighting: ``"uniform"``: w_i(S) = 1/|S|, or a tensor ``[k]`` of fixed weights, the same in every coalition.
            For weights by samples, renormalized in a coalition, there is no closed form.
        server_lr: eta, the factor by which the server multiplies the aggregated update.

    Returns:
        The k clients' values, ``[k]``, in the unit of the loss (nats for the cross-entropy), positive for a client that
        lowers the loss. They sum to v of all clients, which is the decrease of the loss up to terms of higher order.

    Raises:
        ConfigurationError: ``weighting`` is unknown.
        ValueError: the shapes do not fit.

    Example:
        >>> slopes = torch.tensor([-1.0, 0.0, 0.5])
        >>> gradient_shapley(slopes, weighting=torch.tensor([0.5, 0.25, 0.25]))
        tensor([ 0.5000, -0.0000, -0.1250])
        >>> gradient_shapley(slopes)
        tensor([ 0.6806, -0.0694, -0.4444])
    """
    num_clients = len(gradient_products)
    if gradient_products.shape != (num_clients,) or num_clients == 0:
        raise ValueError(
            f"expected gradient_products [k], but got shape {list(gradient_products.shape)}."
        )
    slopes = server_lr * gradient_products.double()
    if isinstance(weighting, Tensor):
        values = _values_by_fixed_weights(slopes, weighting)
    else:
        values = _values_by_equal_weights(slopes)
    return values.to(gradient_products.dtype)


def _values_by_fixed_weights(slopes: Tensor, weights: Tensor) -> Tensor:
    if weights.shape != slopes.shape:
        raise ValueError(
            f"expected fixed weights [{len(slopes)}], but got shape {list(weights.shape)}."
        )
    return -(weights.to(slopes) * slopes)


def _values_by_equal_weights(slopes: Tensor) -> Tensor:
    # With weights 1/|S| a client's slope counts for the values of all k clients. With H = 1 + 1/2 + ... + 1/k, its own
    # value has the part H / k of the slope, and each other client's value the part (1 / k - H / k) / (k - 1).
    num_clients = len(slopes)
    sizes = torch.arange(1, num_clients + 1, dtype=torch.float64)
    own_part = float((1 / sizes).sum()) / num_clients
    if num_clients == 1:
        return -(own_part * slopes)
    other_part = (1 / num_clients - own_part) / (num_clients - 1)
    slopes_of_others = slopes.sum() - slopes
    return -(own_part * slopes + other_part * slopes_of_others)


@checked
def step_weights(lrs: Sequence[float], momentum: float = 0.0) -> Tensor:
    """Compute the factor f_t with which each step's gradient enters the final model.

    In-run values are Shapley values of the samples z of a step, phi_z = lr g . grad l_z, with g the gradient of the
    validation loss and l_z sample z's part of the training loss (Wang, Mittal, Song and Jia, "Data Shapley in One
    Training Run", ICLR 2025, first order).

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
    weight = 0.0
    for step in reversed(range(len(lrs))):
        weight = lrs[step] + momentum * weight
        weights[step] = weight
    return weights


def client_in_run_values(
    class_values: Tensor,
    gradient_products: Tensor,
    aggregation_weights: Tensor,
    server_lr: float = 1.0,
) -> Tensor:
    """Split each client's value in a round by the classes of its samples.

    The value to split is that of :func:`flsv.functional.gradient_shapley` with fixed weights, which is computed from
    the updates alone. The part for a class is the sum of the in-run values of the client's samples of this class. The
    rest is the client's value minus all these parts.

    Args:
        class_values: ``[k, M]``, for each of k clients and M classes the sum of the in-run values of the client's
            samples of this class, in a round in which the client's update would be the only one, with weight 1.
        gradient_products: ``[k]``, the scalar products of the validation loss's gradient with the clients' updates d_i.
        aggregation_weights: ``[k]``, the updates' weights in the aggregate.
        server_lr: the factor by which the server multiplies the aggregated update.

    Returns:
        float64 ``[k, M + 1]``: the M parts by class, and the rest. A row sums to the client's value.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> classes, weights = torch.tensor([[0.75, 0.5], [0.5, 0.0]]), torch.tensor([0.5, 0.5])
        >>> client_in_run_values(classes, torch.tensor([-1.25, -0.25]), weights)
        tensor([[ 0.3750,  0.2500,  0.0000],
                [ 0.2500,  0.0000, -0.1250]], dtype=torch.float64)
    """
    if class_values.ndim != 2 or len(class_values) != len(gradient_products):
        raise ValueError(
            f"expected class_values [{len(gradient_products)}, M], but got shape {list(class_values.shape)}."
        )
    weights = aggregation_weights.double()
    products = gradient_products.to(weights)
    value = gradient_shapley(products, weighting=weights, server_lr=server_lr)

    factors = server_lr * weights[:, None]
    class_parts = factors * class_values.to(weights)  # [k, M]
    rest_of_value = value - class_parts.sum(1)
    return torch.cat([class_parts, rest_of_value[:, None]], dim=1)
