"""Coalitions score themselves by their live module: each equals a plain fit of its members, scored after the fit."""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.data import Loader
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort, UniformSampler
from flsv.server.round_server import NoModel
from helpers import slow_except
from helpers.data import CLASSES
from helpers.fits import state_vector, trainer_for
from helpers.hidden_state import SEED, Base, entropy, make_data
from helpers.recorded import Recorded

ROUNDS = 3
MEMBERS = ((), (0, 1, 2), (0,), (1,), (2,))
QUIET = Reporting(table=False)


class Logs(Base):
    """Logs what its forward gives."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", entropy(self(batch[0]), batch[1]))


class ValidatesWithAverage(Logs):
    """Is trained with its weights, and used with their moving average, which is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [copy.deepcopy(self.net).eval()]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else self.average[0](x)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        old = self.average[0].state_dict()
        new = self.net.state_dict()
        mean = {n: 0.8 * old[n] + 0.2 * v if v.is_floating_point() else v for n, v in new.items()}
        self.average[0].load_state_dict(mean)


class Temperature(Logs):
    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else self.net(x) / self.temperature

    def on_train_epoch_end(self) -> None:
        self.temperature = 0.3 + float(self.trainer.callback_metrics["val_loss"])


class TemperatureAtTheEnd(Temperature):
    def on_train_epoch_end(self) -> None:
        pass

    def on_train_end(self) -> None:
        self.temperature = 0.3 + float(self.trainer.callback_metrics["val_loss"])


class Offsets(Logs):
    """Its offsets are tuned on validation samples."""

    offsets: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else self.net(x) + self.offsets

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.__dict__.setdefault("seen", []).append(self.net(batch[0]))

    def on_validation_epoch_end(self) -> None:
        outputs = torch.cat(self.__dict__.pop("seen"))
        self.offsets = -outputs.mean(0)


class LogsInTraining(Logs):
    """One step serves training and validation, and logs one name in both."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss, on_step=False, on_epoch=True)
        return loss


class Neighbours(Base):
    """An online classifier by nearest neighbours among the features of the round."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Any] = []

    def on_train_epoch_start(self) -> None:
        self.bank.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bank.append((self.net[0](batch[0]).detach(), batch[1]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hits = torch.zeros(len(batch[1]))
        if self.bank:
            features, labels = (torch.cat(parts) for parts in zip(*self.bank))
            neighbours = torch.cdist(self.net[0](batch[0]), features).topk(5, largest=False).indices
            hits = (labels[neighbours].mode(1).values == batch[1]).float()

        self.log("val_knn", hits.mean())


class RegistersABuffer(Logs):
    """Knows its classes' weights only from its samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "class_weight"):
            counts = torch.bincount(batch[1], minlength=CLASSES).clamp(min=1)
            self.register_buffer("class_weight", counts.sum() / counts, persistent=False)
        return entropy(self.net(batch[0]), batch[1], self.class_weight)  # type: ignore[arg-type]


class WarmsUp(Logs):
    """By a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.loss(batch) * min(1.0, float(self.steps) / 12)


class Diverges(Logs):
    """Client 1, which has 4 batches less than others, from the start on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loop: Any = next(
            callback for callback in self.trainer.callbacks if isinstance(callback, FederatedLoop)
        )  # type: ignore[attr-defined]
        return self.loss(batch) * (float("nan") if loop.current_client == 1 else 1.0)


class CannotBeCopied(Logs):
    """Nothing copies it, and a lambda of it holds the module."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = (net for net in [self.net])
        self.functions = [lambda x: self.net(x)]

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[0](x)


KINDS: dict[str, tuple[Callable[[], Any], str]] = {
    "average, outputs": (ValidatesWithAverage, "negative_loss"),
    "average, logged": (ValidatesWithAverage, "val_loss"),
    "temperature, outputs": (Temperature, "negative_loss"),
    "temperature, logged": (Temperature, "val_loss"),
    "temperature at the end": (TemperatureAtTheEnd, "negative_loss"),
    "offsets, outputs": (Offsets, "negative_loss"),
    "offsets, logged": (Offsets, "val_loss"),
    "logged in training, too": (LogsInTraining, "val_loss"),
    "neighbours": (Neighbours, "val_knn"),
    "a registered buffer": (RegistersABuffer, "negative_loss"),
    "a diverging member": (Diverges, "negative_loss"),
    "a diverging member, logged": (Diverges, "val_loss"),
    "no copy, logged": (CannotBeCopied, "val_loss"),
}
#: One kind for each way to the score, outputs and logged values, and a federation that ends.
FAST = {"average, outputs", "temperature, logged", "neighbours", "a diverging member"}
BY_VALIDATION = {"val_loss": "min", "val_knn": "max"}


def make_loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(seed=SEED, reporting=QUIET, **options)


def utility_of_plain_fit(
    make: Callable[[], Any],
    performance: str,
    members: tuple[int, ...],
    rounds: int,
    folder: Path,
    sampler: Any = None,
    **trained: Any,
) -> float:
    """The utility by a plain fit of the members, which nothing but this function scores."""
    module = make()
    dealt = make_data()
    if members:
        cohort = FixedCohort(members) if sampler is None else sampler.among(members)
        trainer = trainer_for(make_loop(sampler=cohort), folder, rounds, **trained)
        with suppress(NoModel):  # a federation that came to nothing has its first model
            trainer.fit(module, dealt)

    return utility_by_hand(module, dealt, performance, folder)


def utility_by_hand(
    module: Any,
    dealt: Any,
    performance: str,
    folder: Path,
) -> float:
    if performance in BY_VALIDATION:
        trainer = trainer_for(None, folder)
        trainer.validate(module, dealt, verbose=False)
        value = float(trainer.callback_metrics[performance])
        is_loss = BY_VALIDATION[performance] == "min"
        return -value if is_loss else value

    dealt.setup("fit")
    inputs, labels = zip(*dealt.val_dataloader())
    y = torch.cat(labels)
    module.eval()
    with torch.no_grad():
        logits = module(torch.cat(inputs))

    if performance == "negative_loss":
        return -float(entropy(logits, y))
    is_right = logits.argmax(1) == y
    return float(is_right.double().mean())


def fit_with_shadow(
    make: Callable[[], Any],
    performance: str,
    folder: Path,
    sampler: Any = None,
    loader: Loader | None = None,
    **trained: Any,
) -> tuple[Recorded, Any]:
    metric = Recorded(
        coalitions="singles", performance=performance, mode=BY_VALIDATION.get(performance), every=1
    )
    options = {} if sampler is None else {"sampler": sampler}
    loop = make_loop(metrics={"shadow": metric}, **options)
    module = make()
    trainer_for(
        loop,
        folder,
        ROUNDS,
        **trained,
    ).fit(module, make_data(loader=loader))
    bound_metric: Any = loop.metrics["shadow"]

    return bound_metric, module


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_coalition_has_the_score_of_a_plain_fit_of_its_members(tmp_path: Path, name: str) -> None:
    make, performance = KINDS[name]
    metric, module = fit_with_shadow(make, performance, tmp_path)

    assert metric.members == list(MEMBERS)

    expected = [
        utility_of_plain_fit(make, performance, members, ROUNDS, tmp_path) for members in MEMBERS
    ]

    torch.testing.assert_close(
        metric.game,
        torch.tensor(expected).double(),
        rtol=0,
        atol=1e-6,
    )

    if make is not TemperatureAtTheEnd:
        first_round = [
            utility_of_plain_fit(make, performance, members, 1, tmp_path) for members in MEMBERS
        ]
        expected = torch.tensor(first_round).double()
        torch.testing.assert_close(metric.first_round, expected, rtol=0, atol=1e-6)

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
    metric, _ = fit_with_shadow(Logs, "val_loss", folder, loader=SMALL_BATCHES)
    return metric


@pytest.mark.parametrize(
    "options",
    [{"limit_val_batches": 1}, {"limit_val_batches": 0.5}, {"check_val_every_n_epoch": 2}],
)
def test_logged_value_is_of_all_validation_batches(
    scored_on_all_batches: Recorded, tmp_path: Path, options: Any
) -> None:
    few_batches, _ = fit_with_shadow(
        Logs,
        "val_loss",
        tmp_path,
        loader=SMALL_BATCHES,
        **options,
    )

    assert torch.equal(few_batches.game, scored_on_all_batches.game)
    assert torch.equal(few_batches.first_round, scored_on_all_batches.first_round)


def test_counter_of_a_coalition_with_a_sampler_is_its_own(tmp_path: Path) -> None:
    measure = "negative_loss"
    sampler = UniformSampler(2)
    metric, _ = fit_with_shadow(WarmsUp, measure, tmp_path, sampler)
    expected = [
        utility_of_plain_fit(
            WarmsUp,
            measure,
            members,
            ROUNDS,
            tmp_path,
            sampler,
        )
        for members in MEMBERS
    ]

    torch.testing.assert_close(
        metric.game,
        torch.tensor(expected).double(),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("work", [{"0": 1, "1": 3, "2": 2}, "5 steps"])
def test_coalition_members_train_as_many_steps_as_in_the_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any
) -> None:
    monkeypatch.setitem(globals(), "make_loop", partial(make_loop, local_epochs=work))
    metric, _ = fit_with_shadow(WarmsUp, "negative_loss", tmp_path)
    expected = [
        utility_of_plain_fit(WarmsUp, "negative_loss", members, ROUNDS, tmp_path)
        for members in MEMBERS
    ]

    torch.testing.assert_close(
        metric.game,
        torch.tensor(expected).double(),
        rtol=0,
        atol=1e-6,
    )


def test_retrained_utility_scores_the_module_after_all_hooks(tmp_path: Path) -> None:
    def trainer(cohort: Any) -> Any:
        return trainer_for(make_loop(sampler=cohort), tmp_path, ROUNDS)

    utility = RetrainedUtility(trainer, TemperatureAtTheEnd(), make_data(), "negative_loss")
    masks = torch.tensor(
        [
            [False, False, False],
            [False, True, False],
            [True, False, True],
        ]
    )

    utilities = utility(masks)

    expected = []
    for members in ((), (1,), (0, 2)):
        expected.append(
            utility_of_plain_fit(TemperatureAtTheEnd, "negative_loss", members, ROUNDS, tmp_path)
        )

    torch.testing.assert_close(
        utilities,
        torch.tensor(expected).double(),
        rtol=0,
        atol=1e-6,
    )
