"""Coalitions score themselves by their live module: each equals a plain fit of its members, scored after the fit."""

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.data import Loader
from flsv.sampling import FixedCohort, UniformSampler
from flsv.server.round_server import NoModel
from helpers import slow_except
from helpers.fits import state_vector, trainer_for
from helpers.hidden_state import SEED, Base, entropy, make_data
from helpers.recorded import Recorded

ROUNDS = 3
MEMBERS = ((), (0, 1, 2), (0,), (1,), (2,))
QUIET = Reporting(table=False)


class LogsLossOfForward(Base):
    """Logs what its forward gives."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", entropy(self(batch[0]), batch[1]))


class ValidatesWithAverage(LogsLossOfForward):
    """Is trained with its weights, and used with their moving average, which is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [copy.deepcopy(self.net).eval()]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else self.average[0](x)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        earlier_state = self.average[0].state_dict()
        average_state = {}
        for name, value in self.net.state_dict().items():
            if value.is_floating_point():
                average_state[name] = 0.8 * earlier_state[name] + 0.2 * value
            else:
                average_state[name] = value
        self.average[0].load_state_dict(average_state)


class TunesItsTemperature(LogsLossOfForward):
    """Its outputs are divided by a number that follows from the validation loss."""

    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else self.net(x) / self.temperature

    def on_train_epoch_end(self) -> None:
        self.temperature = 0.3 + float(self.trainer.callback_metrics["val_loss"])


class TunesItsTemperatureAtTheEnd(TunesItsTemperature):
    def on_train_epoch_end(self) -> None:
        pass

    def on_train_end(self) -> None:
        self.temperature = 0.3 + float(self.trainer.callback_metrics["val_loss"])


class LogsInTraining(LogsLossOfForward):
    """One step serves training and validation, and logs one name in both."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, on_step=False, on_epoch=True)
        return loss


class ClassifiesByNeighbours(Base):
    """An online classifier by nearest neighbours among the features of the round."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.bank.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bank.append((self.net[0](batch[0]).detach(), batch[1]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if self.bank:
            is_right = self.predict_by_neighbours(x) == y
        else:
            is_right = torch.zeros(len(y), dtype=torch.bool)  # before the first round
        self.log("val_knn", is_right.float().mean())

    def predict_by_neighbours(self, x: Tensor) -> Tensor:
        """The most frequent label of the five nearest training samples."""
        bank_features, bank_labels = zip(*self.bank)
        distances = torch.cdist(self.net[0](x), torch.cat(bank_features))
        neighbours = distances.topk(5, largest=False).indices
        return torch.cat(bank_labels)[neighbours].mode(1).values


class WarmsUp(LogsLossOfForward):
    """Counts its steps, and has the whole loss from the twelfth on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.loss(batch) * min(1.0, float(self.steps) / 12)


class DivergesAtClient1(LogsLossOfForward):
    """Client 1 has 4 batches less than others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        (loop,) = (part for part in callbacks if isinstance(part, FederatedLoop))
        loss = self.loss(batch)
        if loop.current_client == 1:
            return loss * float("nan")
        return loss


#: A module and the performance by which coalitions are scored.
KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "average, outputs": (ValidatesWithAverage, "negative_loss"),
    "temperature, logged": (TunesItsTemperature, "val_loss"),
    "temperature at the end": (TunesItsTemperatureAtTheEnd, "negative_loss"),
    "logged in training, too": (LogsInTraining, "val_loss"),
    "neighbours": (ClassifiesByNeighbours, "val_knn"),
    "a diverging member": (DivergesAtClient1, "negative_loss"),
}
#: One kind for each way to the score, outputs and logged values, and a federation that ends.
FAST = {"average, outputs", "temperature, logged", "neighbours", "a diverging member"}
MODES_OF_LOGGED_VALUES = {"val_loss": "min", "val_knn": "max"}


def make_loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(seed=SEED, reporting=QUIET, **options)


def utility_of_plain_fit(
    make: Callable[[], Any],
    performance: str,
    members: tuple[int, ...],
    rounds: int,
    folder: Path,
    sampler: Any = None,
    **loop_options: Any,
) -> float:
    """The utility by a plain fit of the members, which nothing but this function scores."""
    module = make()
    data = make_data()
    if members:
        cohort = FixedCohort(members) if sampler is None else sampler.among(members)
        loop = make_loop(sampler=cohort, **loop_options)
        with suppress(NoModel):  # a federation that came to nothing has its first model
            trainer_for(loop, folder, rounds).fit(module, data)

    return utility_by_hand(module, data, performance, folder)


def utilities_of_plain_fits(
    make: Callable[[], Any],
    performance: str,
    folder: Path,
    rounds: int = ROUNDS,
    **options: Any,
) -> Tensor:
    """Those of all of ``MEMBERS``."""
    utilities = []
    for members in MEMBERS:
        utility = utility_of_plain_fit(make, performance, members, rounds, folder, **options)
        utilities.append(utility)
    return torch.tensor(utilities).double()


def utility_by_hand(
    module: Any,
    data: Any,
    performance: str,
    folder: Path,
) -> float:
    if performance in MODES_OF_LOGGED_VALUES:
        trainer = trainer_for(None, folder)
        trainer.validate(module, data, verbose=False)
        value = float(trainer.callback_metrics[performance])
        is_loss = MODES_OF_LOGGED_VALUES[performance] == "min"
        return -value if is_loss else value

    data.setup("fit")
    inputs, labels = zip(*data.val_dataloader())
    y = torch.cat(labels)
    module.eval()
    with torch.no_grad():
        logits = module(torch.cat(inputs))

    if performance == "negative_loss":
        return -float(entropy(logits, y))
    is_right = logits.argmax(1) == y
    return float(is_right.double().mean())


class FitWithShadow(NamedTuple):
    metric: Recorded
    module: Any


def fit_with_shadow(
    make: Callable[[], Any],
    performance: str,
    folder: Path,
    loader: Loader | None = None,
    trainer_options: dict[str, Any] | None = None,
    **loop_options: Any,
) -> FitWithShadow:
    metric = Recorded(
        coalitions="singles",
        performance=performance,
        mode=MODES_OF_LOGGED_VALUES.get(performance),  # None for performances of flsv
        every=1,
    )
    loop = make_loop(metrics={"shadow": metric}, **loop_options)
    module = make()
    trainer = trainer_for(loop, folder, ROUNDS, **(trainer_options or {}))
    trainer.fit(module, make_data(loader=loader))

    metric_of_run: Any = loop.metrics["shadow"]
    return FitWithShadow(metric_of_run, module)


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_coalition_has_the_score_of_a_plain_fit_of_its_members(tmp_path: Path, name: str) -> None:
    make, performance = KINDS[name]
    metric, module = fit_with_shadow(make, performance, tmp_path)

    assert metric.members == list(MEMBERS)

    expected = utilities_of_plain_fits(make, performance, tmp_path)
    torch.testing.assert_close(metric.game, expected, rtol=0, atol=1e-6)

    if make is not TunesItsTemperatureAtTheEnd:
        after_one_round = utilities_of_plain_fits(make, performance, tmp_path, rounds=1)
        torch.testing.assert_close(metric.first_round, after_one_round, rtol=0, atol=1e-6)

    plain = make()
    trainer_for(make_loop(), tmp_path, ROUNDS).fit(plain, make_data())

    assert torch.equal(state_vector(module), state_vector(plain)), (
        "the metric has changed the training"
    )


SMALL_BATCHES = Loader(eval_batch_size=8)


@pytest.fixture(scope="module")
def scored_on_all_batches(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("all")
    metric, _ = fit_with_shadow(LogsLossOfForward, "val_loss", folder, loader=SMALL_BATCHES)
    return metric


@pytest.mark.parametrize(
    "trainer_options",
    [{"limit_val_batches": 1}, {"limit_val_batches": 0.5}, {"check_val_every_n_epoch": 2}],
)
def test_logged_value_is_of_all_validation_batches(
    scored_on_all_batches: Recorded, tmp_path: Path, trainer_options: Any
) -> None:
    few_batches, _ = fit_with_shadow(
        LogsLossOfForward,
        "val_loss",
        tmp_path,
        loader=SMALL_BATCHES,
        trainer_options=trainer_options,
    )

    assert torch.equal(few_batches.game, scored_on_all_batches.game)
    assert torch.equal(few_batches.first_round, scored_on_all_batches.first_round)


def test_counter_of_a_coalition_with_a_sampler_is_its_own(tmp_path: Path) -> None:
    performance = "negative_loss"
    sampler = UniformSampler(2)

    metric, _ = fit_with_shadow(WarmsUp, performance, tmp_path, sampler=sampler)

    expected = utilities_of_plain_fits(WarmsUp, performance, tmp_path, sampler=sampler)
    torch.testing.assert_close(metric.game, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("local_epochs", [{"0": 1, "1": 3, "2": 2}, "5 steps"])
def test_coalition_members_train_as_many_steps_as_in_the_federation(
    tmp_path: Path, local_epochs: Any
) -> None:
    performance = "negative_loss"

    metric, _ = fit_with_shadow(WarmsUp, performance, tmp_path, local_epochs=local_epochs)

    expected = utilities_of_plain_fits(WarmsUp, performance, tmp_path, local_epochs=local_epochs)
    torch.testing.assert_close(metric.game, expected, rtol=0, atol=1e-6)
