"""Ditto: each client trains a personal model beside the federation's, held near it.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1:
``configs/ditto.yaml``.

Departures:

- A client takes one personal step on every batch that it trains the federation's model on: as many local iterations s
  as that one takes, on the same batches.
- A client that is drawn for the first time starts its personal model from what it is sent then; the paper's all start
  from the first global model.
"""

from __future__ import annotations

from typing import Any

from flsv.core.strategy import FederationInfo
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import NonNegative, Positive
from flsv.utilities.errors import ConfigurationError

PERSONAL = "ditto_model"


class Ditto(ClientAlgorithm):
    """Client k keeps a personal model v_k. With w the global model of the round, every batch moves it by

        v_k <- v_k - lr (grad F_k(v_k) + lamda (v_k - w)),

    which goes down F_k(v) + lamda/2 |v - w|^2. The federation's model is trained and averaged as without. What a client
    uses, and is tested with (``ClientEvaluation(every=...)``), is v_k. Nothing crosses but the federation's model. A
    batch costs two forward and backward passes. v_k is as long as the model, and stays in the client's state.

    Args:
        lamda: how strongly the personal model is held near the global one, at least 0; 0: each client trains alone. The
            paper tries 0.05 to 2.
        lr: the learning rate of the personal model.

    Raises:
        ConfigurationError: an argument out of range; before training, a personalizer, which would give clients another
            start than the global model; a module that steps its optimizers itself.

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
