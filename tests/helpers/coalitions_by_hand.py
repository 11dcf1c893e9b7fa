"""Coalitions trained alone: in plain torch, and by an ordinary fit of the members that nothing in flsv scores."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule
from flsv.games.members import members_of
from flsv.metrics import ShadowShapley
from flsv.sampling import FixedCohort
from flsv.utilities.seeding import generator_for, seed_global_rngs
from helpers.data import toy_data
from helpers.loops_by_hand import average_models, federate

SEED, ROUNDS, FIT_ROUNDS, RATE = 5, 3, 2, 0.1


class CoalitionByHand:
    """FedAvg of some clients, and a client's training, in plain torch."""

    def __init__(self, net: nn.Module, optimizer: Any):
        self.net = net
        self.make = optimizer

    def train(
        self,
        model: nn.Module,
        batches: list[Any],
    ) -> None:
        optimizer = self.make(model.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def utility(
        self, members: Sequence[int], cohorts: Sequence[Sequence[int]] | None = None
    ) -> float:
        """Minus the validation loss; ``cohorts``: who trains in each round, all members if None."""
        dealt = make_three_clients()
        dealt.setup("fit")
        val = list(dealt.val_dataloader())
        if cohorts is None:
            cohorts = [members] * (FIT_ROUNDS if members else 0)

        def visit(
            model: nn.Module,
            round_index: int,
            client: int,
        ) -> None:
            seed_global_rngs(SEED, "train", round_index, client)
            stream = generator_for(SEED, "shuffle", round_index, client, 0)
            self.train(
                model,
                list(dealt.client_loader(client, "train", generator=stream)),
            )

        def combine(
            server: nn.Module,
            models: dict[int, nn.Module],
        ) -> nn.Module:
            sizes = [float(dealt.num_samples[client]) for client in models]
            return average_models([*models.values()], sizes) if models else server

        self.net = federate(self.net, cohorts, visit, combine)
        return -self.validation_loss(val)

    @torch.no_grad()
    def validation_loss(self, val: list[Any]) -> float:
        x, y = (torch.cat(parts) for parts in zip(*val))
        self.net.eval()
        loss = float(nn.functional.cross_entropy(self.net(x), y))
        self.net.train()
        return loss


class GameByFits:
    """The game whose coalitions' models are ordinary fits: ``game(masks)`` has minus their validation losses, ``[K]``.

    Each coalition is trained once, by ``make_trainer(cohort)``. The empty one has the module as it is.
    """

    def __init__(
        self,
        make_trainer: Callable[[FixedCohort], L.Trainer],
        module: L.LightningModule,
        data: FederatedDataModule,
    ):
        self.make_trainer = make_trainer
        self.module = module
        self.data = data
        # {members: (logits [V, M], labels [V])}
        self.outputs_by_members: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, masks: Tensor) -> Tensor:
        utilities = []
        for members in members_of(masks):
            logits, labels = self.outputs(members)
            utilities.append(-nn.functional.cross_entropy(logits, labels))
        return torch.stack(utilities)

    def recalls(self, masks: Tensor) -> Tensor:
        """The part of each class's samples that coalitions' models find, ``[K, M]``."""
        recalls_by_coalition = []
        for members in members_of(masks):
            logits, labels = self.outputs(members)
            is_right = logits.argmax(1) == labels
            recalls = [is_right[labels == label].double().mean() for label in labels.unique()]
            recalls_by_coalition.append(torch.stack(recalls))
        return torch.stack(recalls_by_coalition)

    def outputs(
        self,
        members: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        if members not in self.outputs_by_members:
            self.outputs_by_members[members] = self.new_outputs(members)
        return self.outputs_by_members[members]

    @torch.no_grad()
    def new_outputs(
        self,
        members: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        module = copy.deepcopy(self.module)
        if members:
            trainer = self.make_trainer(FixedCohort(members))
            with torch.enable_grad():
                trainer.fit(module, self.data)
        else:
            self.data.prepare_data()
            self.data.setup("fit")
        module.eval()
        inputs, labels = zip(*self.data.val_dataloader())
        return module(torch.cat(inputs)).double(), torch.cat(labels)


def make_three_clients() -> FederatedDataModule:
    return toy_data((4, 1, 2), server_val=0.3)


def make_shadow_loop(metric: ShadowShapley | None = None, **options: Any) -> FederatedLoop:
    metrics = {"shadow": metric or ShadowShapley(coalitions="all"), **options.pop("metrics", {})}
    return FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False), **options)
