"""Sites that lack the last classes of the federation, which nothing at their places tells them of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import remote_sites
import torch
from remote_federation import (
    Remotely,
    ServerData,
    assert_same,
    both_with_splits,
    kept_at,
    momentum,
    one_process,
    shapfed,
    site,
)
from remote_sites import NAMES, groups
from torch import Tensor

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.clients.algorithms import InRunValues
from flsv.data import load_image_data
from flsv.engines.remote import Packet
from flsv.metrics import ContributionEstimation, InRunShapley

LACKING = 2  # the site in Osaka
CLASSES = 7  # that it has


@pytest.fixture(autouse=True)
def osaka_lacks_the_last_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    train = load_image_data("digits").train
    labels = torch.tensor([int(train[i][1]) for i in range(len(train))])  # type: ignore[arg-type]

    def dealt(count: int = len(NAMES), plain: Callable[[int], list[int]] = groups) -> list[int]:
        owners = torch.tensor(plain(count))
        return owners.where((owners != LACKING) | (labels < CLASSES), 0).tolist()

    monkeypatch.setattr(remote_sites, "groups", dealt)


def in_run(order: Any = 1, every: int = 1) -> FederatedLoop:
    metrics = {"in_run": InRunShapley(order=order)}
    return shapfed(aggregator=FedAvg(), metrics=metrics, client_algorithm=InRunValues(every), local_epochs=2)


def own_values(remote: Path, client: int) -> Tensor:
    """What a site has kept of its own samples."""
    return kept_at(remote, NAMES[client])[-1]["state"]["in_run_values"]


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_in_run_values_are_those_of_one_process(tmp_path: Path, order: int) -> None:
    make = partial(in_run, order, every=order)
    remote = Remotely(tmp_path / "b", make, momentum)
    assert [each._data.num_classes for each in remote.sites.values()] == [10, 10, CLASSES]
    loop, local = remote.fit(own=ServerData()), one_process(tmp_path / "a", make, momentum)
    assert_same(loop, local)
    values = loop.contributions["in_run"].by_class
    assert values.shape == (3, 10 + order)
    assert values[LACKING, CLASSES:10].tolist() == [0, 0, 0]
    assert values[:, :CLASSES].abs().min() > 0
    for client, state in local.state_dict()["clients"].items():
        assert torch.equal(own_values(tmp_path / "b", client), state["in_run_values"])
    assert loop.channel.bytes(range(3), "up").tolist() == local.channel.bytes(range(3), "up").tolist()


def test_models_of_more_classes_are_evaluated_there(tmp_path: Path) -> None:
    def make() -> FederatedLoop:
        return shapfed(aggregator=FedAvg(), metrics={"fedce": ContributionEstimation()})

    loop, local = both_with_splits(tmp_path, make)
    assert_same(loop, local)
    assert local.contributions["fedce"].isfinite().all()


def test_a_site_with_more_classes_than_the_federation(tmp_path: Path) -> None:
    own = site(tmp_path, 0, in_run)
    told = {"run": "0" * 16, "clients": 3, "client": 0, "classes": 7, "rounds": 1, "round": 0, "seed": 0}
    reply = own.answer(Packet("train", {**told, "counted": None, "visit": "a"}, {"start": torch.zeros(1)}))
    assert reply.kind == "failed"
    assert reply.plain["error"].startswith("it failed with ConfigurationError at client_manager.py")
