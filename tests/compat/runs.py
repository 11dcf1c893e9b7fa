"""One kind of module trained twice: in a federation, and by hand."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from compat.base import Kind, federated
from compat.by_hand import SEED, HandRound, fedavg
from torch import Tensor

from flsv import FederatedLoop, Reporting
from helpers.fits import KeepUpdates, trainer_for

ROUNDS = 2


@dataclass(frozen=True)
class Pair:
    """The same training twice: by the loop, and by hand, with its rounds."""

    kind: Kind
    module: L.LightningModule
    loop: FederatedLoop
    expected: L.LightningModule
    history: list[HandRound]

    def check(self) -> None:
        """The first round's clients are the same to the bit, the last global model is to rounding."""
        tolerance, aggregator = self.kind.tolerance, self.loop.aggregator
        assert isinstance(aggregator, KeepUpdates)
        for vector, client in zip(
            aggregator.rounds[0].values(), self.history[0].clients, strict=True
        ):
            state = client.state_dict()
            for name, value in self.loop.space.unflatten(vector).items():
                assert torch.equal(value, state[name].to(value)), (
                    f"{name} of a client in the first round"
                )
        found, expected = _tensors(self.module), _tensors(self.expected)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        before = _tensors(self.history[1].start)
        assert any(not torch.equal(value, before[name]) for name, value in expected.items()), (
            "nothing moved"
        )


def both(kind: Kind, folder: Path, rounds: int = ROUNDS, **loop: Any) -> Pair:
    """Train twice."""
    module, federation = run(kind, folder, rounds, aggregator=KeepUpdates(), **loop)
    data = federated(kind)
    how = {"keep": loop.get("optimizer_state") == "persist", "epochs": loop.get("local_epochs", 1)}
    options = {**kind.trainer, **how}
    expected, history = fedavg(
        kind.module(), kind.data(), data, folder, rounds, kind.callbacks, **options
    )
    return Pair(kind, module, federation, expected, history)


def run(
    kind: Kind, folder: Path, rounds: int = ROUNDS, *, first: bool = True, **loop: Any
) -> tuple[L.LightningModule, FederatedLoop]:
    """Train in a federation, which is the ``first`` callback, or the last."""
    module, federation = (
        kind.module(),
        FederatedLoop(seed=SEED, reporting=Reporting(table=False), **loop),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = list(kind.callbacks())
        callbacks = [federation, *own] if first else [*own, federation]
        trainer_for(None, folder, rounds, callbacks=callbacks, **kind.trainer).fit(
            module, federated(kind)
        )
    return module, federation


def _tensors(module: L.LightningModule) -> dict[str, Tensor]:
    """All state, and the buffers that are not saved."""
    return {**module.state_dict(), **dict(module.named_buffers())}
