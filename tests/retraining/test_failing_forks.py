"""Data that no fork can read: fresh processes train the coalitions, or both reasons are named.

As an LMDB environment that was opened before the fork raises, and polars' threads, which a fork has not, hang.
"""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.sampling import FixedCohort
from helpers.data import toy_sets
from helpers.fits import state_vector
from helpers.hidden_state import MEMBERS, ROUNDS, Kind, fit_kind, utility_of_module
from helpers.recorded import Recorded

HELD = threading.Lock()
HELD.acquire()


class Opened(TensorDataset):
    """Can be read in the process that has made it, or unpickled it."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.process = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, process=os.getpid())

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.process:
            self.fail()
        return super().__getitem__(index)

    def fail(self) -> None:
        raise OSError("opened by another process")


class Hangs(Opened):
    def fail(self) -> None:
        HELD.acquire()


class Locked(Opened):
    """Cannot be pickled."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.lock = threading.Lock()


def make_kind(opened: type[Opened] = Opened) -> Kind:
    def sets() -> Any:
        train, test = toy_sets()
        return opened(*train.tensors), test

    return Kind(sets=sets)


@pytest.fixture(scope="module")
def expected_utilities(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The utility of each coalition by a plain fit of its members, of the same samples."""
    folder = tmp_path_factory.mktemp("plain")
    utilities = []
    for members in MEMBERS:
        _, module = fit_kind(Kind(), folder, sampler=FixedCohort(members))
        utilities.append(utility_of_module(module))
    return utilities


@pytest.mark.slow
@pytest.mark.parametrize("opened", [Opened, Hangs])
def test_fresh_processes_train_coalitions_that_forks_cannot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: type[Opened],
    expected_utilities: list[float],
) -> None:
    monkeypatch.setattr("flsv.utilities.supervisor.HANG_S", 2.0)
    shadow = Recorded(coalitions=MEMBERS, performance="negative_loss")
    loop, module = fit_kind(make_kind(opened), tmp_path, metrics={"shadow": shadow})
    metric: Any = loop.metrics["shadow"]
    game = dict(zip(metric.members, metric.game.flatten().tolist()))
    utilities = [game[members] for members in MEMBERS]

    assert utilities == pytest.approx(expected_utilities, abs=1e-6)
    _, module_without_values = fit_kind(make_kind(), tmp_path)
    assert torch.equal(state_vector(module), state_vector(module_without_values))
    assert not list(tmp_path.glob(".coalitions*"))


def test_fork_failure_and_pickle_failure_are_both_named(tmp_path: Path) -> None:
    message = (
        "no values. 1 coalition failed.*OSError: opened by another process. "
        "Nor can fresh .*pickle '_thread.lock'"
    )
    with pytest.warns(UserWarning, match=message):
        loop, _ = fit_kind(
            make_kind(Locked),
            tmp_path,
            metrics={"shadow": Recorded()},
        )

    assert loop.contributions["shadow"].isnan().all()
    assert loop.round_index == ROUNDS
