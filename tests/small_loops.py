"""Federations of a few lines."""

from typing import Any

from torch import Tensor

from flsv.aggregation import FedAvg, ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley


def shapfed(**kwargs: Any) -> FederatedLoop:
    kwargs.setdefault("seed", 1)
    return FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, **kwargs)


def client_tensors(loop: FederatedLoop) -> dict[int, dict[str, Tensor]]:
    """What clients keep as tensors by name."""
    kept = loop.state_dict()["clients"]
    return {client: each["tensors"] for client, each in kept.items() if "tensors" in each}


class KeepUpdates(FedAvg):
    """Remembers the rounds it aggregated."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[dict[int, Tensor]] = []

    def weights(self, round: Any, contributions: Any) -> Tensor:
        self.rounds.append(dict(zip(round.client_ids.tolist(), round.client_vectors.clone())))
        return super().weights(round, contributions)
