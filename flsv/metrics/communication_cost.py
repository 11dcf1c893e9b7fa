"""CommunicationCost: what crosses between the clients and the server.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, section VI-C and figures 8-10, which count parameters. What an algorithm's rounds would cost, without training:
:mod:`flsv.functional.communication`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.metrics.base import ContributionMetric
from flsv.metrics.plot import plot_contributions


class CommunicationCost(ContributionMetric):
    """Parameters that every client has sent and received so far.

    As input to ``update``: ``client_ids [k]``, ``uploaded [k]`` and ``downloaded [k]``, numbers of parameters (entries
    of a model's vector, BatchNorm's statistics included), which the personaliser tells; without one it is a model up
    and a model down. ``compute`` gives int64 ``[num_clients, 2]``, sent and received; 0 for clients never seen.
    ``diagnostics`` gives all clients' totals in parameters and bytes, and those of the last round.

    Args:
        num_clients: n. None inside a ``FederatedLoop``: taken from the data.
        bytes_per_parameter: 4 for float32.
        kwargs: see ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: ``bytes_per_parameter`` not above 0.
        ValueError: shapes that do not fit, unknown or repeated client ids.

    Example:
        >>> cost = CommunicationCost(num_clients=3)
        >>> cost.update(torch.tensor([0, 2]), torch.tensor([10, 10]), torch.tensor([50, 20]))
        >>> cost.compute().tolist()
        [[10, 50], [0, 0], [10, 20]]
        >>> cost.diagnostics()["bytes_down"].item()
        280.0
    """

    higher_is_better = False
    per_class = False
    exchanged: Tensor
    last: Tensor

    def __init__(self, num_clients: int | None = None, bytes_per_parameter: float = 4, **kwargs: Any) -> None:
        if not bytes_per_parameter > 0:
            raise ConfigurationError(f"CommunicationCost(bytes_per_parameter={bytes_per_parameter}): expected above 0.")
        self.bytes_per_parameter = bytes_per_parameter
        super().__init__(num_clients, **kwargs)

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("exchanged", torch.zeros(num_clients, 2, dtype=torch.long), dist_reduce_fx="sum")
        # Of two stretches of rounds, the later one's; one without rounds says so with -1.
        self.add_state("last", torch.full((2,), -1), dist_reduce_fx=_later)

    def update(self, client_ids: Tensor, uploaded: Tensor, downloaded: Tensor) -> None:
        """Add one round; all ``[k]``."""
        self._check_clients(client_ids)
        if uploaded.shape != client_ids.shape or downloaded.shape != client_ids.shape:
            raise ValueError(
                f"expected uploaded and downloaded [{len(client_ids)}], got {list(uploaded.shape)} and "
                f"{list(downloaded.shape)}."
            )
        now = torch.stack([uploaded, downloaded], dim=1).to(self.exchanged)
        self.exchanged[client_ids] += now
        self.last = now.sum(0)
        self.rounds += 1

    def compute(self) -> Tensor:
        """int64 ``[num_clients, 2]``: parameters sent and received."""
        return self.exchanged.clone()

    def client_values(self, value: Tensor) -> Tensor:
        """``[num_clients]``: sent and received together."""
        return value.sum(-1)

    def diagnostics(self) -> dict[str, Tensor]:
        """Parameters and bytes, up and down, of all clients: so far, and in the last round."""
        result = {}
        for when, sums in (("", self.exchanged.sum(0)), ("round_", self.last.clamp_min(0))):
            # Numbers beyond float32's whole ones, and not every device has float64.
            for way, count in zip(("up", "down"), sums.cpu().double()):
                result[f"{when}parameters_{way}"] = count
                result[f"{when}bytes_{way}"] = count * self.bytes_per_parameter
        return result

    def columns(self) -> list[str]:
        return ["up", "down"]

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """A bar per client of all that it sent and received; ``val`` and ``ax`` as for other metrics."""
        val = self.compute() if val is None else val
        total = self.client_values(val) if isinstance(val, Tensor) else [self.client_values(each) for each in val]
        return plot_contributions(total, ax=ax, name="parameters sent and received")


def _later(stretches: Tensor) -> Tensor:
    """The last of ``[W, 2]`` that has rounds."""
    having = stretches[(stretches >= 0).all(1)]
    return having[-1] if len(having) else stretches[-1]
