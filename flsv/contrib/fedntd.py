"""FedNTD: clients keep what the global model knows of the classes that a sample does not have.

Paper: Lee, Jeong, Shin, Bae and Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022, equations 3 to 5, https://arxiv.org/abs/2106.03097
Owner: the flsv contributors
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.utilities.declared import NonNegative, Positive


class FedNTD(ClientAlgorithm):
    r"""Client algorithm that adds a distillation of the not-true classes to the client's loss,

    .. math::
        \beta \tau^2\, KL\bigl(\tilde q^g_\tau \,\|\, \tilde q_\tau\bigr).

    Here :math:`\tilde q_\tau` is the softmax at temperature tau over the logits of all classes but the sample's own, by
    the client's model, and :math:`\tilde q^g_\tau` the same by the model that the client started from, in evaluation
    mode. The term is the mean over a batch. Batches are pairs of inputs and classes, and the module returns logits.

    When not to use it:
        If the task is not classification, or has two classes, since the term is 0 with one not-true class. If the
        global model is poor, as in the first rounds.

    Args:
        beta: the term's weight, at least 0 (FedAvg).
        temperature: tau.

    Raises:
        ConfigurationError: an argument is out of range, or ``training_step`` does not call the module on its inputs.

    Example:
        >>> FedNTD(beta=0.5)
        FedNTD(beta=0.5)
    """

    def __init__(self, beta: NonNegative = 1.0, temperature: Positive = 1.0) -> None:
        self.beta = beta
        self.temperature = temperature

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        x, y = batch[0], batch[1]
        global_module = context.frozen_module("global", context.start)
        with torch.no_grad():
            global_logits = global_module(x)
        term = partial(self._distillation, global_logits=global_logits, y=y)
        context.add_loss(term, layer=context.module)

    def _distillation(
        self,
        arguments: tuple[Any, ...],
        logits: Tensor,
        *,
        global_logits: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Compute the term from logits ``[B, M]``, and classes ``[B]``."""
        log_probabilities = self._log_not_true(logits, y)
        global_log_probabilities = self._log_not_true(global_logits, y)
        divergence = F.kl_div(
            log_probabilities, global_log_probabilities, reduction="batchmean", log_target=True
        )
        return self.beta * self.temperature**2 * divergence

    def _log_not_true(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the log-probabilities ``[B, M - 1]`` of the classes that the samples do not have."""
        is_not_true = torch.ones_like(logits, dtype=torch.bool)
        is_not_true.scatter_(1, y[:, None], False)
        not_true_logits = logits[is_not_true].reshape(len(logits), -1)
        return (not_true_logits / self.temperature).log_softmax(dim=1)
