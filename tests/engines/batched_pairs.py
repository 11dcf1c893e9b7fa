"""Fits of both engines that are asserted to be equal."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from small_loops import client_tensors
from torch import Tensor
from toys import Plain, fit, network, sgd, toy_data, vector

from flsv import Reporting
from flsv.federation import FederatedLoop

#: Their epochs have 5, 2, 4, 2 and 1 batches of 8, the last ones of 4, 5, 1, 4 and 8 samples.
SIZES = (31, 11, 21, 10, 7)


class Plainest(Plain):
    """Without BatchNorm."""

    def __init__(self, optimizer: Any = sgd, **kwargs: Any) -> None:
        super().__init__(network(batch_norm=False), optimizer, **kwargs)


def loop(engine: Any, **kwargs: Any) -> FederatedLoop:
    return FederatedLoop(engine=engine, **{"seed": 3, "reporting": Reporting(table=False), **kwargs})


def pair(
    folder: Path,
    make: Any = Plainest,
    data: Any = None,
    rounds: int = 3,
    trainer: dict[str, Any] | None = None,
    engine: Any = "vmap",
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> tuple[FederatedLoop, FederatedLoop]:
    loops = []
    modules = []
    for kind in ("sequential", engine):
        made = {name: value() if isinstance(value, partial) else value for name, value in kwargs.items()}
        loops.append(loop(kind, **made))
        dealt = toy_data(SIZES) if data is None else data()
        modules.append(fit(loops[-1], folder / str(len(loops)), make(), dealt, rounds, **(trainer or {})))
    one, many = loops
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True)
    close(vector(modules[1]), vector(modules[0]))
    assert modules[0].trainer.global_step == modules[1].trainer.global_step
    for name, value in one.board.contributions.items():
        close(many.board.contributions[name], value, msg=name)
    close(many.weights, one.weights)
    assert torch.equal(many.participations, one.participations)
    assert many.client_scores.keys() == one.client_scores.keys()
    for name, scores in one.client_scores.items():
        close(many.client_scores[name], scores)
    assert many.state.starts.keys() == one.state.starts.keys()
    for client, model in one.state.starts.items():
        close(many.state.starts[client], model)
    for mine, theirs in zip(_tensors(client_tensors(many)), _tensors(client_tensors(one)), strict=True):
        close(mine, theirs)
    mine, theirs = many.trained, one.trained
    assert mine.keys() == theirs.keys()
    for client, model in theirs.items():
        close(mine[client], model)
    return one, many


def _tensors(states: Any) -> list[Tensor]:
    return [states[client][name] for client in sorted(states) for name in sorted(states[client])]
