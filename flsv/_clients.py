"""The client side of a round: one module that is each client of the cohort in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import lightning as L
import torch
from torch import Tensor

from flsv._accumulation import AccumulationWindows
from flsv._optimizers import ClientOptimizers
from flsv._participants import Participants
from flsv.attacks import Attack, attacked
from flsv.coalition import CoalitionGames
from flsv.cohort import CohortLoader
from flsv.parameters import ParameterSpace, integer_buffers
from flsv.privacy import GaussianPrivacy
from flsv.round import ClientUpdate, Round
from flsv.seeding import generator_for, seed_global_rngs
from flsv.strategy import Strategy


class CohortTraining:
    """Switches the trainer's module from client to client, and collects what they learnt.

    Args:
        trainer: with its optimizers set up.
        space: the map between the module and vectors.
        optimizers: the clients' optimizer states.
        seed: the run's seed.
        participants: the clients as holders of data.
        strategies: what the clients report, beside their models, is up to these.
        attacks: what malicious clients do to their updates before they leave.
        privacy: what every client does to its update before it leaves.

    Attributes:
        own: client id to the model ``[P]`` that it has trained in this round; its upload may be another.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        space: ParameterSpace,
        optimizers: ClientOptimizers,
        seed: int,
        participants: Participants,
        strategies: Sequence[Strategy] = (),
        attacks: Sequence[Attack] = (),
        privacy: GaussianPrivacy | None = None,
    ) -> None:
        self.space, self.optimizers, self.windows = space, optimizers, AccumulationWindows(trainer)
        self._trainer, self.module, self._seed = trainer, trainer.lightning_module, seed
        self._participants, self._strategies = participants, strategies
        self._attacks, self._privacy = attacks, privacy
        self.own: dict[int, Tensor] = {}
        self.active = False

    def begin_round(self, loader: CohortLoader, starts: Callable[[list[int], Tensor], Mapping[int, Tensor]]) -> None:
        """The module holds the global model; ``starts(clients, global_vector)`` gives the start points of the clients
        that have their own."""
        self.round_index, self._visits = loader.round_index, loader.visits
        self.global_vector = self.space.read(self.module)
        self._models = starts([visit.client for visit in self._visits], self.global_vector)
        self._counters = [buffer.clone() for buffer in integer_buffers(self.module)]
        self._vectors = self.global_vector.new_empty(len(self._visits), self.space.size)
        self._updates: list[ClientUpdate] = []
        self.own = {}
        self._visited = self._position = 0
        self.active = True

    @property
    def place(self) -> str:
        """``"3/10"``: the third of ten clients."""
        return f"{self._visited + 1}/{len(self._visits)}"

    @property
    def start(self) -> Tensor:
        """``[P]``, where the current client started from."""
        return self._models.get(self._visits[self._visited].client, self.global_vector)

    def begin_batch(self) -> bool:
        """Before every batch. Whether it is a client's first."""
        visit = self._visits[self._visited]
        first = self._position == 0
        if first:
            self._write(self.start, self._counters)
            self.optimizers.load(visit.client)
            seed_global_rngs(self._seed, "train", self.round_index, visit.client)
            self._loss = self.global_vector.new_zeros(())
        if self.windows.active:
            self.windows.begin_batch(self._position, visit.batches)
        return first

    def end_batch(self, loss: Tensor | None, num_samples: Tensor) -> bool:
        """After every batch. Whether it was the cohort's last.

        Args:
            loss: the batch's training loss, if the module gives one.
            num_samples: ``[n]`` training samples of every client.
        """
        self._loss += float("nan") if loss is None else loss.detach()
        self._position += 1
        if self._position == self._visits[self._visited].batches:
            self._leave(self._visits[self._visited].client, num_samples)
        return self._visited == len(self._visits)

    def collect(self, chances: Callable[[], Tensor] | None = None, games: CoalitionGames | None = None) -> Round:
        """The round, as the server sees it: without the clients whose model is not finite.

        Raises:
            RuntimeError: there is no other.
        """
        if not self._updates:
            raise RuntimeError(
                f"round {self.round_index}: every client of the cohort returned a model with NaN or infinite entries. "
                "Lower the learning rate, set gradient_clip_val, or look for NaN in the data."
            )
        updates, vector = self._updates, self.global_vector
        starts = [self._models.get(update.client_id, vector) for update in updates]
        divergence = torch.tensor([u.label_divergence for u in updates], dtype=torch.float64, device=vector.device)
        return Round(
            round_index=self.round_index,
            client_ids=torch.tensor([update.client_id for update in updates], device=vector.device),
            num_samples=torch.tensor([update.num_samples for update in updates], device=vector.device),
            losses=torch.tensor([update.loss for update in updates], device=vector.device),
            global_vector=vector,
            client_vectors=self._vectors[: len(updates)],
            start_vectors=None if all(start is vector for start in starts) else torch.stack(starts),
            label_divergence=None if divergence.isnan().all() else divergence,
            clients=tuple(self._participants.clients[update.client_id] for update in updates),
            server_data=self._participants.server,
            space=self.space,
            seed=self._seed,
            chances=chances,
            games=games,
        )

    def end_round(self, vector: Tensor) -> None:
        """The round is complete: the module becomes the next global model."""
        self.optimizers.commit()
        # Averages of counters mean nothing: the global model goes on with those of the cohort's first client.
        self._write(vector, self._next_counters)
        self._vectors, self._updates, self.own, self.active = vector.new_empty(0), [], {}, False

    def discard(self) -> None:
        """Forget an unfinished round: the module is the global model of its start again."""
        if self.active:
            self.optimizers.discard()
            self._write(self.global_vector, self._counters)
            self._vectors, self._updates, self.own = self.global_vector.new_empty(0), [], {}
            # `active` stays: a checkpoint saved from here on is still one of the round's start.

    def global_state_dict(self) -> dict[str, Tensor]:
        """The module's ``state_dict`` as it was at the start of the round; the module keeps its client's."""
        now, counters = self.space.read(self.module), [buffer.clone() for buffer in integer_buffers(self.module)]
        self._write(self.global_vector, self._counters)
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        self._write(now, counters)
        return state

    def _leave(self, client: int, num_samples: Tensor) -> None:
        # The rows of the clients that are kept lie together.
        vector = self.space.read(self.module, out=self._vectors[len(self._updates)])
        own = self._change(client, vector, len(num_samples))
        if vector.sum().isfinite() or vector.isfinite().all():
            if not self._updates:
                self._next_counters = [buffer.clone() for buffer in integer_buffers(self.module)]
            loss = (self._loss / self._position).item()
            self.own[client] = own
            told: dict[str, float] = {}
            for strategy in self._strategies:
                told |= self._participants.clients[client].ask(strategy.report)
            self._updates.append(ClientUpdate(client, int(num_samples[client]), vector, loss, **told))
            self.optimizers.save(client)
        else:
            warnings.warn(
                f"client {client} returned a model with NaN or infinite entries in round {self.round_index}: it is "
                "left out of the round. A lower learning rate or gradient_clip_val may help.",
                stacklevel=2,
            )
        self._position = 0
        self._visited += 1

    def _change(self, client: int, vector: Tensor, num_clients: int) -> Tensor:
        """Make the trained model ``vector``, in place, what the client uploads; what it keeps to itself is returned."""
        own = vector
        if self.optimizers.upload():
            own = vector.clone()
            self.space.read(self.module, out=vector)
        start = self._models.get(client, self.global_vector)
        if self._attacks:
            update = vector - start
            sent = attacked(
                self._attacks,
                update,
                client=client,
                num_clients=num_clients,
                num_parameters=self.space.num_parameters,
                round_index=self.round_index,
            )
            if sent is not update:  # honest clients stay as they are to the bit
                own = vector.clone() if own is vector else own
                torch.add(start, sent, out=vector)
        if self._privacy is not None:
            own = vector.clone() if own is vector else own
            # What is protected is the step away from what everybody knows; a client's own start point is its secret.
            draw = generator_for(self._seed, "privacy", self.round_index, client)
            torch.add(self.global_vector, self._privacy.protect(vector - self.global_vector, draw), out=vector)
        return own

    @torch.no_grad()
    def _write(self, vector: Tensor, counters: list[Tensor]) -> None:
        self.space.write(self.module, vector)
        for buffer, value in zip(integer_buffers(self.module), counters):
            buffer.copy_(value)
