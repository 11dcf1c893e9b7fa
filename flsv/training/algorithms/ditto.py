"""Ditto: each client trains a personal model beside the federation's, held near it.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1:
``configs/ditto.yaml``.

Departures:

- A client takes one personal step on every batch that it trains the federation's model on, so that the paper's local
  iterations s are as many as those of the federation's model, on the same batches.
- A client that is drawn for the first time starts its personal model from the model that it is sent then; in the paper
  all clients start from the first global model.
"""

from __future__ import annotations

from typing import Any

from flsv.core.strategy import FederationInfo
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import NonNegative, Positive
from flsv.utilities.errors import ConfigurationError

PERSONAL = "ditto_model"


class Ditto(ClientAlgorithm):
    """Ditto's clients: each client k keeps a personal model v_k, which every batch moves by

        v_k <- v_k - lr (grad F_k(v_k) + lamda (v_k - w)),

    a step down F_k(v) + lamda/2 |v - w|^2, with w the global model of the round. The federation's model is trained and
    averaged as without Ditto, and is all that crosses. A client uses v_k and is tested with it
    (``ClientEvaluation(every=...)``). v_k has the size of the model and stays in the client's state. Each batch costs
    two forward and backward passes.

    Args:
        lamda: how strongly the personal model is held near the global one, at least 0; 0: each client trains alone. The
            paper tries 0.05 to 2.
        lr: the learning rate of the personal model.

    Raises:
        ConfigurationError: an argument is out of range; before training, there is a personalizer, which would give
            clients another start than the global model, or the module steps its optimizers itself.

    Example:
        >>> Ditto()
        Ditto()
    """

    uses = PERSONAL

    def __init__(self, lamda: NonNegative = 0.1, lr: Positive = 0.01) -> None:
        self.lamda = lamda
        self.lr = lr

    def begin(self, federation: FederationInfo) -> None:
        personalizer = federation.strategies.get("personalizer")
        if personalizer is not None:
            raise ConfigurationError(
                f"{self!r} holds personal models near the global one that clients are sent, and found "
                f"personalizer={personalizer!r}. Leave the personalizer out: Ditto's clients have models of their own."
            )

    resume = begin

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        personal, cut = context.own_model(PERSONAL), context.num_parameters
        _, gradient = context.step(personal, batch)
        personal[:cut] -= self.lr * (gradient + self.lamda * (personal[:cut] - context.start[:cut]))
