"""Tiny fits, and the checks in them that parts of all kinds share."""

from __future__ import annotations

import copy
import reprlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv.configuration.federation_config import Reporting
from flsv.data import FederatedDataModule, Splits
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, PartialFederatedShapley
from flsv.models.classifier import ClassifierClient
from flsv.sampling import ClientSampler
from flsv.testing.checks import Case, ensure, equal
from flsv.utilities.seeding import generator_for, isolated_rngs

NUM_CLIENTS = 4
NUM_CLASSES = 3
FEATURES = 4
NUM_VALIDATION_SAMPLES = 12
#: Five are held out at least, since a site tells no score of fewer.
NUM_SAMPLES_OF_CLIENTS = (22, 20, 22, 24)
#: Ids of the clients of each round. Client 3 is in no round.
COHORTS = ((0, 2), (0, 1, 2), (1, 2))
SEED = 1
NUM_ROUNDS = len(COHORTS)
_SPLITS = Splits(client_val=0.25, client_test=0.125)
#: Needs of parts that evaluate models, and so read all of a model.
EVALUATIONS = frozenset({"validation", "responses", "client validation"})
_OUTPUT_OPTIONS = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")

#: Entries of a loop's state with which two fits are compared.
RESULTS_IN_STATE = ("starts", "clients", "trained", "strategies", "weights")


class TinyClassifier(ClassifierClient):
    """Classifier with two linear layers, trained by SGD without momentum."""

    def __init__(self) -> None:
        network = nn.Sequential(
            nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, NUM_CLASSES)
        )
        super().__init__(
            network, num_classes=NUM_CLASSES, optimizer=partial(torch.optim.SGD, lr=0.1)
        )


class Turns(ClientSampler):
    """Sampler that cycles through a list of cohorts."""

    def __init__(self, cohorts: Sequence[Sequence[int]]) -> None:
        self.cohorts = [sorted(cohort) for cohort in cohorts]

    def sample(
        self, num_clients: int, contributions: Any, generator: Any, round_index: int = 0
    ) -> Tensor:
        return torch.tensor(self.cohorts[round_index % len(self.cohorts)])

    def among(self, members: Sequence[int]) -> Turns:
        cohorts = []
        for cohort in self.cohorts:
            # As many of the members as there are in the cohort, those of the cohort first.
            in_cohort = [client for client in members if client in cohort]
            not_in_cohort = [client for client in members if client not in cohort]
            candidates = in_cohort + not_in_cohort
            cohorts.append(candidates[: len(cohort)])
        return Turns(cohorts)

    def inclusion_probabilities(
        self, num_clients: int, contributions: Any, round_index: int = 0
    ) -> Tensor:
        cohort = self.cohorts[round_index % len(self.cohorts)]
        return torch.zeros(num_clients).index_fill(0, torch.tensor(cohort), 1)


SERVER_ID = -1  # in place of a client's id


def samples_of(client: int) -> tuple[Tensor, Tensor]:
    """Return a client's fixed features ``[m, 4]`` and classes ``[m]``."""
    is_server = client == SERVER_ID
    size = NUM_VALIDATION_SAMPLES if is_server else NUM_SAMPLES_OF_CLIENTS[client]
    positions = torch.arange(size)
    first_class = 0 if is_server else client
    y = (positions + first_class) % NUM_CLASSES
    generator = generator_for(0, "samples", client)
    shift = client / 4  # so that clients differ
    noise = torch.randn(size, FEATURES, generator=generator)
    x = noise + shift
    x[positions, y] += 2  # so that there is something to learn
    return x, y


def tiny_data(batch_size: int = 4, equal_clients: bool = False) -> FederatedDataModule:
    """Return a data module of a server and four clients. ``equal_clients`` have one sample, many times."""
    samples = {}
    for client in range(NUM_CLIENTS):
        x, y = samples_of(client)
        if equal_clients:
            x, y = samples_of(0)
            x, y = x[:1].expand_as(x), y[:1].expand_as(y)
        samples[f"site {client}"] = (x, y)

    return FederatedDataModule(
        clients=samples,
        val=samples_of(SERVER_ID),
        batch_size=batch_size,
        splits=_SPLITS,
    )


class Fit(L.Callback):
    """Callback that records the models and the metrics' values of a fit."""

    def __init__(
        self, loop: FederatedLoop, checkpoint: Path | None = None, saved_after: int = 2
    ) -> None:
        self.loop = loop
        self.checkpoint = checkpoint
        self.saved_after = saved_after
        self.models: list[Tensor] = []
        self.contributions: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.models.append(self.loop.state.model().clone())
        contributions = {}
        for name, values in self.loop.contribution_metrics.contributions.items():
            contributions[name] = values.clone()
        self.contributions.append(contributions)
        num_rounds = trainer.current_epoch + 1
        if self.checkpoint is not None and num_rounds == self.saved_after:
            trainer.save_checkpoint(self.checkpoint)

    def results(self) -> dict[str, Any]:
        """Return the final model, the metrics' results and the loop's state, by name."""
        metrics = {}
        for name, metric in self.loop.metrics.items():
            metrics[name] = metric.state_dict()
        result_by_name = {
            "model": self.models[-1],
            "contributions": dict(self.loop.contribution_metrics.contributions),
            "metrics": metrics,
        }
        state = self.loop.state_dict()
        for name in RESULTS_IN_STATE:
            result_by_name[name] = state.get(name)
        return result_by_name


class FitCase(Case):
    """Object under test, whose checks train a federation with it on tiny data."""

    #: Name of the loop's argument that takes the part.
    role: str
    #: Number of rounds of a fit, and the round after which it is interrupted.
    num_rounds = NUM_ROUNDS
    interrupted_after = 2

    def __init__(
        self,
        part: Any,
        *,
        expected_failures: Mapping[str, str] | None = None,
        module: Callable[[], L.LightningModule] = TinyClassifier,
        **loop: Any,
    ) -> None:
        self._module = module
        self.loop = loop
        super().__init__(part, expected_failures)

    def module(self) -> L.LightningModule:
        """Return a new module to train, always with the same initial weights."""
        with isolated_rngs(0, "module"):
            return self._module()

    def loop_arguments(self, part: Any) -> dict[str, Any]:
        """Return the arguments that make a :class:`flsv.FederatedLoop` use ``part``, as ``{"aggregator": part}``."""
        return {self.role: part}

    def make(self, cohorts: Sequence[Sequence[int]] = COHORTS, **changes: Any) -> FederatedLoop:
        """Return a loop with a new copy of the object under test."""
        defaults: dict[str, Any] = {
            "sampler": Turns(cohorts),
            "filters": [],
            "seed": SEED,
        }
        arguments_of_case = {**self.loop, **self.loop_arguments(self.part)}
        # The case's arguments replace defaults, and changes replace all others.
        arguments = {
            **defaults,
            **copy.deepcopy(arguments_of_case),
            "reporting": Reporting(table=False, files=False),
            **changes,
        }
        arguments["metrics"] = _metrics_to_read(arguments)
        return FederatedLoop(**arguments)

    def fit(
        self,
        loop: FederatedLoop,
        rounds: int | None = None,
        data: Any = None,
        checkpoint: Path | None = None,
        ckpt_path: Path | None = None,
        module: L.LightningModule | None = None,
    ) -> Fit:
        """Train a loop and return the record of the fit. Without ``module`` it is the case's."""
        fit = Fit(loop, checkpoint, self.interrupted_after)
        quiet_options: dict[str, Any] = dict.fromkeys(_OUTPUT_OPTIONS, False)
        trainer = L.Trainer(
            max_epochs=rounds or self.num_rounds,
            callbacks=[loop, fit],
            accelerator="cpu",
            num_sanity_val_steps=0,
            **quiet_options,
        )
        if module is None:
            module = self.module()
        if data is None:
            data = tiny_data()
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return fit

    def has_own_module(self) -> bool:
        """Return whether the part needs a module of its own."""
        return self._module is not TinyClassifier

    @cached_property
    def folder(self) -> Path:
        """Return a temporary folder for checkpoints, deleted with the case."""
        self._folder = tempfile.TemporaryDirectory()
        return Path(self._folder.name)

    @cached_property
    def uninterrupted(self) -> Fit:
        """Return the record of a fit of all rounds, to compare others with."""
        return self.fit(self.make(), checkpoint=self.folder / "last.ckpt")


def _metrics_to_read(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loop's metrics, and those that its strategies read."""
    metrics = dict(arguments.get("metrics") or {})
    for argument in arguments.values():
        # A strategy that reads a metric's values has the metric's name as the attribute `metric`.
        name = getattr(argument, "metric", None)
        if not isinstance(name, str) or name in metrics:
            continue
        shape = argument.metric_shape or ()  # of these values, such as ("n", "M")
        if "M" in shape:
            metrics[name] = ClassSpecificShapley()
        else:
            metrics[name] = PartialFederatedShapley()
    return metrics


def resumes(case: FitCase) -> None:
    """Check that a resumed fit ends bitwise like an uninterrupted one. Return everything that the next round needs from
    state_dict, as tensors, numbers, strings, lists and dicts."""
    uninterrupted = case.uninterrupted
    resumed = case.fit(case.make(), ckpt_path=uninterrupted.checkpoint)
    expect_same(resumed.results(), uninterrupted.results())


def expect_same(
    results: Mapping[str, Any],
    expected: Mapping[str, Any],
    rtol: float | None = None,
) -> None:
    """Raise AssertionError unless ``results`` equal the ``expected`` ones, bitwise or up to ``rtol``."""
    names_of_different = []
    for name, value in expected.items():
        if not equal(results.get(name), value, rtol):
            names_of_different.append(name)
    different_results = reprlib.repr([results.get(name) for name in names_of_different])
    expected_results = reprlib.repr([expected[name] for name in names_of_different])
    ensure(
        not names_of_different,
        f"other {', '.join(names_of_different)}: {different_results} instead of {expected_results}",
    )
