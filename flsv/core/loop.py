"""Loop: the attributes of a FederatedLoop, for packages that cannot import it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from torchmetrics import Metric

from flsv.core.client import Client
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Strategy
from flsv.utilities.errors import ConfigurationError


class Loop(Protocol):
    """Protocol with the attributes of a :class:`flsv.FederatedLoop` that other packages use.

    Attributes:
        config: the loop's arguments, a :class:`flsv.configuration.federation_config.FederationConfig`.
        seed: the seed of every random choice. With None it is drawn when the fit starts.
        metrics: the metrics that the loop updates, by name.
        strategies: the aggregator, personalizer, sampler and client algorithm by role.
        clients: the run's clients, by number, from the start of a fit on.
        space: the map between the module and its vectors ``[P]``, from the start of a fit on.
        contribution_metrics: the server's :class:`flsv.server.ContributionMetrics`.
    """

    @property
    def config(self) -> Any: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def metrics(self) -> Mapping[str, Metric]: ...
    @property
    def strategies(self) -> Mapping[str, Strategy]: ...
    @property
    def clients(self) -> Sequence[Client]: ...
    @property
    def space(self) -> ParameterSpace: ...
    @property
    def contribution_metrics(self) -> Any: ...

    def replace(self, **changes: Any) -> Loop:
        """Make a new loop with some arguments changed and no shared state."""
        ...

    def without_files(self) -> Loop:
        """Return a new loop with the same arguments that writes no files."""
        ...


def is_loop(callback: object) -> TypeGuard[Loop]:
    """Return whether a callback is a FederatedLoop, by its class only.

    Example:
        >>> from flsv import FederatedLoop
        >>> is_loop(FederatedLoop()), is_loop("another callback")
        (True, False)
    """
    return callable(getattr(type(callback), "without_files", None))


def find_loop(callbacks: Iterable[object]) -> Loop:
    """Return the FederatedLoop among a trainer's callbacks.

    Raises:
        ConfigurationError: no callback is a FederatedLoop.

    Example:
        >>> from flsv import FederatedLoop
        >>> find_loop(["another callback", FederatedLoop(seed=3)]).seed
        3
        >>> find_loop([])
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: the Trainer has no FederatedLoop: add one to its callbacks.
    """
    loop = next((each for each in callbacks if is_loop(each)), None)
    if loop is None:
        raise ConfigurationError("the Trainer has no FederatedLoop: add one to its callbacks.")
    return loop
