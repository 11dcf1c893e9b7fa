"""One program trained twice: in a federation, and by hand."""

import json
import warnings
from dataclasses import dataclass

import lightning as L
import torch
from compat.by_hand import (
    ALL_CLIENTS,
    COALITIONS,
    HandRound,
    coalition_values,
    fedavg_by_trainers,
    shapley_values_of_two,
    validate_with_trainer,
)

from flsv import FederatedLoop
from flsv.metrics import PartialFederatedShapley, ShadowShapley
from helpers.fits import KeepsRounds, plain_trainer
from zoo.program import SEED, Program, Small, make_images

ROUNDS = 2
DOUBLE = {"precision": "64-true"}  # so that nothing but the option can differ


def make_small_program(module=Small, *callbacks, **trainer):
    """3 and 4 batches: a window or a schedule that counts the cohort ends elsewhere."""
    return Program(
        module,
        make_images,
        callbacks=lambda: [make() for make in callbacks],
        trainer={**DOUBLE, **trainer},
        tolerance=1e-12,
        clients=(2, 3),
    )


@dataclass(frozen=True)
class Pair:
    """The same training twice: by the loop, and by hand, with its rounds."""

    program: Program
    module: L.LightningModule
    loop: FederatedLoop
    expected: L.LightningModule
    history: list[HandRound]

    def check(self):
        """The first round's clients are the same to the bit, the last global model is to rounding."""
        tolerance = self.program.tolerance
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
        program = self.program
        last_round = self.history[-1]
        source = program.samples()

        def negative_loss(model):
            return -validate_with_trainer(model, source, program.logged, **program.trainer)

        expected = coalition_values(last_round, negative_loss)
        values = self.loop.contributions["value"].double()

        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(values, expected, rtol=program.tolerance, atol=program.tolerance)

    def check_values_by_retraining(self, folder):
        """The values of trained coalitions are those of the loop by hand over their members."""
        program = self.program
        worth = {}
        for members in COALITIONS:
            if members == ALL_CLIENTS:
                model = self.expected
            elif members:
                model, _ = fedavg_by_trainers(program, folder, ROUNDS, members=members)
            else:
                model = program.module()
            worth[members] = -validate_with_trainer(model, program.samples(), program.logged)

        record = json.loads((folder / "run.json").read_text())
        assert record["events"] == []
        torch.testing.assert_close(
            self.loop.contributions["retrained"],
            shapley_values_of_two(worth),
            rtol=1e-5,
            atol=program.tolerance,
        )


def train_with_values(program, folder, is_retrained):
    """Train twice. The federation evaluates coalitions in every round, and may train all of them at its end."""
    measure = {"performance": program.logged, "mode": "min"}
    metrics = {"value": PartialFederatedShapley(weighting="samples", estimator="exact", **measure)}
    if is_retrained:
        metrics["retrained"] = ShadowShapley(coalitions="all", **measure)
    return train_both_ways(program, folder, metrics=metrics)


def train_both_ways(program, folder, rounds=ROUNDS, **loop):
    """Train twice."""
    module, federation = train_federated(program, folder, rounds, aggregator=KeepsRounds(), **loop)

    expected, history = fedavg_by_trainers(
        program, folder, rounds, epochs=loop.get("local_epochs", 1)
    )
    return Pair(program, module, federation, expected, history)


def train_federated(program, folder, rounds=ROUNDS, *, is_first=True, **loop):
    """Train in a federation, which is the first callback, or the last."""
    module = program.module()
    federation = FederatedLoop(seed=SEED, **loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = list(program.callbacks())
        if is_first:
            callbacks.insert(0, federation)
        else:
            callbacks.append(federation)
        trainer = plain_trainer(folder, rounds, callbacks=callbacks, **program.trainer)
        trainer.fit(module, program.data())

    return module, federation


def _tensors(module):
    """All state, and the buffers that are not saved."""
    buffers = {name: buffer.to_dense() for name, buffer in module.named_buffers()}
    return {**module.state_dict(), **buffers}
