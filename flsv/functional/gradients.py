"""Shapley values of expansions of the validation loss: of a round's updates, and of the steps of training.

Gradient Shapley: exact Shapley values of the Taylor expansion of the validation loss in the clients' updates.

No coalition is evaluated: one gradient of the validation loss at the round's global model x, k dot products and, for
the second order, k Hessian-vector products say everything. Ours; for one training sample as the player the first-order
term is the In-Run Data Shapley of Wang et al., "Data Shapley in One Training Run", ICLR 2025.

With a_i = g . d_i and H_ij = d_i^T H d_j the game of round t, whose utility is minus the validation loss, becomes

    v(S) = U(S) - U(empty) = -[ eta sum_{i in S} w_i(S) a_i + eta^2/2 sum_{i, j in S} w_i(S) w_j(S) H_ij ].

**Fixed weights** w_i. The game is quadratic in the members: a linear term belongs to its client, the term of a pair is
shared equally:

    phi_i = -[ eta w_i a_i + eta^2/2 w_i sum_j w_j H_ij ].

**Uniform weights** w_i(S) = 1/|S|. The value is linear in the game, so three elementary games suffice. With
h = sum_{s=1..n} 1/s and q = sum_{s=1..n} 1/s^2, averaging over the size s at which a player joins in a random order:

- [j in S]/|S|: j gains 1/s when it joins as number s, so it gets h/n; the others share the rest of v(N) = 1/n, each
  (1/n - h/n)/(n - 1);
- [j in S]/|S|^2: j gets q/n, the others (1/n^2 - q/n)/(n - 1);
- [j, l in S]/|S|^2, j != l: j gains 1/s^2 if l is one of the s - 1 before it, which has probability
  (s - 1)/(n - 1), so it gets (h - q)/(n (n - 1)), as does l; the others (1/n^2 - 2 (h - q)/(n (n - 1)))/(n - 2).

In-run data Shapley: the effect of each training sample of a step on the validation loss.

Wang, Mittal, Song and Jia, "Data Shapley in One Training Run", ICLR 2025, arXiv 2406.11011. The players are the samples
of a step, and the utility of a part S of them is how much lower the validation loss is after a step with only these,

    U(S) = L(w) - L(w - lr sum_{z in S} grad l_z),

in its Taylor expansion around w. Its Shapley values are, with g and H
the gradient and the Hessian of L at w (first order: the first term),

    phi_z = lr g . grad l_z - lr^2/2 grad l_z^T H sum_j grad l_j.

Here l_z is a sample's part of the loss that is trained on: of a mean over B samples, 1/B of its own loss.

Gradient agreement: how much clients' updates lower the validation loss, and how far they agree with the federation.

Ours, from two that fail in different places. The slope of the validation loss along a client's update, times the
client's samples and summed over rounds, is the first-order federated Shapley value with fixed weights (for one sample
as the player, the first-order term of Wang et al., "Data Shapley in One Training Run", ICLR 2025). It sees bad data and
is weaker where clients differ in their mixture of classes. The cosine of an update with the federation's (Xu et al.,
CGSV, NeurIPS 2021), times samples, follows sizes and mixtures, and hardly sees noise on the inputs. Half of each
correlates with retrained Shapley values better than either: ``docs/benchmark.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from flsv.utilities.declared import Share, checked


@checked
def gradient_shapley(
    gradient_products: Tensor,
    hessian_products: Tensor | None = None,
    *,
    weighting: Annotated[Literal["uniform"] | Tensor, "Weights by samples have no closed form."] = "uniform",
    server_lr: float = 1.0,
) -> Tensor:
    """Shapley values of the first- or second-order expansion of U(S) = -L(x + server_lr * sum_{i in S} w_i(S) d_i).

    Args:
        gradient_products: ``[k]``, g . d_i, with g the gradient of the loss L at x.
        hessian_products: ``[k, k]``, d_i^T H d_j, with H the Hessian of L at x; None: first order.
        weighting: ``"uniform"``: w_i(S) = 1/|S|; or fixed weights ``[k]``, not renormalized inside a coalition.
            Weights by samples have no closed form.
        server_lr: eta.

    Returns:
        ``[k]`` in the unit of the loss (nats for the cross-entropy), positive for a client that lowers it. They sum to
        the expansion's own v(N), which is U(N) - U(empty) up to the terms that it leaves out.

    Raises:
        ConfigurationError: another weighting.
        ValueError: the shapes do not fit.

    Example:
        >>> slopes = torch.tensor([-1.0, 0.0, 0.5])
        >>> gradient_shapley(slopes, weighting=torch.tensor([0.5, 0.25, 0.25]))
        tensor([ 0.5000, -0.0000, -0.1250])
        >>> gradient_shapley(slopes)
        tensor([ 0.6806, -0.0694, -0.4444])
        >>> gradient_shapley(slopes, torch.eye(3))
        tensor([ 0.6250, -0.1250, -0.5000])
    """
    clients = len(gradient_products)
    if gradient_products.shape != (clients,) or not clients:
        raise ValueError(f"expected gradient_products [k], got {list(gradient_products.shape)}.")
    if hessian_products is not None and hessian_products.shape != (clients, clients):
        raise ValueError(f"expected hessian_products [{clients}, {clients}], got {list(hessian_products.shape)}.")
    dtype = gradient_products.dtype
    slopes = server_lr * gradient_products.double()
    bends = None if hessian_products is None else server_lr**2 / 2 * hessian_products.double()
    if isinstance(weighting, Tensor):
        return -_fixed(slopes, bends, weighting.to(slopes)).to(dtype)
    return -_uniform(slopes, bends).to(dtype)


def _fixed(slopes: Tensor, bends: Tensor | None, weights: Tensor) -> Tensor:
    if weights.shape != slopes.shape:
        raise ValueError(f"expected fixed weights [{len(slopes)}], got {list(weights.shape)}.")
    values = weights * slopes
    if bends is not None:
        values = values + weights * ((bends + bends.T) / 2 @ weights)
    return values


def _uniform(slopes: Tensor, bends: Tensor | None) -> Tensor:
    n = len(slopes)
    sizes = torch.arange(1, n + 1, dtype=torch.float64)
    h, q = float((1 / sizes).sum()), float((1 / sizes**2).sum())
    values = _own_and_others(slopes, h / n, 1 / n)
    if bends is None or n == 1:
        return values if bends is None else values + bends[0]
    diagonal = bends.diagonal()
    # Ordered pairs j != l: those that i is part of, and all the others.
    with_me = bends.sum(0) + bends.sum(1) - 2 * diagonal
    without_me = bends.sum() - diagonal.sum() - with_me
    pair = (h - q) / (n * (n - 1))
    other = (1 / n**2 - 2 * pair) / (n - 2) if n > 2 else 0.0
    return values + _own_and_others(diagonal, q / n, 1 / n**2) + pair * with_me + other * without_me


def _own_and_others(terms: Tensor, own: float, total: float) -> Tensor:
    """Every client gets ``own`` of its term; the others share what is missing to ``total`` of it."""
    n = len(terms)
    if n == 1:
        return own * terms
    return own * terms + (total - own) / (n - 1) * (terms.sum() - terms)


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

    A client's own value is that of :func:`flsv.functional.gradients.gradient_shapley` with fixed weights: it
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


@checked
def gradient_agreement(descent: Tensor, agreement: Tensor, blend: Share = 0.5) -> Tensor:
    r"""Shares of two kinds, blended.

    .. math::
        \phi_i = (1 - b) \frac{\max(u_i, 0)}{\sum_j \max(u_j, 0)} + b \frac{\max(a_i, 0)}{\sum_j \max(a_j, 0)}

    Args:
        descent: ``[n]``, u: what the clients' updates take off the validation loss, to first order, in nats. NaN for
            clients never seen.
        agreement: ``[n]``, a: samples times the mean cosine with the federation's update; NaN for the same.
        blend: b in [0, 1].

    Returns:
        float64 ``[n]``, which sums to 1; NaN for clients never seen. Where nobody has a positive number of one kind,
        the other counts alone; where of neither, all have 0.

    Raises:
        ValueError: shapes that do not fit, ``blend`` out of range.

    Example:
        >>> gradient_agreement(torch.tensor([3.0, 1.0, -2.0]), torch.tensor([10.0, 20.0, 10.0]))
        tensor([0.5000, 0.3750, 0.1250], dtype=torch.float64)
    """
    parts, weights, totals = _weighed(descent, agreement, blend)
    return (weights * (parts / totals)).sum(0)


@checked
def agreement_scales(descent: Tensor, agreement: Tensor, blend: Share = 0.5) -> Tensor:
    """The factors of u and a in :func:`gradient_agreement` where they are positive, float64 ``[2]``; arguments as
    there."""
    _, weights, totals = _weighed(descent, agreement, blend)
    return (weights / totals).squeeze(1)


def _weighed(descent: Tensor, agreement: Tensor, blend: float) -> tuple[Tensor, Tensor, Tensor]:
    """Both parts' positive numbers ``[2, n]``, weights ``[2, 1]`` that sum to 1, and what each is divided by."""
    if descent.ndim != 1 or descent.shape != agreement.shape:
        raise ValueError(f"expected two vectors [n], got {list(descent.shape)} and {list(agreement.shape)}.")
    parts = torch.stack([descent.double(), agreement.to(descent.device).double()]).clamp(min=0)
    totals = parts.nansum(1, keepdim=True)
    weights = (totals > 0) * totals.new_tensor([[1 - blend], [blend]])
    whole = weights.sum()
    return (
        parts,
        weights / whole.where(whole > 0, torch.ones_like(whole)),
        totals.where(totals > 0, torch.ones_like(totals)),
    )
