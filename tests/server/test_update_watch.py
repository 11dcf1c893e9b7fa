"""Updates that nobody should average: found in their own round, named, and said once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from toys import Plain, fit, network, toy_data, vector

from flsv.attacks import Attack
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley
from flsv.server.update_watch import UpdateWatch


class Huge(Attack):
    """Sends an update with one huge entry, in one round."""

    def __init__(self, size: float = 1e30, round_index: int = 1, clients: list[int] | None = None) -> None:
        super().__init__(clients or [1])
        self.size, self.round_index = size, round_index

    def attack(self, update: Tensor, round_index: int, generator: torch.Generator) -> Tensor:
        update = update.clone()
        if round_index == self.round_index:
            update[3] = self.size
        return update


def watched(loop: FederatedLoop, folder: Path, rounds: int = 2, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, folder, data=toy_data((4, 3, 4, 3)), rounds=rounds, **kwargs)
    return [str(w.message) for w in caught if "update" in str(w.message) or "NaN" in str(w.message)]


@pytest.mark.parametrize("size", [1e4, 1e18, 1e30, 3e38])
def test_a_huge_update_is_named_in_its_round(tmp_path: Path, size: float) -> None:
    (said,) = watched(FederatedLoop(attacks=[Huge(size)], seed=1), tmp_path)
    assert said.startswith("client 1 sent an update far larger than the cohort's in round 1 (norm ")
    assert "exclude_outliers" in said


@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_excluded_the_round_goes_on_without_it(tmp_path: Path, size: float) -> None:
    metrics = {"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()}
    loop = FederatedLoop(metrics=metrics, attacks=[Huge(size, 0)], exclude_outliers=True, seed=1)
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(loop, tmp_path, data=toy_data((4, 3, 4, 3)), rounds=1, logger=logger)
    assert [str(w.message) for w in caught if "left out of the round" in str(w.message)]
    assert vector(module).abs().max() < 100
    assert loop.participations.tolist() == [1, 0, 1, 1]
    for value in (loop.weights, loop.contributions["cgsv"], loop.contributions["cssv"][:, 0]):
        assert value is not None
        assert value.isnan().tolist() == [False, True, False, False]
    rows = [line.split(",") for line in (tmp_path / "run" / "contributions.csv").read_text().splitlines()]
    norms = {int(row[2]): float(row[4]) for row in rows if row[1] == "update_norm"}
    assert norms[1] == pytest.approx(size, rel=1e-5)
    assert max(norms[0], norms[2], norms[3]) < 100
    seen = EventAccumulator(str(tmp_path / "run/clients/1")).Reload()
    assert seen.Scalars("update_norm")[0].value == pytest.approx(size, rel=1e-5)


def test_who_suffers_from_it_is_not_blamed_alone(tmp_path: Path) -> None:
    """In the round after an update of 1e30 everybody returns NaN: the message leads back to whose it was."""
    blamed = r"round 2: every client .* further back: client 1 sent an update far larger"
    with pytest.raises(RuntimeError, match=blamed):
        watched(FederatedLoop(attacks=[Huge()], seed=1), tmp_path, rounds=3)


def test_switched_off(tmp_path: Path) -> None:
    assert watched(FederatedLoop(attacks=[Huge(1e4)], outlier_threshold=None, seed=1), tmp_path) == []
    assert "update_norm,1" in (tmp_path / "contributions.csv").read_text()


def test_honest_clients_of_different_sizes_raise_no_alarm(tmp_path: Path) -> None:
    data = toy_data((20, 1, 3, 9, 1), client_test_fraction=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(FederatedLoop(seed=1), tmp_path, Plain(network(batch_norm=False)), data, rounds=5)
    assert not [w for w in caught if "far larger" in str(w.message)]


def said_by(watch: UpdateWatch, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.judge(*args)
    return [str(w.message) for w in caught]


def test_one_line_names_everybody() -> None:
    norms = torch.tensor([1.0, 1.1, 1e30, 0.9, 1e9]).double()
    (line,) = said_by(UpdateWatch(3.5, exclude=False), 7, [8, 5], [0, 1, 2, 3, 4], norms)
    assert "\n" not in line
    assert "clients 8, 5 returned a model with NaN or infinite entries in round 7" in line
    assert "clients 2, 4 sent an update far larger than the cohort's in round 7 (norm 1e+30, 1e+09; median 1.1)" in line


def test_two_thousand_rounds_are_not_two_thousand_lines() -> None:
    watch, lines = UpdateWatch(3.5, exclude=True), []
    norms = torch.tensor([1.0, 1.1, 1e30]).double()
    for index in range(2000):
        lines += said_by(watch, index, [3], [0, 1, 2], norms)
    assert len(lines) == 4  # the 1st, 10th, 100th and 1000th time
    assert "client 3 (1000 times)" in lines[-1]
    with pytest.warns(UserWarning, match=r"client 3 \(2000 times\) returned .* client 2 \(2000 times\) sent"):
        watch.finish()
    assert "client 4 returned" in said_by(watch, 2000, [4], [0], norms[:1])[0]  # somebody else is news


def test_nothing_left_to_say_at_the_end() -> None:
    watch = UpdateWatch(3.5, exclude=False)
    said_by(watch, 0, [3], [0], torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.finish()


@pytest.mark.parametrize("wrong", [{"outlier_threshold": 0}, {"outlier_threshold": None, "exclude_outliers": True}])
def test_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="outlier_threshold"):
        FederatedLoop(**wrong)
