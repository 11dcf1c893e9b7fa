"""One kind of module trained twice: in a federation, and by hand."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from compat.base import Kind, make_federated_data
from compat.by_hand import SEED, HandRound, fedavg_by_hand
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
        tolerance = self.kind.tolerance
        aggregator = self.loop.aggregator

        assert isinstance(aggregator, KeepUpdates)

        first_round, second_round = self.history[:2]
        for vector, client in zip(
            aggregator.rounds[0].values(),
            first_round.clients,
            strict=True,
        ):
            state = client.state_dict()
            for name, value in self.loop.space.unflatten(vector).items():
                is_equal = torch.equal(value, state[name].to(value))
                assert is_equal, f"{name} of a client in the first round"

        trained = _tensors(self.module)
        expected = _tensors(self.expected)

        assert trained.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                trained[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda message, name=name: f"{name}: {message}",
            )

        initial = _tensors(second_round.model)
        is_moved = [not torch.equal(value, initial[name]) for name, value in expected.items()]

        assert any(is_moved), "nothing moved"


def train_both_ways(kind: Kind, folder: Path, rounds: int = ROUNDS, **loop: Any) -> Pair:
    """Train twice."""
    module, federation = train_federated(kind, folder, rounds, aggregator=KeepUpdates(), **loop)

    expected, history = fedavg_by_hand(
        kind.module(),
        kind.data(),
        make_federated_data(kind),
        folder,
        rounds,
        kind.callbacks,
        keep=loop.get("optimizer_state") == "persist",
        epochs=loop.get("local_epochs", 1),
        **kind.trainer,
    )
    return Pair(kind, module, federation, expected, history)


def train_federated(
    kind: Kind, folder: Path, rounds: int = ROUNDS, *, is_first: bool = True, **loop: Any
) -> tuple[L.LightningModule, FederatedLoop]:
    """Train in a federation, which is the first callback, or the last."""
    module = kind.module()
    federation = FederatedLoop(seed=SEED, reporting=Reporting(table=False), **loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = list(kind.callbacks())
        if is_first:
            callbacks.insert(0, federation)
        else:
            callbacks.append(federation)
        trainer = trainer_for(None, folder, rounds, callbacks=callbacks, **kind.trainer)
        trainer.fit(module, make_federated_data(kind))

    return module, federation


def _tensors(module: L.LightningModule) -> dict[str, Tensor]:
    """All state, and the buffers that are not saved."""
    return {**module.state_dict(), **dict(module.named_buffers())}
