"""The clients and the server of a fit as holders of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv._evaluation.replica import Replica
from flsv.coalition import ModelEvaluator
from flsv.data import FederatedDataModule
from flsv.evaluation import on_device
from flsv.local_data import Client, LocalData, Split
from flsv.parameters import ParameterSpace


class Participants:
    """Makes a :class:`Client` of every client of a data module, and the server's own :class:`LocalData`.

    All of them share one evaluator's copies of the module; each keeps its own batches.

    Args:
        trainer: with its module on its device.
        data: dealt out.
        space: the map between the module and vectors.
        own_model: what a client has just trained, ``[P]`` or None.

    Attributes:
        clients: all n, by number.
        server: the holder of the server's validation set; None where there is none.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        space: ParameterSpace,
        own_model: Callable[[int], Tensor | None],
    ) -> None:
        self._trainer, self._data, self._space = trainer, data, space
        self._first: ModelEvaluator | None = None
        self._replica: Replica | None = None
        population = data.class_counts.sum(0)
        self.clients = [
            Client(
                client,
                LocalData(
                    f"client {client}",
                    partial(self._batches, client),
                    data.class_counts[client],
                    population,
                    self.evaluator,
                    self.module,
                    partial(own_model, client),
                ),
            )
            for client in range(data.num_clients)
        ]
        nothing = torch.zeros_like(population)
        self.server = (
            LocalData("the server", self._validation, nothing, population, self.evaluator, self.module, guarded=False)
            if data.val_dataloader()
            else None
        )

    def evaluator(self, batches: Iterable[Any]) -> ModelEvaluator:
        """An evaluator on these batches."""
        if self._first is None:
            self._first = ModelEvaluator(
                self._trainer.lightning_module,
                self._space,
                batches,
                num_classes=self._data.num_classes,
                context=self._trainer.strategy.precision_plugin.forward_context,
            )
            return self._first
        return self._first.on(batches)

    def module(self, vector: Tensor) -> nn.Module:
        """A copy of the trainer's module with this vector ``[P]`` in it, in evaluation mode; always the same copy."""
        module = self._trainer.lightning_module
        if self._replica is None:
            self._replica = Replica(module, self._space)
        self._replica.follow(module)

        def build(index: int, out: Tensor) -> None:
            out.copy_(vector)

        self._replica.load(build, 0)
        return self._replica.module

    def _batches(self, client: int, split: Split) -> Iterable[Any]:
        return on_device(self._trainer, self._data.client_loader(client, split, shuffle=False))

    def _validation(self, split: Split) -> Iterable[Any]:
        return on_device(self._trainer, self._data.val_dataloader()) if split == "val" else []
