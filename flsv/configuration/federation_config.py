"""FederationConfig: the checked arguments of a federation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torchmetrics import Metric

from flsv.aggregation import Aggregator, FedAvg
from flsv.core.needs import requirements_of
from flsv.core.sharing import ShareOption, check_share
from flsv.core.state import LocalWork
from flsv.core.strategy import Strategy
from flsv.core.vocabulary import REPORTED_BY_CLIENTS
from flsv.filters import OutlierFilter, UpdateFilter, with_finite_check
from flsv.metrics import ContributionMetric
from flsv.personalization import Personalizer
from flsv.sampling import ClientSampler, FullParticipation
from flsv.training.algorithms import ClientAlgorithm
from flsv.uploads.base import PrivateUpload, Upload, check_uploads
from flsv.utilities.arguments import ReadOnlyArguments
from flsv.utilities.declared import Count, check_argument, checked
from flsv.utilities.errors import ConfigurationError, listed

#: Default number of a metric's figures in a run. TensorBoard keeps as many.
NUM_FIGURES = 10
ROLES = ("aggregator", "personalizer", "sampler", "client_algorithm")
#: Arguments that a loop's ``repr`` shows only if they differ from these defaults.
SHOWN_UNLESS_DEFAULT: dict[str, Any] = {
    "metrics": {},
    "uploads": (),
    "local_epochs": 1,
    "optimizer_state": "reset",
    "share": "all",
    "seed": None,
}
#: The argument ``local_epochs``: epochs of every client, epochs by client name, or ``"100 steps"`` of every client.
LocalEpochs = Count | dict[str, Count] | str


@checked
@dataclass(frozen=True)
class ClientEvaluation:
    """Options for evaluating each client's own model on the client's own test split.

    Args:
        every: number of rounds from one evaluation to the next. 0: no evaluation. Otherwise the last round is
            evaluated, too.
        models: ``"received"``, the client's next initial model, or ``"trained"``, its most recently trained
            (fine-tuned) model.
        keep_trained: whether the loop keeps each client's most recently trained model. Default: only if ``models`` is
            ``"trained"``.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> ClientEvaluation(every=5, models="trained").keeps
        True
    """

    every: Annotated[int, Ge(0)] = 0
    models: Literal["received", "trained"] = "received"
    keep_trained: bool | None = None

    @property
    def keeps(self) -> bool:
        """Return whether the loop keeps each client's most recently trained model."""
        if self.keep_trained is None:
            return self.models == "trained"
        return self.keep_trained


@checked
@dataclass(frozen=True)
class Reporting:
    """Options for what a run prints, logs and writes. They do not change its results.

    Args:
        figures: rounds between two figures of a metric in TensorBoard (the last round always has one). 0: no figures.
            None: at most ten figures in the run, which take at most 5 % of its time before its end.
        table: print a table of the clients at the end.
        files: write ``contributions.csv``, ``run.json`` and the clients' tables, and reserve the run's folder for
            this run. A trainer with neither a logger nor a ``default_root_dir`` has no folder for these files.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> Reporting(figures=0).table
        True
    """

    figures: Annotated[int, Ge(0)] | None = None
    table: bool = True
    files: bool = True

    def draws(self, round_index: int, rounds: int | None) -> bool:
        """Return whether figures are drawn after a round.

        Args:
            round_index: the round's number, from 0.
            rounds: the number of rounds of the run. None or -1: no limit.

        Example:
            >>> [index for index in range(25) if Reporting().draws(index, 25)]
            [2, 5, 8, 11, 14, 17, 20, 23, 24]
        """
        has_last_round = rounds is not None and rounds > 0  # -1: no limit
        if self.figures is not None:
            rounds_between = self.figures
        elif rounds is not None and has_last_round:
            rounds_between = math.ceil(rounds / NUM_FIGURES)
        else:
            rounds_between = NUM_FIGURES

        if rounds_between == 0:
            return False
        rounds_done = round_index + 1
        is_last = has_last_round and rounds_done == rounds
        return is_last or rounds_done % rounds_between == 0


#: For each argument that is an object, a list or a dictionary of objects: the objects' class, and an example.
CLASSES_AND_EXAMPLES: dict[str, tuple[type, str]] = {
    "aggregator": (Aggregator, "flsv.aggregation.FedAvg()"),
    "metrics": (Metric, '{"value": flsv.metrics.ShadowShapley()}'),
    "personalizer": (Personalizer, "flsv.personalization.Standalone()"),
    "sampler": (ClientSampler, "flsv.sampling.UniformSampler(10)"),
    "client_algorithm": (ClientAlgorithm, "flsv.training.algorithms.FedProx(0.1)"),
    "uploads": (Upload, "[flsv.uploads.TopK(0.1)]"),
    "filters": (UpdateFilter, "[flsv.filters.OutlierFilter()]"),
    "evaluation": (ClientEvaluation, "flsv.ClientEvaluation(every=5)"),
    "reporting": (Reporting, "flsv.Reporting(table=False)"),
}


class FederationConfig(ReadOnlyArguments):
    """Checked arguments of a :class:`flsv.FederatedLoop`, with defaults in place of None."""

    _remedy_template = "Use loop.replace({0})."

    def __init__(
        self,
        aggregator: Aggregator | None = None,
        metrics: dict[str, ContributionMetric] | None = None,
        *,
        personalizer: Personalizer | None = None,
        sampler: ClientSampler | None = None,
        client_algorithm: ClientAlgorithm | None = None,
        uploads: list[Upload] | None = None,
        filters: list[UpdateFilter] | None = None,
        local_epochs: LocalEpochs = 1,
        optimizer_state: Literal["reset", "persist"] = "reset",
        share: str | list[str] | Callable[[str, Tensor], bool] = "all",
        evaluation: ClientEvaluation = ClientEvaluation(),
        reporting: Reporting = Reporting(),
        seed: int | None = None,
        engine: Literal["sequential", "vmap"] | Callable[..., Any] = "sequential",
    ) -> None:
        arguments = locals()  # all of them, by name
        for name in CLASSES_AND_EXAMPLES:
            _check_class(name, arguments[name])
        self.aggregator: Aggregator = aggregator or FedAvg()
        self.metrics: Mapping[str, Metric] = dict(metrics or {})
        self.personalizer = personalizer
        self.sampler: ClientSampler = sampler or FullParticipation()
        self.client_algorithm = client_algorithm
        self.uploads = tuple(uploads or ())
        self.filters = with_finite_check([OutlierFilter()] if filters is None else filters)
        self.local_epochs = _checked_epochs(local_epochs)
        self.optimizer_state = optimizer_state
        self.share: ShareOption = list(share) if isinstance(share, list | tuple) else share
        self.evaluation = evaluation
        self.reporting = reporting
        self.seed = seed
        self.engine = engine
        self._read_only = frozenset(vars(self))

        self._check_privacy()
        check_share(self.share)
        check_uploads(self.uploads, self.personalizer)
        named_head(self.parts)  # raises an error if parts name different heads

    def _check_privacy(self) -> None:
        if self.is_private:
            self._check_strategies_need_only_updates()
        if self.privacy is not None and "epsilon" in self.metrics:
            raise ConfigurationError(
                'FederatedLoop(uploads=[GaussianPrivacy(...)]) adds a metric with the name "epsilon", but `metrics` '
                "already has this name. Rename your metric."
            )

    def _check_strategies_need_only_updates(self) -> None:
        for role, strategy in self.strategies.items():
            needs_reports = not REPORTED_BY_CLIENTS.isdisjoint(requirements_of(strategy))
            keeps_client_models = not getattr(strategy, "collaborates", True)
            if needs_reports or keeps_client_models:
                raise ConfigurationError(
                    f"{role}={strategy!r} needs reports of clients, or models that they keep, but with "
                    f"{self.privacy!r} clients send only their noised updates. Remove one of the two."
                )

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """Return the strategies that are set, ``{role: strategy}``, such as the aggregator."""
        strategies = {}
        for role in ROLES:
            strategy = getattr(self, role)
            if strategy is not None:
                strategies[role] = strategy
        return MappingProxyType(strategies)

    def client_weights(self, num_samples: Tensor) -> Tensor:
        """Return the aggregation weights ``[n]`` of n clients: their numbers of samples, or ones."""
        weighting = getattr(self.aggregator, "weighting", "samples")
        if weighting == "uniform":
            return torch.ones_like(num_samples)
        return num_samples

    def check_clients(self, names: Sequence[str]) -> None:
        """Raise ConfigurationError if ``local_epochs`` names other clients than ``names``."""
        if not isinstance(self.local_epochs, dict):
            return
        misnamed = sorted(self.local_epochs.keys() ^ set(names))  # in one of the two only
        if misnamed:
            raise ConfigurationError(
                f"FederatedLoop(local_epochs={self.local_epochs}): the clients are {listed(names, 20, repr)}, but "
                f"{listed(misnamed, 20, repr)} is missing or unknown. Set a number for each client, or one for all."
            )

    def work_of(self, name: str) -> LocalWork:
        """Return the length of the local training in a round of the client ``name``."""
        if isinstance(self.local_epochs, str):
            num_steps, _unit = self.local_epochs.split()  # such as "100 steps"
            return LocalWork(epochs=0, steps=int(num_steps))
        if isinstance(self.local_epochs, dict):
            return LocalWork(epochs=self.local_epochs[name])
        return LocalWork(epochs=self.local_epochs)

    @property
    def text(self) -> str:
        """Describe the strategies, and other arguments that differ from their defaults."""
        assignments = []
        for role, strategy in self.strategies.items():
            is_default_sampler = repr(strategy) == "FullParticipation()"
            if not is_default_sampler:
                assignments.append(f"{role}={strategy!r}")
        for name, default in SHOWN_UNLESS_DEFAULT.items():
            value = getattr(self, name)
            if value != default:
                assignments.append(f"{name}={value!r}")
        return ", ".join(assignments)

    def state_dict(self) -> dict[str, Any]:
        strategies = {role: strategy.state_dict() for role, strategy in self.strategies.items()}
        filters = {type(part).__name__: part.state_dict() for part in self.filters}
        return {"strategies": strategies, "filters": filters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for role, strategy in self.strategies.items():
            strategy.load_state_dict(state["strategies"][role])
        for part in self.filters:
            name = type(part).__name__
            if name in state["filters"]:
                part.load_state_dict(state["filters"][name])

    @property
    def privacy(self) -> PrivateUpload | None:
        """Return the upload transformation that adds noise for differential privacy, or None."""
        for upload in self.uploads:
            if isinstance(upload, PrivateUpload):
                return upload
        return None

    @property
    def is_private(self) -> bool:
        """Return whether clients may send only noised updates, see :class:`flsv.privacy.GaussianPrivacy`."""
        return self.privacy is not None and self.privacy.noise_multiplier > 0

    @property
    def parts(self) -> list[Any]:
        """List all strategies, metrics and uploads."""
        return [*self.strategies.values(), *self.metrics.values(), *self.uploads]

    @property
    def head(self) -> str | None:
        """Return the classifier head that strategies, metrics or uploads name, or None."""
        return named_head(self.parts)


def _check_class(name: str, value: Any) -> None:
    """Raise ConfigurationError if an argument is, or holds, an object of another class than the loop expects."""
    may_be_none = name not in ("evaluation", "reporting")
    if value is None and may_be_none:
        return
    expected_class, example = CLASSES_AND_EXAMPLES[name]
    objects = _objects_in(value, example)
    if not all(isinstance(item, expected_class) for item in objects):
        raise ConfigurationError(
            f"FederatedLoop({name}={value!r}): expected objects of the class {expected_class.__name__}, written as "
            f"in {name}={example}."
        )


def _objects_in(value: Any, example: str) -> list[Any]:
    """Return the objects of a value that is written as in ``example``, ``[None]`` if it is of another kind."""
    if example.startswith("{"):
        is_dictionary = isinstance(value, Mapping | torch.nn.ModuleDict)
        return list(value.values()) if is_dictionary else [None]
    if example.startswith("["):
        return list(value) if isinstance(value, list | tuple) else [None]
    return [value]


def _checked_epochs(local_epochs: Any) -> Any:
    """Check the argument ``local_epochs``, and convert clients' names that YAML has read as numbers."""
    if isinstance(local_epochs, Mapping) and local_epochs:
        checked_epochs = {}
        for client, epochs in local_epochs.items():
            name = str(client)
            checked_epochs[name] = check_argument(
                "FederatedLoop(local_epochs)", name, epochs, Count
            )
        return checked_epochs

    is_text = isinstance(local_epochs, str)
    is_step_count = is_text and re.fullmatch(r"[1-9]\d{0,8} steps", local_epochs)
    if is_step_count or isinstance(local_epochs, int):
        return local_epochs
    raise ConfigurationError(
        f"FederatedLoop(local_epochs={local_epochs!r}): expected a number of epochs, a dictionary of such numbers by "
        'client name, or a number of optimizer steps such as "100 steps".'
    )


def named_head(parts: Iterable[Any]) -> str | None:
    """Return the classifier head's name in the attribute ``head`` of one of ``parts``, or None."""
    parts_by_head = {}
    for part in parts:
        if isinstance(getattr(part, "head", None), str):
            parts_by_head[part.head] = part
    if len(parts_by_head) > 1:
        names = [f"{type(part).__name__}(head={head!r})" for head, part in parts_by_head.items()]
        raise ConfigurationError(
            f"{' and '.join(names)} name different classifier heads. Give all of them the same `head`."
        )
    return next(iter(parts_by_head), None)
