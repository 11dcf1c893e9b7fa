"""Coalitions trained alone in plain torch, and a client's training by hand for each kind in
:mod:`helpers.coalition_kinds`."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule
from flsv.metrics import ShadowShapley
from flsv.utilities.seeding import generator_for, seed_generators, seed_global_rngs
from helpers.data import toy_data

SEED, ROUNDS, FIT_ROUNDS, RATE = 5, 3, 2, 0.1


def loss_with_noise(net: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x + 0.1 * torch.randn(x.shape, generator=generator)), y)


def make_plateau_scheduler(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.4, threshold_mode="abs")


class CoalitionByHand:
    """FedAvg of some clients, and a client's training, in plain torch."""

    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        self.net = net
        self.make = optimizer
        self.beta = 1.0
        self.round = 0

    def train(self, batches: list[Any], client: int) -> None:
        optimizer = self.make(self.net.parameters())
        for batch in batches:
            self.step(optimizer, batch)

    def step(self, optimizer: Any, batch: Any) -> None:
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def end_round(self, val: list[Any]) -> None:
        pass

    def utility(
        self, members: Sequence[int], cohorts: Sequence[Sequence[int]] | None = None
    ) -> float:
        """Minus the validation loss; ``cohorts``: who trains in each round, all members if None."""
        dealt = make_three_clients()
        dealt.setup("fit")
        val = list(dealt.val_dataloader())
        if cohorts is None:
            cohorts = [members] * (FIT_ROUNDS if members else 0)

        for self.round, cohort in enumerate(cohorts):
            initial_state = copy.deepcopy(self.net.state_dict())
            states = []
            sizes = []
            for client in cohort:
                self.net.load_state_dict(initial_state)
                seed_global_rngs(SEED, "train", self.round, client)
                stream = generator_for(SEED, "shuffle", self.round, client, 0)
                batches = list(dealt.client_loader(client, "train", generator=stream))
                self.train(batches, client)
                states.append(copy.deepcopy(self.net.state_dict()))
                sizes.append(float(dealt.num_samples[client]))
            if not states:
                continue
            mean = {}
            for name, value in initial_state.items():
                mean[name] = states[0][name]
                if value.is_floating_point():
                    total = sum(size * state[name] for size, state in zip(sizes, states))
                    mean[name] = total / sum(sizes)
            self.net.load_state_dict(mean)
            self.end_round(val)

        return -self.validation_loss(val)

    @torch.no_grad()
    def validation_loss(self, val: list[Any]) -> float:
        x, y = (torch.cat(parts) for parts in zip(*val))
        self.net.eval()
        loss = float(nn.functional.cross_entropy(self.net(x), y))
        self.net.train()
        return loss


class OwnGeneratorByHand(CoalitionByHand):
    """Its generators are seeded by round and client."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.generator = torch.Generator()
        self.random = np.random.default_rng()

    def train(self, batches: list[Any], client: int) -> None:
        generators = [self.generator, self.random]
        seed_generators(generators, SEED, "train", self.round, client)
        super().train(batches, client)

    def loss(self, batch: Any) -> Tensor:
        factor = 1 + 0.1 * self.random.random()
        return loss_with_noise(self.net, batch, self.generator) * factor


class AnnealedByHand(CoalitionByHand):
    """Each client anneals from the round's factor. The next round's is that of the first client after its training: a
    federation takes over the first client's state where states are not averaged."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last_round = -1
        self.beta_of_round = 1.0
        self.beta_of_next_round = 1.0

    def train(self, batches: list[Any], client: int) -> None:
        is_first_client = self.round != self.last_round
        if is_first_client:
            self.last_round = self.round
            self.beta_of_round = self.beta_of_next_round

        self.beta = self.beta_of_round
        super().train(batches, client)
        if is_first_client:
            self.beta_of_next_round = self.beta

    def loss(self, batch: Any) -> Tensor:
        if self.round > 0:
            self.beta *= 0.95
        return super().loss(batch) * self.beta


class PersistedByHand(CoalitionByHand):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizers: dict[int, Any] = {}

    def train(self, batches: list[Any], client: int) -> None:
        optimizer = self.optimizers.setdefault(client, self.make(self.net.parameters()))
        for batch in batches:
            self.step(optimizer, batch)


class PlateauByHand(CoalitionByHand):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.optimizer = self.make(self.net.parameters())
        self.scheduler = make_plateau_scheduler(self.optimizer)

    def train(self, batches: list[Any], client: int) -> None:
        for batch in batches:  # plain SGD has no state
            self.step(self.optimizer, batch)

    def end_round(self, val: list[Any]) -> None:
        self.scheduler.step(self.validation_loss(val))


def make_three_clients() -> FederatedDataModule:
    return toy_data((4, 1, 2), server_val=0.3)


def make_shadow_loop(metric: ShadowShapley | None = None, **options: Any) -> FederatedLoop:
    metrics = {"shadow": metric or ShadowShapley(coalitions="all"), **options.pop("metrics", {})}
    return FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False), **options)
