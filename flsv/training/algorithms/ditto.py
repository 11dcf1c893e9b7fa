"""Ditto: each client trains, beside the federation's model, a personal model that is pulled toward the global model.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1:
``configs/ditto.yaml``.

Departures:

- A client takes one step of its personal model on every batch on which it trains the federation's model. The paper's
  number s of personal steps is thus the number of steps of the federation's model, on the same batches.
- A client that is drawn for the first time starts its personal model from the global model of that round. In the paper
  all clients start from the initial global model.
"""

from __future__ import annotations

from typing import Any

from flsv.core.strategy import FederationInfo
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import NonNegative, Positive
from flsv.utilities.errors import ConfigurationError

PERSONAL_MODEL = "ditto_model"


class Ditto(ClientAlgorithm):
    """Client algorithm that trains a personal model v_k beside the federation's model. Client k updates it on every
    training batch by

        v_k <- v_k - lr (grad F_k(v_k) + lamda (v_k - w)),

    a gradient step on F_k(v) + lamda/2 |v - w|^2, where F_k is the client's loss and w the global model of the round.
    The federation's model is trained and averaged as without Ditto, and only this model is sent. A client uses v_k and
    is tested with it (``ClientEvaluation(every=...)``). v_k is as large as the model and is kept in the client's state.
    Each batch costs two forward and backward passes.

    Args:
        lamda: how strongly the personal model is pulled toward the global model, at least 0. With 0 each client trains
            its personal model alone. The paper tries 0.05 to 2.
        lr: the learning rate of the personal model.

    Raises:
        ConfigurationError: an argument is out of range. Before training: there is a personalizer, which would start
            clients from another model than the global one. In the first step: the module steps its optimizers itself.

    Example:
        >>> Ditto()
        Ditto()
    """

    uses = PERSONAL_MODEL

    def __init__(self, lamda: NonNegative = 0.1, lr: Positive = 0.01) -> None:
        self.lamda = lamda
        self.lr = lr

    def set_up(self, federation: FederationInfo) -> None:
        personalizer = federation.strategies.get("personalizer")
        if personalizer is not None:
            raise ConfigurationError(
                f"{self!r} pulls personal models toward the global model, but personalizer={personalizer!r} sends "
                "other models to the clients. Remove the personalizer: Ditto trains personal models itself."
            )

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        personal_model = context.own_model(PERSONAL_MODEL)
        _, gradient = context.step(personal_model, batch)
        num_parameters = context.num_parameters
        drift = personal_model[:num_parameters] - context.start[:num_parameters]
        personal_model[:num_parameters] -= self.lr * (gradient + self.lamda * drift)
