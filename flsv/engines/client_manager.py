"""ClientManager: the clients' and the server's data during a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flsv import games
from flsv._lightning.evaluation import all_on_device, as_module_input, on_device
from flsv.core import Channel, Client, ClientPlacement, LocalData, Split, State
from flsv.core.local_data import Prefixed
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.training.store import ClientStore
from flsv.utilities.errors import ConfigurationError

if TYPE_CHECKING:
    from flsv.games import ModelEvaluator, VectorEvaluator
    from flsv.scores import Measure

#: Function that returns those parameters and buffers of a client's model that are not shared, by name.
Private = Callable[[], Mapping[str, Tensor]]


#: Function that makes a client from its id, its data and the channel that counts its messages.
MakeClient = Callable[[int, LocalData, Channel], Client]


class ClientManager:
    """The clients of a data module, and the server's data. ``make_client`` makes the server's handle of each."""

    # All clients are evaluated with the trainer's module. A site passes its client's id as `first_client`, and the
    # federation's number of classes as `num_classes`, since its own data may not have the last classes.

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        space: ParameterSpace,
        store: ClientStore,
        placement: ClientPlacement | None = None,
        first_client: int = 0,
        num_classes: int | None = None,
        make_client: MakeClient = Client,
    ) -> None:
        self._trainer = trainer
        self._data = data
        self._space = space
        self._store = store
        self._placement = placement
        self._first_client = first_client
        self._num_classes = data.known_num_classes
        class_counts = data.class_counts
        if num_classes is not None:  # these data may have no samples of the last classes
            self._num_classes = num_classes
            class_counts = _pad_classes(class_counts, num_classes)
        self._federation_class_counts = class_counts.sum(0)
        self._model_evaluator: ModelEvaluator | None = None
        self._evaluators_by_measure: dict[Measure, VectorEvaluator] = {}

        self.channel = Channel()
        self.locals = []
        self.clients = []
        for client in range(data.num_clients):
            local = self._local_data(client, class_counts[client])
            self.locals.append(local)
            self.clients.append(make_client(client, local, self.channel))
        self.server: LocalData | None = None
        if data.val_dataloader():
            self.server = self._server_data()

    def _local_data(self, client: int, class_counts: Tensor) -> LocalData:
        # Most arguments are functions, which are called only if their result is needed.
        private = partial(self._private_entries, client)
        if self._placement is None:
            state = partial(self._store.tensors, self._first_client + client)
        else:  # the client's state may be on another rank
            state = partial(self._state, client)
        return LocalData(
            name=client_called(client, self._data.client_names),
            batches=partial(self._batches, client),
            class_counts=class_counts,
            federation_class_counts=self._federation_class_counts,
            evaluator=partial(self.evaluator, private=private),
            module=partial(self.module, private=private),
            state=state,
            score_evaluator=partial(self.client_evaluator, client),
            training=partial(self._training_batches, client),
            order=partial(self._data.client_order, client),
        )

    def _server_data(self) -> LocalData:
        return LocalData(
            name="the server",
            batches=self._validation_batches,
            class_counts=torch.zeros_like(self._federation_class_counts),
            federation_class_counts=self._federation_class_counts,
            evaluator=self.evaluator,
            module=self.module,
            guarded=False,
        )

    def forget(self, client: int) -> None:
        """Discard a client's models and changes of its state in this round."""
        self.locals[client].set_models(initial_model=None, model=None)
        self._store.discard(self._first_client + client)

    def evaluator(self, batches: Iterable[Any], private: Private | None = None) -> ModelEvaluator:
        """Make an evaluator of models ``[P]`` on batches ``(x, y)``. ``private`` returns a client's parameters that are
        not shared."""
        # One evaluator is made, of the first batches. The others are copies of it with other batches and parameters,
        # since nothing else in it depends on the client.
        if self._model_evaluator is not None:
            return self._model_evaluator.with_batches(batches, private)
        self._model_evaluator = games.make_evaluators.classifier_evaluator(
            self._trainer, self._space, batches, num_classes=self._num_classes
        )
        same_batches = None
        return self._model_evaluator.with_batches(same_batches, private)

    def client_evaluator(self, client: int, split: Split, measure: Measure) -> VectorEvaluator:
        """Make a function that scores models ``[P]`` by ``measure`` on a client's split."""
        loader = self._data.client_loader(client, split, shuffle=False)
        read_private = None
        if self._space.private_names:
            read_private = partial(self._private_entries, client)
        try:
            if measure not in self._evaluators_by_measure:
                self._evaluators_by_measure[measure] = self._make_evaluator(loader, measure)
            evaluator = self._evaluators_by_measure[measure]
            return games.make_evaluators.evaluator_on(
                evaluator, self._trainer, loader, private=read_private
            )
        except ConfigurationError as error:
            owner = client_called(client, self._data.client_names)
            raise ConfigurationError(f"{owner}: {error}") from error

    def _make_evaluator(self, loader: Any, measure: Measure) -> VectorEvaluator:
        (evaluator,) = games.make_evaluators.make_evaluators(
            self._trainer, self._space, loader, {"the requested score": measure}
        )
        return evaluator

    def module(self, vector: Tensor, private: Private | None = None) -> nn.Module:
        """Return a copy of the trainer's module with the weights of a model ``[P]``, in evaluation mode."""
        copies = games.module_copies.ModuleCopies(self._trainer.lightning_module)
        module_copy = copies.load().eval()
        module_copy.requires_grad_(False)
        self._space.write(module_copy, vector)
        if private is not None:
            games.module_copies.put_private(module_copy, self._space, private())
        return module_copy

    def _state(self, client: int) -> State:
        assert self._placement is not None
        if not self._placement.has(client):
            raise RuntimeError(
                f"The state of client {client} is on rank {self._placement[client]}. Read it with client.request(...)."
            )
        return self._store.tensors(client)

    def _private_entries(self, client: int) -> Mapping[str, Tensor]:
        """Return those parameters and buffers of a client's model that are not shared, by name."""
        if not self._space.private_names:
            return {}
        state = self._store.peek(self._first_client + client)
        return Prefixed(state, "module.")

    def _batches(self, client: int, split: Split) -> Iterable[Any]:
        loader = self._data.client_loader(client, split, shuffle=False)
        return on_device(self._trainer, loader)

    def _training_batches(self, client: int, stream: torch.Generator) -> Iterable[Any]:
        """Return a client's training batches in the random order of the generator ``stream``."""
        loader = self._data.client_loader(client, "train", generator=stream)
        return (as_module_input(self._trainer, batch) for batch in loader)

    def _validation_batches(self, split: Split) -> Iterable[Any]:
        """Return the server's batches of a split, which are empty unless it is ``"val"``."""
        if split != "val":
            return []
        return all_on_device(self._trainer, self._data.val_dataloader())


def _pad_classes(counts: Tensor, num_classes: int) -> Tensor:
    """Append zero counts for classes without samples: ``[n, M']`` to ``[n, M]``."""
    if counts.shape[1] > num_classes:
        raise ConfigurationError(
            f"the data have {counts.shape[1]} classes, but the federation has {num_classes}. Use the federation's "
            "class numbers, or set the server's num_classes to the number of all classes."
        )
    num_missing = num_classes - counts.shape[1]
    return F.pad(counts, (0, num_missing))  # zeros: [n, num_classes]
