"""Coalitions that are trained side by side come to what they come to one after the other."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from flsv import FederatedLoop, Reporting
from flsv._lightning.rounding import ROUNDINGS
from flsv.aggregation import (
    CGSV,
    Bucketing,
    FedAdam,
    FedAvg,
    FedNova,
    GeometricMedian,
    ShapFedWA,
    ShapleySoftmax,
    ShapleyWeighted,
)
from flsv.attacks import Alignment, FreeRider, MinMax, Scaling
from flsv.filters import NormCap, OutlierFilter, SampleCap
from flsv.functional.shapley.enumeration import all_coalitions
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley, SurrogateFederatedShapley, WassersteinContribution
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.retraining.side_by_side import NotSideBySide, SideBySideUtility, check_same
from flsv.sampling import FixedCohort
from flsv.training.algorithms import Ditto, FedProx
from flsv.uploads import TopK
from flsv.utilities.errors import ConfigurationError
from helpers import slow_except
from helpers.data import toy_data
from helpers.fits import trainer_for
from helpers.models import Plain, adam, network

#: Nobody, one client, two, and all.
MASKS = all_coalitions(3)[[0, 2, 5, 7]]


def alone(
    folder: Path,
    make: Any = dict,
    module: L.LightningModule | None = None,
    metric: str = "negative_loss",
    mode: Any = None,
    **options: Any,
) -> RetrainedUtility:
    """``make`` gives the arguments of a loop."""

    def trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(**make(), sampler=cohort, seed=5, reporting=Reporting(table=False))
        return trainer_for(loop, folder, rounds=2, limit_val_batches=0, **options)

    data = toy_data((4, 3, 3), server_val=0.3)
    return RetrainedUtility(trainer, module or Plain(network(batch_norm=False)), data, metric, mode=mode)


def cssv() -> dict[str, Any]:
    return {"aggregator": ShapFedWA("cssv"), "metrics": {"cssv": ClassSpecificShapley()}}


FEDERATIONS: dict[str, Any] = {
    "FedAvg": dict,
    "server_lr": lambda: {"aggregator": FedAvg("uniform", server_lr=0.5)},
    "ShapFed-WA": cssv,
    "FedAdam": lambda: {"aggregator": FedAdam(lr=0.02)},
    "FedNova": lambda: {"aggregator": FedNova()},
    "CGSV": lambda: {"aggregator": CGSV(scale=0.1), "metrics": {"cgsv": CosineGradientShapley()}},
    "buckets": lambda: {"aggregator": Bucketing(GeometricMedian())},
    "distance to the server's data": lambda: {
        "aggregator": ShapleySoftmax("distance"),
        "metrics": {"distance": WassersteinContribution()},
    },
    "FedProx": lambda: {"client_algorithm": FedProx(0.5), "local_epochs": 2},
    "alignment, which remembers": lambda: {"uploads": [Alignment(clients=[0])]},
    "free rider": lambda: {"uploads": [FreeRider(mode="noise", scale=0.5, clients=[2])]},
    "privacy": lambda: {"uploads": [GaussianPrivacy(1.0, 0.1)]},
    "error feedback": lambda: {"uploads": [TopK(0.3)]},
    "caps": lambda: {"filters": [OutlierFilter(), NormCap(1.0), SampleCap(1.0)]},
    "excluded": lambda: {"uploads": [Scaling(1e4, clients=[1])], "filters": [OutlierFilter(exclude=True)]},
}


def both(folder: Path, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = alone(folder, *args, **kwargs)(MASKS)
        return SideBySideUtility(alone(folder, *args, **kwargs), 5)(MASKS), expected


#: One of each way in which coalitions could come to something else.
FAST = ("FedAvg", "ShapFed-WA", "FedAdam", "FedProx", "CGSV", "privacy", "error feedback", "excluded")


@pytest.mark.parametrize("name", slow_except(FAST, FEDERATIONS))
def test_side_by_side_utilities_equal_single_fits(tmp_path: Path, name: str) -> None:
    found, expected = both(tmp_path, FEDERATIONS[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.unique().numel() > 2  # the coalitions do differ


@pytest.mark.parametrize("filters", [[], [OutlierFilter()]], ids=["none", "outliers"])
def test_side_by_side_leaves_out_a_client_whose_update_drowns_the_others(tmp_path: Path, filters: list[Any]) -> None:
    """Whatever the threshold, where an upload may be changed to that."""
    masks = MASKS[[0, 2, 3]]  # not the client alone

    def make() -> dict[str, Any]:
        return {"uploads": [Scaling(1e15, clients=[1])], "filters": filters}

    expected = alone(tmp_path, make)(masks)
    torch.testing.assert_close(SideBySideUtility(alone(tmp_path, make), 5)(masks), expected, rtol=1e-4, atol=1e-5)
    assert expected.isfinite().all()


class Noisy(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + 0.1 * torch.randn_like(x), y) if self.trainer.training else batch


def rows_of(*args: Any, **kwargs: Any) -> Any:
    return lambda: Plain(network(batch_norm=False), *args, **kwargs)


MODULES: dict[str, Any] = {
    "BatchNorm": {"module": Plain},
    "Adam": {"module": rows_of(adam)},
    "clipped": {"module": rows_of(), "gradient_clip_val": 0.1},
    "schedule of rounds": {"module": rows_of(scheduler=partial(StepLR, step_size=1))},
    "schedule of steps": {"module": rows_of(scheduler=partial(StepLR, step_size=3, gamma=0.5), interval="step")},
    "augmentation and dropout": {"module": lambda: Noisy(network(batch_norm=False, dropout=0.5))},
    "mixed precision": {"module": rows_of(), "precision": "bf16-mixed", "rtol": 0.02},
    "few batches": {"module": rows_of(), "limit_train_batches": 2},
}


@pytest.mark.parametrize("name", MODULES)
def test_side_by_side_utilities_for_every_module_and_trainer_option_equal_single_fits(
    tmp_path: Path, name: str
) -> None:
    options = dict(MODULES[name])
    rtol = options.pop("rtol", 2e-4)  # bfloat16 has three digits
    found, expected = both(tmp_path, module=options.pop("module")(), **options)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5)


def test_side_by_side_in_chunks_gives_the_same_utilities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def utilities() -> torch.Tensor:
        return SideBySideUtility(alone(tmp_path, module=MODULES["schedule of steps"]["module"]()), 5)(MASKS)

    whole = utilities()
    size = sum(p.numel() for p in network(batch_norm=False).parameters()) * 4
    monkeypatch.setattr(
        "flsv.retraining.coalition_rounds.BYTES", 6 * 4 * size
    )  # four at a time, four and three of them
    monkeypatch.setattr("flsv.retraining.coalition_rounds.LEAST", 4)
    torch.testing.assert_close(utilities(), whole, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr("flsv.retraining.coalition_rounds.LEAST", 5)
    with pytest.raises(NotSideBySide, match="too large to train at once"):
        utilities()


class Fussy(Plain):
    def __init__(self) -> None:
        super().__init__(network(batch_norm=False))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if type(self.net[0].weight) is not nn.Parameter:
            raise KeyError("a weight that is no parameter")
        return super().training_step(batch, batch_idx)


class Annealed(Plain):
    """Changes at the end of a round what no row of a batched model sees."""

    def __init__(self) -> None:
        super().__init__(network(batch_norm=False))
        self.share = 1.0

    def on_train_epoch_end(self) -> None:
        self.share *= 0.3

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.share


class Plateau(Plain):
    def __init__(self) -> None:
        super().__init__(network(batch_norm=False), scheduler=ReduceLROnPlateau)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["monitor"] = "loss"
        return made


def by_values() -> dict[str, Any]:
    return {"aggregator": ShapleyWeighted("ssv"), "metrics": {"ssv": SurrogateFederatedShapley()}}


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "personalizer": (lambda: {"personalizer": Standalone()}, None, "gives each client a start point of its own"),
    "algorithm": (lambda: {"client_algorithm": Ditto()}, None, "client_algorithm=Ditto"),
    "optimizers": (lambda: {"optimizer_state": "persist"}, None, "optimizers go on"),
    "colluders": (lambda: {"uploads": [MinMax(clients=[0])]}, None, "compare the updates of one cohort"),
    "a game in every round": (by_values, None, r"metrics \['ssv'\] evaluate models in every round"),
    "hooks between rounds": (dict, Annealed, "has another model than the run itself"),
    "whatever a step raises": (dict, Fussy, "KeyError: 'a weight that is no parameter'"),
    "a schedule by a value": (dict, Plateau, "ReduceLROnPlateau steps by a value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_side_by_side_with_an_unsupported_setting_raises(tmp_path: Path, name: str) -> None:
    make, module, match = REFUSED[name]
    game = alone(tmp_path, make, None if module is None else module())
    with pytest.raises(NotSideBySide, match=match):
        SideBySideUtility(game, 5)(MASKS)


def test_side_by_side_utilities_by_a_logged_value_equal_single_fits(tmp_path: Path) -> None:
    one, other = (alone(tmp_path, metric="val_acc", mode="max") for _ in range(2))
    torch.testing.assert_close(SideBySideUtility(other, 5)(MASKS), one(MASKS), rtol=0, atol=1e-6)


def test_check_same_allows_the_difference_that_rounding_causes() -> None:
    start, real = torch.zeros(8), torch.ones(8) * 1e-3
    for off, nudged, fine in [(0.005, 0.0, True), (0.05, 0.0, False), (0.05, 0.02, True), (0.05, 0.01, False)]:
        mine = real * (1 + off)
        models = torch.stack([mine, start, mine + nudged * real])
        if fine:
            check_same(models, real, ROUNDINGS["bf16"])
        else:
            with pytest.raises(ConfigurationError, match="the coalition of all clients"):
                check_same(models, real, ROUNDINGS["bf16"])
