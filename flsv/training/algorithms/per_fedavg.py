"""Per-FedAvg: trains a global model from which one gradient step on a client's own data leads to a good one.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Algorithm 1, in the two versions of its section 5: ``configs/per_fedavg.yaml``.

Departures:

- The outer step is the module's own optimizer's: with plain SGD its learning rate is the paper's beta.
- The batch D is the one that the Trainer gives; D' and D'' are drawn beside it, from the same samples in another order.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import Positive


class PerFedAvg(ClientAlgorithm):
    """In every step a client's gradient is that of its loss after one step of length alpha, on batches D, D' and D'':

        w~ = w - alpha grad f(w; D);   w <- w - beta (I - alpha H(w; D'')) grad f(w~; D').

    After training, a client's own model is one such step away from the global one: fine-tune it for a step.

    Args:
        alpha: the length of the inner step, above 0.
        hessian: ``"first_order"``: H is left out (FO), a step costs two gradients; ``"free"``: H grad f is the
            difference of two gradients at w + delta grad f and w - delta grad f (HF), a step costs four.
        delta: of ``"free"``, above 0.

    Raises:
        ConfigurationError: an argument out of range; in the first step, a module that steps its optimizers itself.

    Example:
        >>> PerFedAvg(alpha=0.02)
        PerFedAvg(alpha=0.02)
    """

    def __init__(
        self, alpha: Positive = 0.01, hessian: Literal["first_order", "free"] = "first_order", delta: Positive = 1e-3
    ) -> None:
        self.alpha = alpha
        self.hessian = hessian
        self.delta = delta

    @torch.no_grad()
    def gradients(self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        model, cut = context.space.read(context.module), context.num_parameters
        others = context.own_batches("per_fedavg")

        def gradient_at(direction: Tensor, length: float, batch: object) -> Tensor:
            moved = model.clone()
            moved[:cut] += length * direction
            return context.step(moved, batch)[1]

        outer = gradient_at(context.flat(parameters, gradients), -self.alpha, next(others))
        if self.hessian == "free":
            batch = next(others)
            ahead, behind = (gradient_at(outer, length, batch) for length in (self.delta, -self.delta))
            outer = outer - self.alpha * (ahead - behind) / (2 * self.delta)
        torch._foreach_copy_(gradients, context.entries(outer, parameters))
