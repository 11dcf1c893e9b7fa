"""The clients' own models: what they are between two rounds, and how good they are on their own test splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.evaluation import count_hits
from flsv.clients.client_manager import ClientManager
from flsv.data import FederatedDataModule
from flsv.parameters import ParameterSpace
from flsv.participants import at
from flsv.personalization import Personalizer
from flsv.round import Instruction


def received_models(
    personalizer: Personalizer | None,
    instructions: Mapping[int, Instruction],
    manager: ClientManager,
    global_vector: Tensor,
) -> dict[int, Tensor]:
    """Client id to the model ``[P]`` that it would use, where that is not the global one."""
    models = {}
    for client, instruction in instructions.items() if personalizer is not None else ():
        with at(manager.locals[client]) as local:
            model = personalizer.own(local, instruction)  # type: ignore[union-attr]
        if model is not global_vector:
            models[client] = model
    return models


def own_accuracy(
    trainer: L.Trainer,
    data: FederatedDataModule,
    space: ParameterSpace,
    manager: ClientManager,
    models: Mapping[int, Tensor],
    global_vector: Tensor,
    clients: Iterable[int] | None = None,
) -> Tensor:
    """The accuracy ``[n]`` of each client's model, the global one where it has none, on its own test split.

    The trainer's module is left with the last client's model.
    """
    module = trainer.lightning_module
    hits, totals = [], []
    private = space.read_private(module)
    for client in range(data.num_clients) if clients is None else clients:
        space.write(module, models.get(client, global_vector))
        with at(manager.locals[client]) as local:
            space.write_private(module, {**private, **local.private})
        correct, total = count_hits(trainer, data.client_loader(client, "test"))
        hits.append(correct)
        totals.append(total)
    counts = torch.stack(hits).tolist() if hits else []
    return torch.tensor([hit / total if total else float("nan") for hit, total in zip(counts, totals)])
