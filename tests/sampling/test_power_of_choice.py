"""Power-of-choice against its three steps in plain PyTorch; what asking costs, and what it must not change."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import PROPORTIONS, ROUNDS, SEED, assert_same, batches, buffers_of, copies, plain_sgd, put, unequal_data
from torch import Tensor, nn
from torch.optim import SGD
from toys import Plain, fit, network

from flsv.aggregation import FedAvg, ShapleyWeighted
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric, SurrogateFederatedShapley
from flsv.sampling import PowerOfChoice
from flsv.seeding import generator_for

M, D, LR = 2, 4, 0.1


class Counts(ContributionMetric):
    """What every client has received and sent, round by round."""

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.seen: list[dict[str, list[int]]] = []

    def update(self, client_ids: Tensor, reached: Tensor, downloaded: Tensor, uploaded: Tensor) -> None:
        row = {"cohort": client_ids, "reached": reached.sort().values, "down": downloaded, "up": uploaded}
        self.seen.append({name: values.tolist() for name, values in row.items()})

    def compute(self) -> Tensor:
        return torch.zeros(5)


def loop(**kwargs: Any) -> FederatedLoop:
    parts = {"aggregator": FedAvg("uniform"), "sampler": PowerOfChoice(M, D), "local_epochs": 2, "seed": SEED, **kwargs}
    return FederatedLoop(**parts)


def by_hand(net: nn.Module) -> tuple[nn.Module, list[list[int]], list[list[int]]]:
    """The global model, the candidate sets and the cohorts."""
    data, server = unequal_data(), copy.deepcopy(net)
    sizes = torch.tensor([len(data.client_indices(k)) for k in range(len(PROPORTIONS))]).double()
    candidates, cohorts = [], []
    for r in range(ROUNDS):
        draw = torch.multinomial(sizes / sizes.sum(), D, generator=generator_for(SEED, "cohort", r)).tolist()
        losses = {}
        server.eval()
        for k in draw:
            x, y = (torch.cat(parts) for parts in zip(*data.client_loader(k, "train", shuffle=False)))
            losses[k] = nn.functional.cross_entropy(server(x), y).item()
        chosen = sorted(sorted(draw, key=lambda k: -losses[k])[:M])
        models, buffers = [], []
        for k in chosen:
            client = copy.deepcopy(server).train()
            plain_sgd(LR, momentum=0.0)(client, [list(batches(data, r, k))])
            models.append(copies(client))
            buffers.append(buffers_of(client))
        put(server, [sum(parts) / M for parts in zip(*models)], buffers, [1.0] * M)
        candidates.append(sorted(draw))
        cohorts.append(chosen)
    return server, candidates, cohorts


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_as_by_hand(tmp_path: Path, engine: str) -> None:
    net, counts = network(batch_norm=False), Counts()
    expected, candidates, cohorts = by_hand(net)
    module = Plain(copy.deepcopy(net), partial(SGD, lr=LR))
    fit(loop(metrics={"counts": counts}, engine=engine), tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    size = sum(p.numel() for p in net.parameters())
    assert [row["cohort"] for row in counts.seen] == cohorts
    assert [row["reached"] for row in counts.seen] == candidates
    # The model to be judged, and the model to train from; up goes one, for a loss is a plain number.
    assert all(row["down"] == [2 * size] * M and row["up"] == [size] * M for row in counts.seen)
    assert len({tuple(cohort) for cohort in cohorts}) > 1


def test_as_many_candidates_as_take_part_are_drawn_by_their_shares() -> None:
    sampler = PowerOfChoice(1, 1)
    sampler._sizes = torch.tensor([30.0, 10.0, 0.0, 60.0])
    draw = torch.Generator().manual_seed(0)
    drawn = torch.cat([sampler.sample(4, {}, draw) for _ in range(4000)])
    assert (torch.bincount(drawn, minlength=4) / 4000).tolist() == pytest.approx([0.3, 0.1, 0, 0.6], abs=0.03)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="candidates=1"):  # a rule between arguments
        PowerOfChoice(2, 1)
    with pytest.raises(ConfigurationError, match="Lower candidates to at most 5"):
        fit(loop(sampler=PowerOfChoice(2, 6)), tmp_path, data=unequal_data())
    metrics = {"ssv": SurrogateFederatedShapley()}
    with pytest.raises(ConfigurationError, match="nobody knows a client's chance"):
        fit(loop(aggregator=ShapleyWeighted("ssv"), metrics=metrics), tmp_path, data=unequal_data())
