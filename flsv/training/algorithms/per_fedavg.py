"""Per-FedAvg: trains a global model that one gradient step on a client's own data turns into a good model.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1, in the two versions of its section 5: ``configs/per_fedavg.yaml``.

Departures:

- The module's own optimizer takes the outer step: the learning rate of plain SGD is the paper's beta.
- The paper's batch D is the Trainer's batch. Its batches D' and D'' are drawn from the same client's samples in another
  order.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import Positive


class PerFedAvg(ClientAlgorithm):
    """Client algorithm that trains a model to be good after one more gradient step. Each optimizer step lowers not the
    loss f of the model w, but the loss of w~, the model after one gradient step:

        w~ = w - alpha grad f(w; D);   w <- w - beta (I - alpha H(w; D'')) grad f(w~; D'),

    where D, D' and D'' are three batches of the client, H is the Hessian of f, and beta the learning rate of the
    module's optimizer. To get a client's own model, take one such step (w~) from the global model after training.

    Args:
        alpha: the length of the inner step, above 0.
        hessian: ``"first_order"`` omits H (the paper's FO), which takes two gradients per step. ``"free"``: H g,
            with g = grad f(w~; D'), is computed from the gradients at w + delta g and w - delta g (the paper's HF),
            which takes four gradients per step.
        delta: the factor of g in these two points, above 0, for ``"free"`` only.

    Raises:
        ConfigurationError: an argument is out of range. In the first step: the module steps its optimizers itself.

    Example:
        >>> PerFedAvg(alpha=0.02)
        PerFedAvg(alpha=0.02)
    """

    def __init__(
        self,
        alpha: Positive = 0.01,
        hessian: Literal["first_order", "free"] = "first_order",
        delta: Positive = 1e-3,
    ) -> None:
        self.alpha = alpha
        self.hessian = hessian
        self.delta = delta

    @torch.no_grad()
    def gradients(
        self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        model = context.space.read(context.module)
        further_batches = context.own_batches("per_fedavg")
        inner_gradient = context.flatten(parameters, gradients)

        # The gradient at the model after the inner step, w~ = w - alpha grad f(w).
        inner_step = -self.alpha * inner_gradient
        meta_gradient = _gradient_at(context, model, inner_step, next(further_batches))

        if self.hessian == "free":  # "first_order" omits the Hessian
            # H g = (grad f(w + delta g) - grad f(w - delta g)) / (2 delta)
            batch = next(further_batches)
            offset = self.delta * meta_gradient
            gradient_ahead = _gradient_at(context, model, offset, batch)
            gradient_behind = _gradient_at(context, model, -offset, batch)
            difference = gradient_ahead - gradient_behind
            meta_gradient = meta_gradient - self.alpha * difference / (2 * self.delta)

        torch._foreach_copy_(gradients, context.unflatten(meta_gradient, parameters))


def _gradient_at(context: ClientContext, model: Tensor, offset: Tensor, batch: object) -> Tensor:
    # model [P + buffers], offset and the gradient [P]
    moved_model = model.clone()
    moved_model[: context.num_parameters] += offset
    _, gradient = context.step(moved_model, batch)
    return gradient
