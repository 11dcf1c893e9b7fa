"""pFedMe's local training: each client trains a personalized model theta beside the shared model w.

T Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1 (lines 5-9). The
server is FedAvg with equal weights, and the paper's beta is its learning rate, ``FedAvg("uniform", server_lr=...)``,
see ``configs/pfedme.yaml``.

As in the authors' code (github.com/CharlieDinh/pFedMe), the first of a batch's K inner steps continues from the theta
of the batch before. The authors' weight decay of theta (mu = 0.001) is omitted. The defaults are those of the authors'
``main.py``: ``personal_learning_rate`` 0.09, ``learning_rate`` (eta) 0.005, ``lamda`` 15, ``K`` 5, with a ``beta`` of
1, batches of 20 samples and 20 batches a round for 800 rounds. In the settings of the authors' README the product of
eta and lamda is 0.075 to 0.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from flsv.utilities.declared import Count, Positive, check_argument
from flsv.utilities.errors import ConfigurationError


class MoreauSGD(torch.optim.Optimizer):
    """Optimizer of pFedMe's clients. For every batch it takes K steps of the personalized weights theta and one step of
    the shared weights w:

        theta <- theta - lr (grad f(theta) + lamda (theta - w)),  K times;   w <- w - outer_lr lamda (w - theta).

    f is the loss. The parameters hold theta, and w starts as a copy of theta when a client starts. After a client's
    training in a round the loop calls :meth:`upload_parameters`: the server averages w, and the client keeps theta. To
    evaluate theta, use ``ClientEvaluation(models="trained")``. Do not use ``accumulate_grad_batches``, which would add
    up gradients over the inner steps, or ``FederatedLoop(optimizer_state="persist")``, with which w would continue from
    the client's last round. BatchNorm's statistics come from theta's forward passes, and are shared.

    A batch costs ``inner_steps`` forward and backward passes: compare with other methods at equal numbers of passes.

    Args:
        params: parameters, or groups of parameters.
        lr: the learning rate of theta, ``personal_learning_rate`` in the authors' code. At 2 / lamda or above theta
            would diverge.
        outer_lr: the paper's eta. Each batch moves w toward theta by the share outer_lr * lamda of their distance. With
            the authors' share of 0.075, training needs some hundred rounds. With a share of 1, w equals theta, and the
            method is FedAvg with fine-tuning, where clients take ``inner_steps`` SGD steps per batch with a proximal
            term around the weights before the batch.
        lamda: how strongly theta is pulled toward w.
        inner_steps: the number K of steps, that is, of forward and backward passes, per batch.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = MoreauSGD([w], lr=0.1, outer_lr=0.05, lamda=2.0, inner_steps=1)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = (w**2 / 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
        >>> w.item()
        0.8999999761581421
        >>> optimizer.upload_parameters()
        >>> w.item()
        0.9900000095367432
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.09,
        outer_lr: float = 0.005,
        lamda: float = 15.0,
        inner_steps: int = 5,
    ) -> None:
        check_argument("MoreauSGD", "inner_steps", inner_steps, Count)
        super().__init__(
            params, {"lr": lr, "outer_lr": outer_lr, "lamda": lamda, "inner_steps": inner_steps}
        )
        for group in self.param_groups:
            self._check(group)

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lamda", "lr", "outer_lr"):
            check_argument("MoreauSGD", name, group[name], Positive)
        lamda = group["lamda"]
        lr = group["lr"]
        outer_lr = group["outer_lr"]
        if lr >= 2 / lamda:
            raise ConfigurationError(
                f"MoreauSGD(lr={lr}): expected a number below 2 / lamda = {2 / lamda:g}, or theta would diverge."
            )
        if outer_lr > 1 / lamda:
            raise ConfigurationError(
                f"MoreauSGD(outer_lr={outer_lr}): expected a number of at most 1 / lamda = {1 / lamda:g}, or w would "
                "move past theta."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Train on one batch. Take ``inner_steps`` steps of the personalized weights theta, then one step of the shared
        weights w.

        Args:
            closure: function that clears the gradients, computes the batch's loss and its gradients, and returns the
                loss.

        Returns:
            The loss at the theta from which the last of the ``inner_steps`` steps starts.

        Raises:
            ConfigurationError: ``closure`` is None.
        """
        if closure is None:
            raise ConfigurationError(
                "MoreauSGD.step needs a closure. Use Lightning's automatic optimization, which passes one."
            )
        loss = None
        for _ in range(self.defaults["inner_steps"]):
            with torch.enable_grad():
                loss = closure()
            # theta <- theta - lr (grad f(theta) + lamda (theta - w))
            for group, personal_weights, shared_weights in self._trained_weights():
                gradients = [theta.grad for theta in personal_weights if theta.grad is not None]
                step = torch._foreach_sub(personal_weights, shared_weights)
                torch._foreach_mul_(step, group["lamda"])
                torch._foreach_add_(step, gradients)
                torch._foreach_mul_(step, group["lr"])
                torch._foreach_sub_(personal_weights, step)

        # w <- w - outer_lr lamda (w - theta)
        for group, personal_weights, shared_weights in self._trained_weights():
            outer_step = group["outer_lr"] * group["lamda"]
            torch._foreach_lerp_(shared_weights, personal_weights, outer_step)
        return loss

    @torch.no_grad()
    def upload_parameters(self) -> None:
        """Overwrite the parameters, which hold theta, with w. The server averages these shared weights."""
        for group in self.param_groups:
            for theta in group["params"]:
                if theta in self.state:
                    theta.copy_(self.state[theta]["shared"])

    def _trained_weights(self) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
        """Yield each parameter group with its personal weights theta that have a gradient, and w for each of them."""
        for group in self.param_groups:
            personal_weights = [theta for theta in group["params"] if theta.grad is not None]
            if personal_weights:
                shared_weights = [self._shared_weight(theta) for theta in personal_weights]
                yield group, personal_weights, shared_weights

    def _shared_weight(self, theta: Tensor) -> Tensor:
        """Return the shared weight w beside a personal one. It begins at the model that the client was sent."""
        state = self.state[theta]
        if "shared" not in state:
            state["shared"] = theta.clone()
        return state["shared"]
