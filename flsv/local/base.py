"""ClientTerm: what a client adds to its own loss, without its module knowing."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from torch import Tensor

from flsv.strategy import Strategy


class ClientTerm(Strategy):
    """Base class: a term of the client's objective, given as its gradient.

    It works with any module, precision, accumulation and optimizer, because it acts on the gradients just before the
    optimizer's step (and before gradient clipping).

    Attributes:
        anchor: what the anchors are: the ``"global"`` model at the start of the round, or the client's own ``"start"``.
    """

    anchor: Literal["global", "start"] = "global"

    @abstractmethod
    def add_gradients(self, parameters: list[Tensor], gradients: list[Tensor], anchors: list[Tensor]) -> None:
        """Add the term's gradient to ``gradients``, in place.

        Args:
            parameters: the trainable parameters that have a gradient.
            gradients: their gradients.
            anchors: the same parameters in the model that ``anchor`` names.
        """
