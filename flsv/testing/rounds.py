"""Prepared rounds, on which metrics and samplers are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flsv.core import Channel, Client, LocalData, Round, Split
from flsv.core.parameter_space import ParameterSpace
from flsv.games import CoalitionGames, ModelEvaluator
from flsv.utilities.seeding import generator_for

NUM_CLIENTS = 5
NUM_CLASSES = 3
FEATURES = 2
NUM_SAMPLES = 6
#: Ids of the clients of each round. Client 4 is in no round, client 3 not in the first half, client 1 not in the second
#: half.
COHORTS = ((0, 1, 2), (0, 2), (2, 3), (0, 2, 3))
NEVER = 4
#: Clients of rounds in which clients learn, always the same four. Two are equal.
LEARNERS = (0, 1, 2, 3)
TWINS = (0, 1)
#: The client that has the twins' features with wrong labels.
MISLABELED = 2
#: The client that has no samples in rounds of the kind "no samples".
EMPTY = 3
NUM_VALIDATION_SAMPLES = 60


#: ``{argument: function of the round}``.
Given = Mapping[str, Callable[[Round], Any]]
#: What may be odd about prepared rounds: only the first client takes part, clients stand in reverse order, no client
#: moves, or the module has BatchNorm, whose statistics stay or move far. Or clients learn from their samples: as they
#: are, by updates twice as long, or one of them without samples.
RoundKind = Literal[
    "alone",
    "reversed",
    "still",
    "normalized",
    "other statistics",
    "learning",
    "long",
    "no samples",
]
LEARNING_KINDS: tuple[RoundKind, ...] = ("learning", "long", "no samples")


class PreparedRounds:
    """Sequence of four prepared rounds of five clients, always the same."""

    # Rounds are read by index, in ascending order.

    cohorts: Sequence[Sequence[int]] = COHORTS

    def __init__(self, fields: Given | None = None, kind: RoundKind | None = None) -> None:
        self._fields = dict(fields or {})
        self._kind = kind
        self._learns = kind in LEARNING_KINDS
        self._module = self._new_module()
        self.space = ParameterSpace(self._module)
        self.channel = Channel()

        class_counts = self._labels.bincount(minlength=NUM_CLASSES)
        federation_class_counts = NUM_CLIENTS * class_counts
        self.locals: list[LocalData] = []
        self.clients = []
        for client in range(NUM_CLIENTS):
            local = self._local_data(f"client {client}", client, federation_class_counts)
            self.locals.append(local)
            self.clients.append(Client(client, local, self.channel))
        # The server's samples have the number after the last client's.
        self.server = self._local_data(
            "the server", NUM_CLIENTS, federation_class_counts, guarded=False
        )
        validation_batches = self._batches(NUM_CLIENTS, "val")
        self.games = CoalitionGames([self._evaluator(validation_batches)])

    def _new_module(self) -> nn.Module:
        linear = nn.Linear(FEATURES, NUM_CLASSES)
        if self._kind in ("normalized", "other statistics"):
            return nn.Sequential(linear, nn.BatchNorm1d(NUM_CLASSES, affine=False))
        return linear

    def _changed_update(self, update: Tensor) -> Tensor:
        """Return a client's update ``[P]`` as these rounds have it."""
        if self._kind == "still":
            return torch.zeros_like(update)
        num_statistics = self.space.size - self.space.num_parameters
        parameters, statistics = update.split([self.space.num_parameters, num_statistics])
        if self._kind == "other statistics":
            statistics = 100 * (1 + statistics.abs())  # far from those of any batch
        else:
            statistics = torch.zeros_like(statistics)
        return torch.cat([parameters, statistics])

    @property
    def _labels(self) -> Tensor:
        return torch.arange(NUM_SAMPLES) % NUM_CLASSES

    def _batches(
        self,
        client: int,
        split: Split,
    ) -> list[tuple[Tensor, Tensor]]:
        if self._learns:
            return [self._samples_to_learn(client, split)]
        key = ("samples", client, split)
        x = self.normal(NUM_SAMPLES, FEATURES, key=key) + client / 4
        x[:, 0] += self._labels  # so that there is something to learn
        return [(x, self._labels)]

    def _samples_to_learn(
        self,
        client: int,
        split: Split,
    ) -> tuple[Tensor, Tensor]:
        """Return features around a center for each class, and labels."""
        is_server = client == NUM_CLIENTS
        size = NUM_VALIDATION_SAMPLES if is_server else NUM_SAMPLES
        source = client
        if client in (*TWINS, MISLABELED):  # who have the same features
            source = TWINS[0]
        y = torch.arange(size) % NUM_CLASSES
        angles = y * 2 * torch.pi / NUM_CLASSES
        centers = torch.stack([angles.cos(), angles.sin()], dim=1)
        noise = self.normal(size, FEATURES, key=("to learn", source, split))
        x = centers + 0.5 * noise
        if client == MISLABELED:
            y = (y + 1) % NUM_CLASSES
        return x, y

    def _trained_update(self, client: int, initial_model: Tensor) -> Tensor:
        """Return the update ``[P]`` of a client that takes four steps of SGD from ``initial_model [P]``."""
        if self._num_samples(client) == 0:
            return torch.zeros_like(initial_model)
        x, y = self._samples_to_learn(client, "train")
        self.space.write(self._module, initial_model)
        self._module.requires_grad_(True)
        optimizer = torch.optim.SGD(self._module.parameters(), lr=0.5)
        with torch.enable_grad():
            for _step in range(4):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self._module(x), y)
                loss.backward()
                optimizer.step()

        update = self.space.read(self._module) - initial_model
        if client == MISLABELED:
            update = 2 * update  # so that it counts beside the two clients with right labels
        if self._kind == "long":
            update = 2 * update
        return update

    def normal(
        self,
        *shape: int,
        key: Sequence[Any],
    ) -> Tensor:
        """Draw normally distributed numbers, the same for equal keys."""
        generator = generator_for(0, *key)
        return torch.randn(*shape, generator=generator)

    def _evaluator(self, batches: Any) -> ModelEvaluator:
        return ModelEvaluator(self._module, self.space, batches, num_classes=NUM_CLASSES)

    def _module_with(self, vector: Tensor) -> nn.Module:
        self.space.write(self._module, vector)
        return self._module.eval()

    def _local_data(
        self, name: str, client: int, federation_class_counts: Tensor, guarded: bool = True
    ) -> LocalData:
        counts = self._labels.bincount(minlength=NUM_CLASSES).cpu()
        batches = partial(self._batches, client)
        return LocalData(
            name,
            batches,
            counts,
            federation_class_counts.cpu(),
            self._evaluator,
            self._module_with,
            guarded=guarded,
        )

    def __getitem__(self, index: int) -> Round:
        """Return round number ``index``, from 0, after its aggregation."""
        round = self._trained(index)
        self.games.begin(round)
        weights = round.num_samples / round.num_samples.sum()
        round = round.aggregated(round.combine(weights), weights)
        reports = {name: report_of(round) for name, report_of in self._fields.items()}
        return replace(round, reports=reports)

    def _trained(self, index: int) -> Round:
        clients = self._cohort(index)
        start_model = self.normal(self.space.size, key=("start", index))
        models = [start_model + self._update_of(client, index, start_model) for client in clients]
        self._exchange(index, clients, start_model, models)
        return Round(
            round_index=index,
            client_ids=torch.tensor(clients),
            num_samples=torch.tensor([self._num_samples(client) for client in clients]),
            global_vector=start_model,
            client_vectors=torch.stack(models),
            space=self.space,
            # Losses, which fall, and steps have no meaning beyond this: they differ between clients.
            losses=torch.tensor([(1.0 + client) / (1 + index) for client in clients]),
            num_steps=torch.tensor([2 + client for client in clients]),
            clients=[self.clients[client] for client in clients],
            all_clients=self.clients,
            server_data=self.server,
            seed=0,
            drawing_probabilities=partial(torch.full, (NUM_CLIENTS,), 0.5),
            games=self.games,
            channel=self.channel,
        )

    def _cohort(self, index: int) -> Sequence[int]:
        clients = self.cohorts[index]
        if self._learns:
            clients = LEARNERS
        if self._kind == "alone":
            return clients[:1]
        if self._kind == "reversed":
            return clients[::-1]
        return clients

    def _update_of(
        self,
        client: int,
        round_index: int,
        initial_model: Tensor,
    ) -> Tensor:
        """Return a client's update ``[P]``: trained, or random numbers that the kind of federation changes."""
        if self._learns:
            return self._trained_update(client, initial_model)
        update = self.normal(self.space.size, key=("update", round_index, client))
        return self._changed_update(update)

    def _num_samples(self, client: int) -> int:
        if not self._learns:
            return NUM_SAMPLES + client  # so that clients differ
        if self._kind == "no samples" and client == EMPTY:
            return 0
        return NUM_SAMPLES

    def _exchange(
        self,
        index: int,
        clients: Sequence[int],
        initial_model: Tensor,
        models: Sequence[Tensor],
    ) -> None:
        """Let the clients have trained these models, and count messages of different lengths."""
        # The numbers of parameters that are sent differ between rounds, clients and directions. They mean nothing else.
        self.channel.begin_round()
        num_down = 3 + index
        for client, model in zip(clients, models):
            self.locals[client].set_models(initial_model, model)
            num_up = 2 + client
            self.channel.send(client, "down", "start", initial_model[:num_down])
            self.channel.send(client, "up", "update", model[:num_up])


ROUND_INDICES = range(len(COHORTS))
HALF = len(COHORTS) // 2
