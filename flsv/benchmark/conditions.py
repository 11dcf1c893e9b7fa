"""Conditions under which a run is repeated: absence, noise, another aggregator, attacks on metrics and safeguards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation import FedAvg, GeometricMedian
from flsv.benchmark.federation import Federation
from flsv.errors import ConfigurationError
from flsv.filters import CopyFilter, NormCap, OutlierFilter, SampleCap
from flsv.privacy import GaussianPrivacy
from flsv.sampling import ClientSampler, UniformSampler
from flsv.strategy import Contributions

#: Name to what it is, in words.
CONDITIONS = {
    "base": "everybody takes part in every round, FedAvg",
    "partial": "two clients of a round's are absent, drawn anew every round",
    "dropout": "the most valuable client is gone after half of the rounds",
    "private": "updates are clipped to length 1 and get noise of standard deviation 0.01 an entry",
    "uniform": "the clients' models are averaged with equal weights",
    "median": "the geometric median of the clients' models",
}
AGGREGATORS = ("uniform", "median")


class Dropout(ClientSampler):
    """All clients take part, but one leaves after a given round.

    Args:
        client: who.
        after: rounds in which it takes part.

    Example:
        >>> Dropout(0, after=5).sample(3, {}, torch.Generator(), round_index=5)
        tensor([1, 2])
    """

    def __init__(self, client: int, after: int) -> None:
        self.client, self.after = client, after

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return self.inclusion_probabilities(num_clients, contributions, round_index).nonzero().flatten()

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        chances = torch.ones(num_clients)
        if round_index >= self.after:
            chances[self.client] = 0
        return chances

    def check(self, num_clients: int) -> None:
        if not 0 <= self.client < num_clients or num_clients < 2:
            raise ConfigurationError(f"Dropout(client={self.client}): there are {num_clients} clients.")


def arguments(condition: str, federation: Federation, best: int) -> dict[str, Any]:
    """Arguments of :class:`flsv.FederatedLoop`.

    Args:
        condition: a name in :data:`CONDITIONS`.
        federation: where.
        best: the client of the largest true value.

    Raises:
        ConfigurationError: there is no such condition.
    """
    clients = len(federation.num_samples)
    if condition == "partial":
        return {"sampler": UniformSampler(cohort_size=max(2, clients - 2))}
    if condition == "dropout":
        return {"sampler": Dropout(best, federation.rounds // 2)}
    if condition == "private":
        return {"uploads": [GaussianPrivacy(clip=1.0, noise_multiplier=0.01)]}
    if condition == "uniform":
        return {"aggregator": FedAvg(weighting="uniform")}
    if condition == "median":
        return {"aggregator": GeometricMedian()}
    if condition != "base":
        raise ConfigurationError(f"there is no condition {condition!r}: expected one of {list(CONDITIONS)}.")
    return {}


@dataclass(frozen=True)
class Cheat:
    """One way to cheat.

    Args:
        title: in words.
        apply: the federation in which a client cheats so, of the federation and the client.
        together: with whom, of the client and how many there are: who is paid for the cheat, too.
    """

    title: str
    apply: Callable[[Federation, int], Federation]
    together: Callable[[int, int], list[int]] = lambda client, clients: []


def _update(class_path: str, **arguments: Any) -> Callable[[Federation, int], Federation]:
    """An attack on the client's updates, after those that the federation has."""

    def applied(federation: Federation, client: int) -> Federation:
        attack = {"class_path": class_path, "init_args": {**arguments, "clients": [client]}}
        return replace(federation, attacks=[*federation.attacks, attack])

    return applied


def _dealt(class_path: str, **arguments: Any) -> Callable[[Federation, int], Federation]:
    """Another partition of the samples."""

    def applied(federation: Federation, client: int) -> Federation:
        data = copy.deepcopy(dict(federation.data))
        if data.get("partitioner") is None:
            raise ConfigurationError(f"{federation.name} has no partitioner that deals samples otherwise.")
        inner = {"partitioner": data["partitioner"], "client": client, **arguments}
        data["partitioner"] = {"class_path": class_path, "init_args": inner}
        return replace(federation, data=data)

    return applied


def _next(client: int, clients: int) -> list[int]:
    return [(client + 1) % clients]


def _with_next(class_path: str) -> Callable[[Federation, int], Federation]:
    """Another partition of the samples of a client and the next one."""

    def applied(federation: Federation, client: int) -> Federation:
        (partner,) = _next(client, len(federation.num_samples))
        return _dealt(class_path, partner=partner)(federation, client)

    return applied


CHEATS: dict[str, Cheat] = {
    "scaling": Cheat("sends three times its update", _update("flsv.attacks.Scaling", factor=3.0)),
    "alignment": Cheat(
        "turns its update half way to the server's last step", _update("flsv.attacks.Alignment", mix=0.5)
    ),
    "heads": Cheat(
        "turns its classifier head's rows to the server's last step", _update("flsv.attacks.HeadAlignment", mix=1.0)
    ),
    "echo": Cheat("sends the server's last step, and nothing of its own", _update("flsv.attacks.Alignment", mix=1.0)),
    "noise": Cheat("sends noise as long as an update", _update("flsv.attacks.FreeRider", mode="noise")),
    "sybils": Cheat("comes as two clients, each with all its samples", _dealt("flsv.data.Sybils")),
    "split_sybils": Cheat("comes as two clients, each with half its samples", _dealt("flsv.data.Sybils", split=True)),
    "duplication": Cheat("has each of its samples three times", _dealt("flsv.data.Duplicated", times=3)),
    "reports": Cheat(
        "tells no loss, and that the others' model is of no use to it",
        _update("flsv.attacks.FalseReports", loss=0.0, score=0.0, gain=-1.0),
    ),
    "collusion": Cheat(
        "pools its samples with the next client, who does the same", _with_next("flsv.data.Colluding"), _next
    ),
    "framing": Cheat(
        "trains on the next client's samples instead of its own, to look like it", _with_next("flsv.data.Framing")
    ),
}
"""By the name that ``--attacks`` takes."""

_WATCH, _COPIES, _CAPS = OutlierFilter(), CopyFilter(), (NormCap(1.25), SampleCap(1.25))
SAFEGUARDS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "copies": {"filters": [_WATCH, _COPIES]},
    "claims": {"filters": [_WATCH, *_CAPS]},
    "all": {"filters": [_WATCH, _COPIES, *_CAPS]},
    "uniform": {"aggregator": FedAvg(weighting="uniform")},
    "both": {"filters": [_WATCH, _COPIES], "aggregator": FedAvg(weighting="uniform")},
}
"""Arguments of :class:`flsv.FederatedLoop`, by the name that ``--safeguard`` takes."""
WATCHING: Mapping[str, Any] = {"filters": [_WATCH]}
"""What the loop watches for in every run."""
