"""One kind of module trained twice: in a federation, and by hand."""

import warnings
from dataclasses import dataclass

import lightning as L
import torch
from compat.base import Kind, make_federated_data
from compat.by_hand import SEED, HandRound, coalition_values, fedavg_by_hand, validate_with_trainer

from flsv import FederatedLoop
from flsv.metrics import PartialFederatedShapley
from helpers.fits import plain_trainer
from helpers.loops_by_hand import KeepsRounds

ROUNDS = 2


@dataclass(frozen=True)
class Pair:
    """The same training twice: by the loop, and by hand, with its rounds."""

    kind: Kind
    module: L.LightningModule
    loop: FederatedLoop
    expected: L.LightningModule
    history: list[HandRound]

    def check(self):
        """The first round's clients are the same to the bit, the last global model is to rounding."""
        tolerance = self.kind.tolerance
        first_round, second_round = self.history[:2]
        vectors = self.loop.aggregator.rounds[0].client_vectors
        for vector, client in zip(vectors, first_round.clients, strict=True):
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

    def check_values(self):
        """The Shapley values of the last round are those of averages of all coalitions, which a Trainer validates."""
        kind = self.kind
        last_round = self.history[-1]
        source = kind.data()

        def negative_loss(model):
            return -validate_with_trainer(model, source, kind.logged, **kind.trainer)

        expected = coalition_values(last_round, negative_loss, last_round.sizes)
        values = self.loop.contributions["value"].double()

        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(values, expected, rtol=kind.tolerance, atol=kind.tolerance)


def train_with_values(kind, folder):
    """Train twice. The federation evaluates coalitions in every round."""
    metric = PartialFederatedShapley(
        performance=kind.logged, mode="min", weighting="samples", estimator="exact"
    )
    return train_both_ways(kind, folder, metrics={"value": metric})


def train_both_ways(kind, folder, rounds=ROUNDS, **loop):
    """Train twice."""
    module, federation = train_federated(kind, folder, rounds, aggregator=KeepsRounds(), **loop)

    expected, history = fedavg_by_hand(
        kind.module(),
        kind.data(),
        make_federated_data(kind),
        folder,
        rounds,
        kind.callbacks,
        epochs=loop.get("local_epochs", 1),
        **kind.trainer,
    )
    return Pair(kind, module, federation, expected, history)


def train_federated(kind, folder, rounds=ROUNDS, *, is_first=True, **loop):
    """Train in a federation, which is the first callback, or the last."""
    module = kind.module()
    federation = FederatedLoop(seed=SEED, **loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = list(kind.callbacks())
        if is_first:
            callbacks.insert(0, federation)
        else:
            callbacks.append(federation)
        trainer = plain_trainer(folder, rounds, callbacks=callbacks, **kind.trainer)
        trainer.fit(module, make_federated_data(kind))

    return module, federation


def _tensors(module):
    """All state, and the buffers that are not saved."""
    buffers = {name: buffer.to_dense() for name, buffer in module.named_buffers()}
    return {**module.state_dict(), **buffers}
