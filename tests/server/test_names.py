"""The names under which strategies let tensors cross are known, and clash, before training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import fit

from flsv.aggregation import FedAvg
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, ContributionMetric
from flsv.participants import LocalData
from flsv.personalization import Standalone
from flsv.sampling import FullParticipation


class Height(FedAvg):
    reports = ("height",)

    def report(self, local: LocalData) -> dict[str, Any]:
        return {"height": torch.tensor([1.0, 2.0]) * local.class_counts.sum()}


class AlsoHeight(FullParticipation):
    reports = ("height",)


class Heights(ContributionMetric):
    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("values", torch.full((num_clients, 2), float("nan")), dist_reduce_fx="sum")

    def update(self, client_ids: torch.Tensor, height: torch.Tensor) -> None:
        self.values[client_ids] = height

    def compute(self) -> torch.Tensor:
        return self.values


def test_any_name_and_shape_can_be_reported(tmp_path: Path) -> None:
    loop = FederatedLoop(Height(), metrics={"heights": Heights()})
    fit(loop, tmp_path, rounds=1)
    assert loop.contributions["heights"].by_class.tolist() == [[54.0, 108.0], [14.0, 28.0], [26.0, 52.0]]


def test_two_of_one_name() -> None:
    with pytest.raises(ConfigurationError, match=r"sampler AlsoHeight.* and aggregator Height.* reports = 'height'"):
        FederatedLoop(Height(), sampler=AlsoHeight())


def test_a_rounds_own_word() -> None:
    class Losses(FedAvg):
        reports = ("losses",)

    with pytest.raises(ConfigurationError, match="a round's own word"):
        FederatedLoop(Losses())


def test_names_have_to_be_declared(tmp_path: Path) -> None:
    class Silent(FedAvg):
        def report(self, local: LocalData) -> dict[str, Any]:
            return {"height": 1.0}

    with pytest.raises(ConfigurationError, match="without declaring its names"):
        FederatedLoop(Silent())

    class Another(Height):
        def report(self, local: LocalData) -> dict[str, Any]:
            return {"width": 1.0}

    with pytest.warns(UserWarning, match="discarded"), pytest.raises(RuntimeError, match=r"report \['width'\]"):
        fit(FederatedLoop(Another()), tmp_path, rounds=1)


def test_a_metric_asks_for_what_nobody_reports() -> None:
    with pytest.raises(ConfigurationError, match=r"asks for \['height'\]"):
        FederatedLoop(metrics={"heights": Heights()}, personalizer=Standalone())


def test_a_fault_inside_a_metrics_property_is_its_own() -> None:
    class Misspelt(ClassSpecificShapley):
        @property
        def round_fields(self):
            return {"updates": self.feilds}

    with pytest.raises(AttributeError, match="feilds"):
        FederatedLoop(metrics={"own": Misspelt()})
