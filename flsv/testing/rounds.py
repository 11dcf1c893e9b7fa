"""Rounds for checks of metrics: objects of :class:`flsv.Round` with a tiny model, made without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flsv.core import Channel, Client, LocalData, Round, Split
from flsv.core.parameter_space import ParameterSpace
from flsv.games import CoalitionGames, ModelEvaluator
from flsv.utilities.seeding import generator_for

NUM_CLIENTS, NUM_CLASSES, FEATURES, SAMPLES = 5, 3, 2, 6
#: Numbers of the clients of each round. Client 4 is in no round, client 3 not in the first half, client 1 not in the
#: second half.
COHORTS = ((0, 1, 2), (0, 2), (2, 3), (0, 2, 3))
NEVER = 4
#: New numbers of all clients, to check that results do not depend on the numbers.
ORDER = (3, 0, 4, 1, 2)


class Rounds:
    """Sequence of four prepared rounds of five clients, always the same; read them by index, in ascending order.

    Args:
        given: ``{name: function}`` for clients' reports, which these rounds lack; each function gets the round and
            returns the reports of this name.
        order: a permutation of the clients: the number that each of the five clients gets.
        dtype: data type of the models and the samples.
    """

    cohorts: Sequence[Sequence[int]] = COHORTS

    def __init__(
        self,
        given: Mapping[str, Callable[[Round], Any]] | None = None,
        order: Sequence[int] = range(NUM_CLIENTS),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._given, self.order, self._dtype = dict(given or {}), list(order), dtype
        module = nn.Linear(FEATURES, NUM_CLASSES)
        self._module = module.to(dtype)
        self.space = ParameterSpace(self._module)
        self.channel = Channel()
        population = NUM_CLIENTS * self._labels.bincount(minlength=NUM_CLASSES)
        self.locals: list[LocalData] = [None] * NUM_CLIENTS  # type: ignore[list-item]  # filled below
        for client, number in enumerate(self.order):
            self.locals[number] = self._holder(f"client {number}", client, population)
        self.clients = [Client(number, local, self.channel) for number, local in enumerate(self.locals)]
        self.server = self._holder("the server", NUM_CLIENTS, population, guarded=False)
        self.games = CoalitionGames(self._evaluator(self._batches(NUM_CLIENTS, "val")))

    @property
    def _labels(self) -> Tensor:
        return torch.arange(SAMPLES) % NUM_CLASSES

    def _batches(self, client: int, split: Split) -> list[tuple[Tensor, Tensor]]:
        x = self.normal(SAMPLES, FEATURES, of=("samples", client, split)) + client / 4
        x[:, 0] += self._labels  # so that there is something to learn
        return [(x, self._labels)]

    def normal(self, *shape: int, of: Sequence[Any]) -> Tensor:
        """Draw normal random numbers of the shape ``shape``; calls with equal keys ``of`` return the same numbers."""
        return torch.randn(*shape, generator=generator_for(0, *of)).to(self._dtype)

    def _evaluator(self, batches: Any) -> ModelEvaluator:
        return ModelEvaluator(self._module, self.space, batches, num_classes=NUM_CLASSES)

    def _with(self, vector: Tensor) -> nn.Module:
        self.space.write(self._module, vector)
        return self._module.eval()

    def _holder(self, name: str, client: int, population: Tensor, guarded: bool = True) -> LocalData:
        counts = self._labels.bincount(minlength=NUM_CLASSES).cpu()
        batches = partial(self._batches, client)
        return LocalData(name, batches, counts, population.cpu(), self._evaluator, self._with, guarded=guarded)

    def __getitem__(self, index: int) -> Round:
        """Return round number ``index``, from 0, after its aggregation."""
        who = sorted(self.cohorts[index], key=lambda client: self.order[client])
        numbers = [self.order[client] for client in who]
        start = self.normal(self.space.size, of=("start", index))
        vectors = torch.stack([start + self.normal(self.space.size, of=("update", index, client)) for client in who])
        self.channel.begin_round()
        for client, number, vector in zip(who, numbers, vectors):
            self.locals[number].set_models(start, vector)
            self.channel.send(number, "down", "start", start[: 3 + index])
            self.channel.send(number, "up", "update", vector[: 2 + client])
        ids = torch.tensor(numbers)
        samples = torch.tensor([SAMPLES + client for client in who])
        round = Round(
            index,
            ids,
            samples,
            start,
            vectors,
            self.space,
            losses=torch.tensor([1.0 + client for client in who]),
            num_steps=torch.tensor([2 + client for client in who]),
            clients=[self.clients[number] for number in numbers],
            all_clients=self.clients,
            server_data=self.server,
            seed=0,
            chances=partial(torch.full, (NUM_CLIENTS,), 0.5),
            games=self.games,
            channel=self.channel,
        )
        self.games.begin(round)
        weights = samples / samples.sum()
        round = round.aggregated(round.combine(weights), weights)
        return replace(round, reports={name: make(round) for name, make in self._given.items()})
