"""FedRep: every client first trains its own head on the shared body, then the body with its head.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.
``FederatedLoop(share=["!head"])`` says which layers are the head, and ``FedAvg(weighting="uniform")`` is the server's
average of the bodies: ``configs/fedrep.yaml``.

As in the authors' code: the body takes whole epochs, where Algorithm 1 has one step; BatchNorm's statistics move with
every batch, also while the head is trained; a client that is drawn for the first time starts from the initial head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from flsv.core.strategy import FederationInfo
from flsv.training.algorithms.base import ClientAlgorithm, ClientContext
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError


class FedRep(ClientAlgorithm):
    """FedRep's clients: each trains its own entries in the first ``head_epochs`` local epochs, then the shared entries.

    Parameters that do not train in an epoch have no gradient, so that no optimizer changes them, not by weight decay
    either. A step over several batches (``accumulate_grad_batches``) belongs to the epoch of its last batch.

    Args:
        head_epochs: at least 1, and less than ``FederatedLoop(local_epochs=...)``.

    Raises:
        ConfigurationError: ``head_epochs`` is out of range; before training, no entries stay at the clients, or there
            are too few local epochs.

    Example:
        >>> FedRep(head_epochs=4)
        FedRep(head_epochs=4)
    """

    def __init__(self, head_epochs: Count = 1) -> None:
        self.head_epochs = head_epochs

    def begin(self, federation: FederationInfo) -> None:
        self.resume(federation)

    def resume(self, federation: FederationInfo) -> None:
        if not federation.space.private_names:
            raise ConfigurationError(
                f'{self!r} trains the part that a client keeps, and all is shared. Set FederatedLoop(share=["!head"]), '
                "or name the layers that stay."
            )
        if federation.local_epochs <= self.head_epochs:
            raise ConfigurationError(
                f"{self!r} leaves no epoch for the shared part: local_epochs={federation.local_epochs}. Set "
                f"FederatedLoop(local_epochs={self.head_epochs + 1}) or more."
            )

    def frozen_parameters(self, context: ClientContext, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        head = context.epoch < self.head_epochs
        return [parameter for parameter in parameters if context.is_shared(parameter) == head]
