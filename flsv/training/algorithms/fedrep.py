"""FedRep: every client first trains its own head on the shared body, then the body with its head.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.
``FederatedLoop(share=["!head"])`` defines which layers are the head, and ``FedAvg(weighting="uniform")`` averages the
bodies at the server, see ``configs/fedrep.yaml``.

As in the authors' code, the body is trained for whole epochs (in Algorithm 1: one step), BatchNorm's statistics are
updated by every batch, also while the head is trained, and a client that is drawn for the first time starts from the
initial head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from flsv.core.strategy import FederationInfo
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError


class FedRep(ClientAlgorithm):
    """Client algorithm that trains first a client's own head, then the shared body. The first ``head_epochs`` local
    epochs of a round train only the parameters that the client does not share (the head), the others only the shared
    ones (the body).

    The parameters that an epoch does not train have no gradient in it, so that the optimizer does not change them, not
    even by weight decay. An optimizer step over several batches (``accumulate_grad_batches``) belongs to the epoch of
    its last batch.

    Args:
        head_epochs: the number of local epochs that train the head, at least 1, and less than
            ``FederatedLoop(local_epochs=...)``.

    Raises:
        ConfigurationError: ``head_epochs`` is out of range. Before training: all parameters are shared, or
            ``local_epochs`` is not larger than ``head_epochs``.

    Example:
        >>> FedRep(head_epochs=4)
        FedRep(head_epochs=4)
    """

    def __init__(self, head_epochs: Count = 1) -> None:
        self.head_epochs = head_epochs

    def set_up(self, federation: FederationInfo) -> None:
        if not federation.space.private_names:
            raise ConfigurationError(
                f"{self!r} trains parameters that stay at the client, but the clients share all parameters. Set "
                'FederatedLoop(share=["!head"]), or exclude other layers in `share`.'
            )
        if federation.local_epochs <= self.head_epochs:
            raise ConfigurationError(
                f"{self!r} leaves no epoch to train the shared parameters, since local_epochs="
                f"{federation.local_epochs}. Set FederatedLoop(local_epochs={self.head_epochs + 1}) or more."
            )

    def frozen_parameters(
        self, context: ClientContext, parameters: Sequence[Tensor]
    ) -> Iterable[Tensor]:
        trains_head = context.epoch < self.head_epochs
        return [
            parameter for parameter in parameters if context.is_shared(parameter) == trains_head
        ]
