"""FederationConfig: the checked arguments of a federation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from flsv.aggregation import Aggregator, FedAvg
from flsv.attacks.collusion import check_collusion
from flsv.core.parameter_space import ParameterSpace, Share, check_share
from flsv.core.strategy import FederationInfo, Strategy
from flsv.data import FederatedDataModule
from flsv.filters import OutlierFilter, UpdateFilter, with_finite_check
from flsv.personalization import Personalizer
from flsv.privacy import GaussianPrivacy
from flsv.results.folder import Reporting
from flsv.sampling import ClientSampler, FullParticipation
from flsv.uploads import Upload, check_order
from flsv.utilities.declared import Count, check_argument, checked
from flsv.utilities.errors import ConfigurationError, listed

ROLES = ("aggregator", "personalizer", "sampler", "client_algorithm")
#: The argument ``local_epochs``: passes of every client, passes by a client's name, or ``"100 steps"`` of every client.
LocalEpochs = Count | dict[str, Count] | str


class LocalWork(NamedTuple):
    """Length of a client's local training in a round: ``epochs``, or optimizer ``steps`` if ``epochs`` is 0."""

    epochs: int
    steps: int = 0

    def lengths(self, batches: int, window: int) -> list[int]:
        """Return each local epoch's number of batches, of ``batches`` in a full epoch and ``window`` in a step."""
        if self.epochs:
            return [batches] * self.epochs
        passes, rest = divmod(self.steps, max(math.ceil(batches / window), 1))
        return [batches] * passes + [rest * window] * (rest > 0)


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
        ConfigurationError: a number is out of range, or a word is unknown.

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
        return self.models == "trained" if self.keep_trained is None else self.keep_trained


@dataclass(frozen=True)
class FederationConfig:
    """Checked arguments of a :class:`flsv.FederatedLoop`, with defaults in place of None."""

    aggregator: Aggregator
    metrics: Mapping[str, Metric]
    personalizer: Personalizer | None
    sampler: ClientSampler
    client_algorithm: Strategy | None
    uploads: tuple[Upload, ...]
    filters: tuple[UpdateFilter, ...]
    local_epochs: int | dict[str, int] | str
    optimizer_state: Literal["reset", "persist"]
    share: Share
    evaluation: ClientEvaluation
    reporting: Reporting
    seed: int | None
    engine: str | Callable[..., Any]

    def __post_init__(self) -> None:
        given: Any = self
        own = {
            "aggregator": given.aggregator or FedAvg(),
            "metrics": dict(given.metrics or {}),
            "sampler": given.sampler or FullParticipation(),
            "uploads": tuple(given.uploads or ()),
            "filters": with_finite_check(
                [OutlierFilter()] if given.filters is None else given.filters
            ),
            "local_epochs": _checked_epochs(given.local_epochs),
            "share": list(given.share) if isinstance(given.share, list | tuple) else given.share,
        }
        vars(self).update(own)  # the dataclass is frozen
        for name, kind in (("evaluation", ClientEvaluation), ("reporting", Reporting)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(
                    f"FederatedLoop({name}={getattr(self, name)!r}): expected {name}=flsv.{kind.__name__}(...)."
                )
        check_share(self.share)
        check_order(self.uploads)
        check_collusion(self.uploads, self.personalizer)
        named_head(self.parts)
        for role, each in self.strategies.items():
            if self.private and any(
                [each.reports, each.evaluates, not getattr(each, "collaborates", True)]
            ):
                raise ConfigurationError(
                    f"{role} {each!r} needs what clients tell beside their updates, or models that they keep, and "
                    f"nothing but a noised update leaves them with {self.privacy!r}. Leave one of the two out."
                )
        if self.privacy is not None and "epsilon" in self.metrics:
            raise ConfigurationError(
                'FederatedLoop(uploads=[GaussianPrivacy(...)]) adds a metric "epsilon", and there is one of that name: '
                "choose another."
            )

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """Return the strategies that are set, ``{role: strategy}``, such as the aggregator."""
        return MappingProxyType(
            {role: getattr(self, role) for role in ROLES if getattr(self, role) is not None}
        )

    def client_weights(self, num_samples: Tensor) -> Tensor:
        """Return the aggregation weights ``[n]`` of n clients: their numbers of samples, or ones."""
        uniform = getattr(self.aggregator, "weighting", "samples") == "uniform"
        return torch.ones_like(num_samples) if uniform else num_samples

    def check_clients(self, names: Sequence[str]) -> None:
        """Raise ConfigurationError if ``local_epochs`` names other clients than ``names``."""
        given = self.local_epochs
        if isinstance(given, dict) and (other := sorted(given.keys() ^ set(names))):
            raise ConfigurationError(
                f"FederatedLoop(local_epochs={given}): the clients are {listed(names, 20, repr)}, so that "
                f"{listed(other, 20, repr)} is missing or unknown. Give each client a number, or one for all."
            )

    def work_of(self, name: str) -> LocalWork:
        """Return the length of the local training in a round of the client ``name``."""
        given = self.local_epochs
        if isinstance(given, str):
            return LocalWork(0, int(given.split()[0]))
        return LocalWork(given[name] if isinstance(given, dict) else given)

    @property
    def text(self) -> str:
        """Describe the strategies, and other arguments that differ from their defaults."""
        default = {
            "sampler": "FullParticipation()",
            "local_epochs": 1,
            "optimizer_state": "reset",
            "share": "all",
        }
        names = ("metrics", "uploads", "local_epochs", "optimizer_state", "share", "seed")
        given = {**self.strategies, **{name: getattr(self, name) for name in names}}
        shown = {
            n: v
            for n, v in given.items()
            if v not in (None, (), {}) and default.get(n) not in (v, repr(v))
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())

    def state_dict(self) -> dict[str, Any]:
        return {
            "strategies": {
                role: strategy.state_dict() for role, strategy in self.strategies.items()
            },
            "filters": {type(each).__name__: each.state_dict() for each in self.filters},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for role, strategy in self.strategies.items():
            strategy.load_state_dict(state["strategies"][role])
        for each in self.filters:
            if type(each).__name__ in state["filters"]:
                each.load_state_dict(state["filters"][type(each).__name__])

    def federation_info(
        self,
        global_vector: Tensor,
        space: ParameterSpace,
        data: FederatedDataModule,
        seed: int,
        optimizers: Sequence[Optimizer],
        metrics: Mapping[str, Metric],
    ) -> FederationInfo:
        """Return the description of the federation that strategies get before the first round."""
        clients = range(data.num_clients)
        sizes = {
            split: torch.tensor([len(data.client_indices(client, split)) for client in clients])
            for split in ("train", "val", "test")
        }
        given = global_vector, space, data.num_clients, data.num_classes, sizes, seed, optimizers
        epochs = min(self.work_of(name).epochs for name in data.client_names)
        known = self.strategies, epochs, self.uploads
        return FederationInfo(*given, *known, data.client_names, metrics, self.filters)

    @property
    def privacy(self) -> GaussianPrivacy | None:
        """Return the entry of ``uploads`` that adds noise for differential privacy, or None."""
        return next(
            (upload for upload in self.uploads if isinstance(upload, GaussianPrivacy)), None
        )

    @property
    def private(self) -> bool:
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


def _checked_epochs(given: Any) -> Any:
    """Check the argument ``local_epochs``, and convert clients' names that YAML has read as numbers."""
    if isinstance(given, Mapping) and given:
        owner = "FederatedLoop(local_epochs)"
        return {
            str(name): check_argument(owner, str(name), epochs, Count)
            for name, epochs in given.items()
        }
    if isinstance(given, int) or (
        isinstance(given, str) and re.fullmatch(r"[1-9]\d{0,8} steps", given)
    ):
        return given
    raise ConfigurationError(
        f"FederatedLoop(local_epochs={given!r}): expected a number of passes, such numbers by the client's name, or a "
        'number of optimizer steps as "100 steps".'
    )


def named_head(parts: Iterable[Any]) -> str | None:
    """Return the classifier head's name in the attribute ``head`` of one of ``parts``, or None."""
    named = {part.head: part for part in parts if isinstance(getattr(part, "head", None), str)}
    if len(named) > 1:
        who = " and ".join(f"{type(part).__name__}(head={name!r})" for name, part in named.items())
        raise ConfigurationError(
            f"{who} name different heads of one module. Name one and the same."
        )
    return next(iter(named), None)
