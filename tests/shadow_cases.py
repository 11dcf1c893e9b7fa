"""What the tests of ShadowShapley share: the federation, and a plain loop that trains one coalition alone."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from toys import Plain, toy_data, vector

from flsv import FederatedLoop, Reporting
from flsv.core import Round, TrainedCoalitions
from flsv.data import FederatedDataModule
from flsv.metrics import ShadowShapley
from flsv.utilities.seeding import generator_for, seed_global_rngs

SEED, ROUNDS = 5, 3


def data(proportions: Sequence[int] = (4, 1, 2)) -> FederatedDataModule:
    return toy_data(tuple(proportions), server_val=0.3)


class Kept(ShadowShapley):
    """Keeps the coalitions' models of the last round."""

    models: dict[tuple[bool, ...], Tensor]

    @property
    def round_fields(self) -> dict[str, Any]:
        def game(round: Round) -> Callable[[Tensor], Tensor]:
            assert round.trained is not None
            vars(self)["models"] = models_of(round.trained, len(round.global_vector), round.global_vector.dtype)
            return self._game(round)

        return {"utility": game}


def models_of(trained: TrainedCoalitions, size: int, dtype: torch.dtype) -> dict[tuple[bool, ...], Tensor]:
    found = {}
    for place, mask in enumerate(trained.masks.tolist()):
        found[tuple(mask)] = torch.empty(size, dtype=dtype)
        trained.build(place, found[tuple(mask)])
    return found


def loop(metric: ShadowShapley | None = None, **options: Any) -> FederatedLoop:
    metrics = {"shadow": metric or Kept(coalitions="all"), **options.pop("metrics", {})}
    return FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False), **options)


def by_a_plain_loop(
    module: Plain,
    members: Sequence[int],
    cohorts: Sequence[Sequence[int]],
    weighting: str = "samples",
    rate: float = 1.0,
    dealt: FederatedDataModule | None = None,
) -> Tensor:
    """FedAvg of these clients alone, ``[P]``."""
    module, dealt = copy.deepcopy(module).train(), dealt or data()
    dealt.setup("fit")
    names = [name for name, _ in module.named_parameters()]
    for index, cohort in enumerate(cohorts):
        start, sent, weights = copy.deepcopy(module.state_dict()), [], []
        for client in (client for client in cohort if client in members):
            module.load_state_dict(start)
            seed_global_rngs(SEED, "train", index, client)
            optimizer = module.configure_optimizers()
            stream = generator_for(SEED, "shuffle", index, client, 0)
            for batch in dealt.client_loader(client, "train", generator=stream):
                optimizer.zero_grad()
                x, y = batch
                module.training_step((x.to(module.net[0].weight.dtype), y), 0).backward()
                optimizer.step()
            sent.append(copy.deepcopy(module.state_dict()))
            weights.append(float(dealt.num_samples[client]) if weighting == "samples" else 1.0)
        if not sent:
            continue
        state = {}
        for name, before in start.items():
            if not before.is_floating_point():
                state[name] = sent[0][name]
                continue
            mean = sum(w * each[name] for w, each in zip(weights, sent)) / sum(weights)
            state[name] = before + rate * (mean - before) if name in names else mean
        module.load_state_dict(state)
    return vector(module)


class Reads(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) < 1e9 else 0 * loss


class Draws(Plain):
    """Random numbers that are not torch's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * random.uniform(0.5, 1.5)


class Validates(Plain):
    """Validation moves a buffer."""

    def __init__(self, net: Any) -> None:
        super().__init__(net)
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen += 1
