"""Aggregator: base class of the rules that combine the clients' models into the next global model."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from flsv.core import Round
from flsv.core.strategy import Contributions, Strategy
from flsv.utilities.declared import Positive


class Aggregator(Strategy):
    """Base class of aggregators, which make the next global model.

    The server calls :meth:`aggregate` once a round, after the filters and the metrics that need no aggregate. If its
    result is a weighted mean of the clients' models, a subclass overrides :meth:`weights` only, otherwise
    :meth:`aggregate`, too.

    Args:
        server_lr: the server's learning rate: the next global model is x + server_lr (a - x), with x the global model
            and a the result of :meth:`aggregate`. Its buffers (BatchNorm's statistics) are those of a. The server
            applies ``server_lr`` after :meth:`aggregate`. It is 1 in subclasses without this argument.

    Raises:
        ConfigurationError: ``server_lr`` is not positive.
    """

    server_lr: float = 1.0
    #: Whether the aggregator reads the clients' identities or numbers of steps, besides their models and numbers of
    #: samples.
    of_clients: ClassVar[bool] = False
    #: Whether :meth:`aggregate` returns a center that single models cannot move far. SCAFFOLD also calls it with
    #: vectors ``[P]`` other than models.
    robust: bool = False

    def __init__(self, *, server_lr: Positive = 1.0) -> None:
        self.server_lr = server_lr

    @abstractmethod
    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        """Compute the weights w_i ``[k]`` of the round's k clients.

        The next global model is x + sum_i w_i (x_i - x), with x the global model and x_i client i's model. With a
        personalizer clients may start from other models than x: ``round.client_updates`` are the changes since then.

        Args:
            round: the round, before aggregation.
            contributions: ``{metric's name: values}``. The values are those after this round or, of metrics that need
                the aggregate, those after the previous round.
        """

    def aggregate(self, round: Round, contributions: Contributions) -> tuple[Tensor, Tensor]:
        """Return the next global model ``[P]``, before ``server_lr`` applies, and the clients' weights ``[k]``.

        Reports and metrics use these weights, which need not sum to 1. State of the aggregator is named in ``saved``
        and assigned in ``end_round``, since the round may still fail.
        """
        weights = self.weights(round, contributions).to(round.client_vectors)
        return round.combine(weights), weights
