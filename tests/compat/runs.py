"""One kind of module trained twice: in a federation, and by hand."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from compat.by_hand import QUIET, SEED, HandRound, fedavg
from compat.kinds.base import Kind, federated
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.aggregation import FedAvg

ROUNDS = 2


class Remembers(FedAvg):
    """Keeps what the clients of the first round sent."""

    first: Tensor

    def weights(self, round: Any, contributions: Any) -> Tensor:
        if round.round_index == 0:
            self.first = round.client_vectors.clone()
        return super().weights(round, contributions)


@dataclass(frozen=True)
class Pair:
    """The same training twice.

    Attributes:
        kind: of what.
        module: trained by the loop.
        loop: the federation.
        expected: trained by hand.
        history: the rounds by hand.
    """

    kind: Kind
    module: L.LightningModule
    loop: FederatedLoop
    expected: L.LightningModule
    history: list[HandRound]

    def check(self) -> None:
        """The first round's clients are the same to the bit, the last global model is to rounding."""
        tolerance, aggregator = self.kind.tolerance, self.loop.aggregator
        assert isinstance(aggregator, Remembers)
        for vector, client in zip(aggregator.first, self.history[0].clients, strict=True):
            state = client.state_dict()
            for name, value in plain_names(self.loop.space.unflatten(vector)).items():
                assert torch.equal(value, state[name].to(value)), f"{name} of a client in the first round"
        found, expected = plain_names(_tensors(self.module)), _tensors(self.expected)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        before = _tensors(self.history[1].start)
        assert any(not torch.equal(value, before[name]) for name, value in expected.items()), "nothing moved"


def both(kind: Kind, folder: Path, rounds: int = ROUNDS, **loop: Any) -> Pair:
    """Train twice."""
    module, federation = run(kind, folder, rounds, aggregator=Remembers(), **loop)
    start = (kind.by_hand or kind.module)()
    expected, history = fedavg(start, kind.data(), federated(kind), folder, rounds, kind.callbacks, **kind.trainer)
    return Pair(kind, module, federation, expected, history)


def run(
    kind: Kind, folder: Path, rounds: int = ROUNDS, *, first: bool = True, **loop: Any
) -> tuple[L.LightningModule, FederatedLoop]:
    """Train in a federation.

    Args:
        kind: of module and data.
        folder: for what is written.
        rounds: how many.
        first: whether the loop is the first callback, or the last.
        loop: the FederatedLoop's arguments.
    """
    module, federation = kind.module(), FederatedLoop(seed=SEED, reporting=Reporting(table=False), **loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = list(kind.callbacks())
        trainer = L.Trainer(
            **{**QUIET, "max_epochs": rounds, **kind.trainer},
            callbacks=[federation, *own] if first else [*own, federation],
            default_root_dir=folder,
        )
        trainer.fit(module, federated(kind))
    return module, federation


def plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what torch.compile adds."""
    return {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}


def _tensors(module: L.LightningModule) -> dict[str, Tensor]:
    """All state, and the buffers that are not saved."""
    return {**module.state_dict(), **dict(module.named_buffers())}
