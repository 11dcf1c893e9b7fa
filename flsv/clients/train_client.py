"""Trains one client: from an Instruction to a ClientUpdate.

A Trainer's batch hooks drive it step by step (:class:`flsv.clients.cohort.CohortTraining`). Everything that a client
does beyond its batches is here: its start point and what it has kept, its random state, its optimizers, its algorithm,
what it reports, and what happens to its update before it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flsv._lightning.per_client import AccumulationWindows
from flsv.clients.algorithms import ClientAlgorithm, ClientContext
from flsv.clients.non_vector_state import NonVectorState, State
from flsv.clients.optimizers import ClientOptimizers
from flsv.errors import ConfigurationError
from flsv.functional.divergences import distances
from flsv.parameters import ParameterSpace
from flsv.participants import LocalData, at
from flsv.personalization import Personalizer
from flsv.round import ClientUpdate, Instruction
from flsv.seeding import seed_global_rngs
from flsv.strategy import Strategy
from flsv.uploads import Upload, UploadContext, sanitize_report, upload


class LocalTraining:
    """Loads the clients of a round into a module, one after the other.

    Args:
        module: in which they train; between the rounds it is the global model.
        space: the map between the module and vectors.
        optimizers: the clients' optimizer states.
        windows: of gradient accumulation.
        num_clients: n.
        algorithm: what the clients do differently; None: nothing.
        personalizer: says where a client starts from; None: from what it is sent.
        strategies: what else the clients report is up to these.
        uploads: what happens to their updates before they leave.
        local_epochs: that a client's batches are the batches of.

    Attributes:
        upload_seed: what uploads draw from, such as the noise of a private update; None: from the run's seed, which the
            server knows.
        next_buffers: what the round's first client whose model is finite leaves beside vectors: see :meth:`end_round`.
    """

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        optimizers: ClientOptimizers,
        windows: AccumulationWindows,
        num_clients: int,
        algorithm: ClientAlgorithm | None = None,
        personalizer: Personalizer | None = None,
        strategies: Sequence[Strategy] = (),
        uploads: Sequence[Upload] = (),
        local_epochs: int = 1,
    ) -> None:
        self.module, self.space, self.optimizers, self.windows = module, space, optimizers, windows
        self._num_clients, self._algorithm, self._personalizer = num_clients, algorithm, personalizer
        self._strategies, self._uploads, self._local_epochs = strategies, uploads, local_epochs
        self._constants = space.constants(module)
        self._unsaved = NonVectorState(module, space.left_names)
        self._turn: ClientContext | None = None
        self.upload_seed: int | None = None
        self._within = False

    @property
    def local(self) -> LocalData | None:
        """The data of the client that trains now; None between two clients."""
        return None if self._turn is None else self._turn.local

    @property
    def turn(self) -> ClientContext:
        """Context of the client in training."""
        assert self._turn is not None
        return self._turn

    @property
    def position(self) -> int:
        """How many batches the client has trained on in this round."""
        return self.turn.position

    def begin_round(self) -> None:
        """The module holds the global model."""
        self.space.check(self.module)
        self._unsaved.warn_of_collections()
        self.global_vector = self.space.read(self.module)
        self._before, self._private = self._unsaved.read(), self.space.read_private(self.module)
        self._marks = _marks(self._constants.values())
        # What is not saved is what clients start with: hooks at the start of an epoch may come after this.
        self._buffers: State | None = None
        self.next_buffers: State | None = None
        self._within = True

    def begin_visits(self) -> None:
        """The first client is about to train: what is beside vectors now, all of them start with."""
        if self._buffers is None:
            self._buffers = self._unsaved.read()

    def begin(self, instruction: Instruction, local: LocalData, num_samples: int, batches: int) -> None:
        """A client is about to train for so many batches."""
        self.begin_visits()
        assert self._buffers is not None
        with at(local):
            start = instruction.start if self._personalizer is None else self._personalizer.receive(local, instruction)
            if start is None:
                raise RuntimeError(f"{local!r} was sent no model, and has none of its own.")
            local.visit(start, None)
            self._write(start, self._buffers, {**self._private, **local.private})
            self.optimizers.load(instruction.client_id)
            seed_global_rngs(instruction.seed, "train", instruction.round_index, instruction.client_id)
            context = ClientContext(
                self.module, self.space, instruction, local, start, num_samples, batches, self._local_epochs
            )
            if self._algorithm is not None:
                self._algorithm.begin_client(context)
        self._turn = context

    def suspend(self) -> ClientContext:
        """The client that has begun trains elsewhere, and the module may become another."""
        turn, self._turn = self.turn, None
        self.optimizers.leave()
        return turn

    def resume(self, turn: ClientContext, loss: Tensor) -> None:
        """A client comes back from where it has trained, one step a batch. The module holds what came of it.

        Args:
            turn: its own, from :meth:`suspend`.
            loss: the mean over its batches.
        """
        instruction = turn.instruction
        self.optimizers.load(instruction.client_id)
        # What is drawn when it leaves must depend on nobody else.
        seed_global_rngs(instruction.seed, "train", instruction.round_index, instruction.client_id)
        turn.position = turn.num_steps = turn.batches
        turn.loss = loss * turn.batches
        self._turn = turn

    def begin_batch(self, batch: Any = None) -> None:
        """Before every batch, as the module gets it."""
        turn = self.turn
        self.optimizers.begin_batch(turn.position, last=turn.position + 1 == turn.batches)
        if self.windows.active:
            self.windows.begin_batch(turn.position, turn.batches)
        if self._algorithm is not None:
            with at(turn.local):
                self._algorithm.begin_batch(turn, batch)

    def begin_step(self, optimizer: Any) -> None:
        """Before every step of an optimizer: the gradients are there."""
        if self._turn is None:
            return  # the module's own, between two clients
        context = self._turn
        context.num_steps += 1
        if self._algorithm is not None:
            context.optimizer = optimizer
            context.lr_sum += optimizer.param_groups[0]["lr"]
            context.epoch = context.position * self._local_epochs // context.batches
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            for parameter in self._algorithm.frozen_parameters(context, held):
                parameter.grad = None
            held = [p for p in held if p.grad is not None]
            parameters, gradients = context.shared(held, [p.grad for p in held])
            with at(context.local):
                self._algorithm.gradients(context, parameters, gradients)

    def end_batch(self, loss: Tensor | None) -> bool:
        """After every batch, with its training loss if the module gives one. Whether it was the client's last."""
        turn = self.turn
        turn.loss += float("nan") if loss is None else loss.detach().to(turn.loss).mean()
        turn.position += 1
        return turn.position == turn.batches

    def end(self, out: Tensor | None = None) -> ClientUpdate | None:
        """The client has trained.

        Args:
            out: ``[P]``, where its vector is to be.

        Returns:
            What it sends; None where its model is not finite: then it is as if it had not taken part.
        """
        context, self._turn = self.turn, None
        local, instruction = context.local, context.instruction
        client = instruction.client_id
        if self._algorithm is not None:
            self._algorithm.leave_client(context)
        with at(local):
            self._unsaved.check()
            vector = trained = self.space.read(self.module, out=out)
            private = self.space.read_private(self.module)
            self._check_constant()
            if self.optimizers.upload():
                trained = trained.clone()
                self.space.read(self.module, out=vector)
            # Nobody else must find one client's own state in the module: clients that have none yet, the server.
            self.space.write_private(self.module, self._private)
            start = context.start
            leaving = UploadContext(
                client,
                self._num_clients,
                self.space.num_parameters,
                instruction.round_index,
                instruction.seed if self.upload_seed is None else self.upload_seed,
                local.state,
                start_sent=instruction.start is not None,
            )
            sent, traffic = upload(self._uploads, vector, start, self.global_vector, leaving)
            if sent is not vector:
                trained = trained.clone() if trained is vector else trained
                vector.copy_(sent)
            cut = self.space.num_parameters
            # All numbers at once: every look at one is a wait for the device.
            numbers = [vector.sum(), distances(vector[None, :cut], start[:cut])[0], context.loss / context.position]
            total, norm, loss = torch.stack([number.double() for number in numbers]).tolist()
            if not (math.isfinite(total) or vector.isfinite().all()) or self._broken(private):
                self.optimizers.leave()
                return None
            tell = partial(sanitize_report, self._uploads, leaving) if self._uploads else None
            loss = loss if tell is None else tell("loss", loss)
            local.visit(start, trained, vector, tell)
            if self.next_buffers is None:
                self.next_buffers = self._unsaved.read()
            context.trained, context.sent = trained, vector
            if self._uploads:
                context.upload = partial(self._upload, leaving)
            reports = self._reports(local, context)
            local.private.update(private)
            if self._personalizer is not None:
                self._personalizer.keep(local)
        self.optimizers.save(client)
        return ClientUpdate(client, context.samples, vector, loss, context.num_steps, norm, reports, traffic)

    def end_visits(self) -> None:
        """The cohort has trained. What copies of the module take from it besides vectors is the round's own from here
        on, and not what the last client has left."""
        if self._buffers is not None:
            self._unsaved.write(self._buffers)

    def buffers(self) -> State:
        """What no vector holds, as it is between two rounds: within one, as it was before it."""
        return self._before if self._within else self._unsaved.read()

    def restore(self, buffers: State) -> None:
        """Put into the module what a checkpoint holds of it."""
        self._unsaved.resume(buffers)

    def end_round(self, vector: Tensor) -> None:
        """The round is complete: the module becomes the next global model."""
        self.optimizers.commit()
        # Averages of counters mean nothing: the global model goes on with those of the cohort's first client.
        self._write(vector, self.next_buffers or self._before, self._private)
        self.global_vector, self._within = vector, False

    def discard(self) -> None:
        """Forget an unfinished round: the module is the global model of its start again."""
        self.optimizers.discard()
        if self._algorithm is not None and self._turn is not None:
            self._algorithm.leave_client(self._turn)
        self._turn = None
        self._write(self.global_vector, self._before, self._private)
        self._within = False

    def global_state_dict(self) -> dict[str, Tensor]:
        """The module's ``state_dict`` as it was at the start of the round; the module keeps its client's."""
        now = self.space.read(self.module), self._unsaved.read(), self.space.read_private(self.module)
        self._write(self.global_vector, self._before, self._private)
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        self._write(*now)
        return state

    def _upload(self, leaving: UploadContext, vector: Tensor, start: Tensor, name: str) -> Tensor:
        """See :attr:`ClientContext.upload`."""
        state = {key.removeprefix(name): kept for key, kept in leaving.state.items() if key.startswith(name)}
        sent, _ = upload(self._uploads, vector, start, start, replace(leaving, state=state))
        leaving.state.update({name + key: kept for key, kept in state.items()})
        return sent

    def _broken(self, private: Mapping[str, Tensor]) -> bool:
        """Whether training has made something of the client's own not finite."""
        return any(not t.isfinite().all() and bool(self._private[n].isfinite().all()) for n, t in private.items())

    def _check_constant(self) -> None:
        differ = (_marks(self._constants.values()) != self._marks).any(0).tolist() if self._constants else []
        changed = [name for name, other in zip(self._constants, differ) if other]
        if changed:
            more = ", ..." if len(changed) > 3 else ""
            raise ConfigurationError(
                f"{', '.join(map(repr, changed[:3]))}{more} required no gradient when the fit began, so that they were "
                "taken to be the same at all clients, and training changes them, as where one network follows another "
                'or layers are unfrozen. Say what they are: FederatedLoop(share=["trainable", "name.*"]) shares them, '
                'share=["trainable", "!name.*"] keeps them at their client.'
            )

    def _reports(self, local: LocalData, context: ClientContext) -> dict[str, Tensor]:
        reported: dict[str, Tensor | float] = {}
        if self._algorithm is not None:
            reported |= self._algorithm.end_client(context)
        for strategy in self._strategies:
            reported |= strategy.report(local)
        undeclared = reported.keys() - {name for strategy in self._strategies for name in strategy.reports}
        if undeclared:
            raise RuntimeError(f"clients report {sorted(undeclared)}, which no strategy declares: reports = (...).")
        return {
            name: value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, value in reported.items()
        }

    @torch.no_grad()
    def _write(self, vector: Tensor, buffers: State, private: dict[str, Tensor]) -> None:
        self.space.write(self.module, vector)
        self._unsaved.write(buffers)
        self.space.write_private(self.module, private)


@torch.no_grad()
def _marks(tensors: Iterable[Tensor]) -> Tensor:
    """float64 ``[2, n]``, by which to see that tensors have changed, without copies of them."""
    floating = [
        tensor if tensor.is_floating_point() else tensor.new_zeros(1, dtype=torch.float32) for tensor in tensors
    ]
    if not floating:
        return torch.empty(2, 0)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(floating)])
    return torch.stack([norms, torch.stack([tensor.sum().double() for tensor in floating])]).nan_to_num()
