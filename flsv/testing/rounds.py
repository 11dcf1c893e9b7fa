"""Rounds made by hand: a real :class:`flsv.Round` of a tiny model, and ranks that are threads of one process."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flsv.functional.shapley import few_coalitions
from flsv.games import CoalitionGames, ModelEvaluator
from flsv.parameters import ParameterSpace
from flsv.participants import ALONE, Channel, Client, LocalData, Owners, Ranks, Split
from flsv.round import Round, TrainedCoalitions
from flsv.seeding import generator_for
from flsv.strategy import Federation

T = TypeVar("T")

NUM_CLIENTS, NUM_CLASSES, FEATURES, SAMPLES = 5, 3, 2, 6
#: Who takes part. Client 4 never does; client 3 not in the first half, client 1 not in the second.
COHORTS = ((0, 1, 2), (0, 2), (2, 3), (0, 2, 3))
NEVER = 4
#: Another number for everybody.
ORDER = (3, 0, 4, 1, 2)


class Rounds:
    """Four rounds of five clients, always the same; they are to be read in their order.

    Args:
        given: what a round does not have by itself, by name: a function of the round.
        order: the number that each of the five clients goes by.
        dtype: of the models and the samples.
        device: likewise.
        ranks: among which the clients are dealt out.
        cohorts: who takes part in each round.
    """

    def __init__(
        self,
        given: Mapping[str, Callable[[Round], Any]] | None = None,
        order: Sequence[int] = range(NUM_CLIENTS),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        ranks: Ranks = ALONE,
        cohorts: Sequence[Sequence[int]] = COHORTS,
    ) -> None:
        self._cohorts = cohorts
        self._given, self._order, self._dtype, self._device = dict(given or {}), list(order), dtype, device
        module = nn.Linear(FEATURES, NUM_CLASSES)
        self._module = module.to(device, dtype)
        self.space = ParameterSpace(self._module)
        self.channel = Channel()
        owners = Owners(ranks, [1.0] * NUM_CLIENTS) if ranks.size > 1 else None
        population = NUM_CLIENTS * self._labels.bincount(minlength=NUM_CLASSES)
        self.locals: list[LocalData] = [None] * NUM_CLIENTS  # type: ignore[list-item]
        for client, number in enumerate(self._order):
            self.locals[number] = self._holder(f"client {number}", client, population)
        self.clients = [Client(number, local, self.channel, owners) for number, local in enumerate(self.locals)]
        self.server = self._holder("the server", NUM_CLIENTS, population, guarded=False)
        self._games = CoalitionGames(self._evaluator(self._batches(NUM_CLIENTS, "val")), ranks=ranks)

    def __len__(self) -> int:
        return len(self._cohorts)

    @property
    def _labels(self) -> Tensor:
        return torch.arange(SAMPLES, device=self._device) % NUM_CLASSES

    def _batches(self, client: int, split: Split) -> list[tuple[Tensor, Tensor]]:
        x = self._normal(SAMPLES, FEATURES, of=("samples", client, split)) + client / 4
        x[:, 0] += self._labels  # so that there is something to learn
        return [(x, self._labels)]

    def _normal(self, *shape: int, of: Sequence[Any]) -> Tensor:
        return torch.randn(*shape, generator=generator_for(0, *of)).to(self._device, self._dtype)

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
        """A round after everything has crossed."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        who = sorted(self._cohorts[index], key=lambda client: self._order[client])
        numbers = [self._order[client] for client in who]
        start = self._normal(self.space.size, of=("start", index))
        vectors = torch.stack([start + self._normal(self.space.size, of=("update", index, client)) for client in who])
        self.channel.begin_round()
        for client, number, vector in zip(who, numbers, vectors):
            self.locals[number].visit(start, vector)
            self.channel.send(number, "down", "start", start[: 3 + index])
            self.channel.send(number, "up", "update", vector[: 2 + client])
        ids = torch.tensor(numbers, device=self._device)
        samples = torch.tensor([SAMPLES + client for client in who], device=self._device)
        views = self._normal(NUM_CLIENTS, NUM_CLIENTS, of=("views", index))
        seen = torch.full_like(views, float("nan"))
        seen[:, self._order] = views.masked_fill(views < -1, float("nan"))
        seen[:, self._order[NEVER]] = float("nan")
        self._games.begin(
            round := Round(
                index,
                ids,
                samples,
                start,
                vectors,
                self.space,
                losses=torch.tensor([1.0 + client for client in who], device=self._device),
                num_steps=torch.tensor([2 + client for client in who], device=self._device),
                clients=[self.clients[number] for number in numbers],
                server_data=self.server,
                seed=0,
                chances=partial(torch.full, (NUM_CLIENTS,), 0.5),
                games=self._games,
                channel=self.channel,
            )
        )
        weights = samples / samples.sum()
        round = round.aggregated(round.combine(weights), weights)
        round = round.personalized(seen[list(who)]).with_coalitions(self._coalitions(numbers, start, vectors))
        return replace(round, reports={name: make(round) for name, make in self._given.items()})

    def _coalitions(self, numbers: Sequence[int], start: Tensor, vectors: Tensor) -> TrainedCoalitions:
        """Each alone, every two and all, as if they had been trained: the mean of who is there."""
        masks = few_coalitions(NUM_CLIENTS, "pairs")
        places = torch.tensor(self._order).argsort()  # of the same clients, whatever they are called
        masks = masks[:, places]

        def build(index: int, out: Tensor) -> None:
            there = masks[index, numbers].to(vectors.device)
            out.copy_(vectors[there].mean(0) if there.any() else start)

        return TrainedCoalitions(masks, build)


def federation(rounds: Rounds, num_clients: int = NUM_CLIENTS) -> Federation:
    """What is known before the first of these rounds; of fewer clients, if that is said."""
    return Federation(
        rounds[0].global_vector,
        rounds.space,
        num_clients,
        NUM_CLASSES,
        {split: torch.full((num_clients,), SAMPLES) for split in ("train", "val", "test")},
        seed=0,
        client_names=[f"client {client}" for client in range(num_clients)],
    )


class _Meeting:
    """Where threads exchange values."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self._slots: list[bytes] = [b""] * size

    def exchange(self, rank: int, value: bytes) -> list[bytes]:
        self._slots[rank] = value
        self.barrier.wait()
        found = list(self._slots)
        self.barrier.wait()
        return found


class ThreadRanks(Ranks):
    """A rank that is a thread: what it tells the others is pickled, as between processes."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def everybody(self, value: Any, about: str) -> list[Any]:
        parts = [pickle.loads(part) for part in self._meeting.exchange(self.rank, pickle.dumps((about, value)))]
        other = next((theirs for theirs, _ in parts if theirs != about), None)
        if other is not None:
            raise RuntimeError(f"ranks are out of step: one is at {other!r}, another at {about!r}.")
        return [value if rank == self.rank else theirs for rank, (_, theirs) in enumerate(parts)]

    def from_rank(self, source: int, value: Any, about: str) -> Any:
        return self.everybody(value, about)[source]


def on_ranks(function: Callable[[Ranks], T], size: int = 2) -> list[T]:
    """What every rank gets from ``function``, each in a thread of its own.

    Raises:
        Exception: what one of them raised.
    """
    meeting, found, failed = _Meeting(size), {}, list[Exception]()

    def work(rank: int) -> None:
        try:
            found[rank] = function(ThreadRanks(rank, meeting))
        except threading.BrokenBarrierError:
            failed.append(RuntimeError("a rank waits for an exchange that another one does not take part in."))
        except Exception as error:
            failed.insert(0, error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(size)]
