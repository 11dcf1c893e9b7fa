"""Component and Strategy: base classes of aggregators, personalizers, samplers, client algorithms and filters."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from flsv.core.client import Client
from flsv.core.local_data import LocalData
from flsv.core.parameter_space import ParameterSpace
from flsv.core.responses import Numbers
from flsv.core.round import Round
from flsv.core.state import ClientUpdate, FederationState
from flsv.scores.performance import Measure
from flsv.utilities.declared import ValidatedArguments

Contributions = Mapping[str, Tensor]
"""The metrics' current values, ``{metric: values}``: ``[n]`` for n clients, or ``[n, M]`` for M classes. A client that
never took part has NaN, or the metric's ``prior`` if it has one. A metric is missing before its first update."""


@dataclass(frozen=True)
class FederationInfo:
    """Sizes, settings and parts of a federation, known before its first round. :meth:`Component.begin` receives them.

    n = clients, M = classes, P = length of the parameter vector.

    Args:
        global_vector: ``[P]``, the model that the first round starts from.
        space: the map between vectors and modules.
        num_clients: n.
        num_classes: M.
        split_sizes: ``{split: int64 [n]}`` for ``"train"``, ``"val"`` and ``"test"``, each client's number of samples.
        seed: the seed of the run's random choices.
        optimizers: the clients' optimizers, as the module configures them.
        strategies: ``{role: strategy}``. The roles are ``"aggregator"``, ``"personalizer"``, ``"sampler"`` and
            ``"client_algorithm"``.
        local_epochs: number of local epochs per round, the smallest of all clients. 0 if the loop counts steps.
        uploads: the attacks, noise and compression that clients apply to their updates.
        client_names: the clients' names, by id.
        metrics: the contribution metrics, by name.
        filters: the filters that the server applies to updates before it averages them.
    """

    global_vector: Tensor
    space: ParameterSpace
    num_clients: int
    num_classes: int
    split_sizes: Mapping[str, Tensor]
    seed: int
    optimizers: Sequence[Optimizer] = ()
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    local_epochs: int = 1
    uploads: Sequence[Any] = ()
    client_names: Sequence[str] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    filters: Sequence[Any] = ()


class Component(ValidatedArguments, ABC):
    """Base class of strategies and filters. Its state is saved in checkpoints, and ``repr`` shows the constructor's
    arguments.

    Attributes:
        needs: names of attributes of a :class:`flsv.Round` that the component reads, except the clients' updates and
            attributes derived from them, such as ``("game",)`` for games on the server's validation set or
            ``("all_clients",)`` for requests to clients. Before the first round it is checked that they are available.
            Reading an attribute that is not declared raises an error.
    """

    needs: Sequence[str] = ()

    def set_up(self, federation: FederationInfo) -> None:
        """Check the federation, and store the information that the component needs.

        Called before :meth:`begin` or :meth:`resume`.

        Raises:
            ConfigurationError: the component cannot work in this federation.
        """

    def begin(self, federation: FederationInfo) -> None:
        """Create a new state before the first round."""

    def resume(self, federation: FederationInfo) -> None:
        """Prepare the state that :meth:`load_state_dict` has restored for a resumed fit.

        ``federation.global_vector`` is the next round's global model.
        """

    #: Names of the attributes that the next round needs: tensors, numbers, and lists or dicts of them. Assign new
    #: values to them; never change a value in place.
    saved: ClassVar[Sequence[str]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next round needs, by default the :attr:`saved` attributes."""
        return {name.lstrip("_"): _shallow_copy(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        for name in self.saved:
            value = state[name.lstrip("_")]
            setattr(self, name, _shallow_copy(value))


def _shallow_copy(value: Any) -> Any:
    """Copy a value shallowly, but return a tensor itself."""
    if isinstance(value, Tensor):
        return value
    return copy(value)


class Strategy(Component):
    """Base class of aggregators, personalizers, samplers and client algorithms.

    Of the methods below, :meth:`report` runs at the clients, the others run at the server. Methods at the server may
    use the strategy's attributes. ``report`` may use its arguments, the client's data and the strategy's constructor
    arguments, but no state that the server has stored during the run. A strategy declares the names of the values that
    server and clients send each other (``sends``, ``reports``). Metrics read reports by these names, and two strategies
    cannot use the same name.

    A strategy that reads a metric stores the metric's name as ``self.metric``. The loop then checks before training
    that a metric of that name is defined, and that its value has the shape ``metric_shape`` if the class declares one:
    ``("n",)``, a value per client, ``("n", "M")``, per client and class, or ``("n", "n")``, per pair of clients. A
    strategy that keeps state between rounds names it in ``saved``, or returns it from ``state_dict``.

    Attributes:
        sends: names of the tensors that :meth:`send` returns.
        reports: names of the values that :meth:`report` returns.
        needs_classes: whether the strategy needs training samples that have classes. Such a strategy does not work with
            remote sites, which do not know each other's numbers of samples per class.
        private: patterns (``fnmatch``) of the names of parameters and buffers that stay at their client.
    """

    metric: str | None = None
    #: Whether clients evaluate models for this strategy. This requires a module that can be copied.
    evaluates: ClassVar[bool] = False
    #: The performance measure by which models are scored for this strategy, or the name of a classifier's score. None:
    #: accuracy, if it reads utilities.
    measure: Measure | str | None = None
    metric_shape: ClassVar[tuple[str, ...] | None] = None
    #: Whether the aggregator reads the metric's values of the round that it aggregates, not of the previous round.
    metric_of_round: ClassVar[bool] = False
    #: Whether the next model depends on the clients' numbers of optimizer steps, which remote sites do not support.
    reads_steps: ClassVar[bool] = False
    sends: Sequence[str] = ()
    reports: Sequence[str] = ()
    private: Sequence[str] = ()
    needs_classes: bool = False
    #: Whether clients assign values to single samples, for which they need the order of training.
    reads_order: bool = False

    def expected_reports(self) -> Mapping[str, Numbers]:
        """Return the types, shapes and ranges of the values that clients report, ``{name: numbers}``. A remote client's
        update with any other value is excluded from its round. Declare each report that is used as an index. By
        default any finite numbers up to 1e18 are accepted."""
        return {}

    def bind_evaluator(self, games: Any) -> None:
        """Receive the :class:`flsv.games.CoalitionGames` before the first round, if metrics or strategies evaluate
        models."""

    def send(
        self, client: int, start: Tensor | None, state: FederationState
    ) -> Mapping[str, Tensor]:
        """Return the tensors that the server sends a client beside its initial model.

        Args:
            client: the client's id.
            start: ``[P]``, the model that the client starts from. None if it continues from its own model.
            state: the federation at the start of the round.

        Returns:
            Tensors by names declared in ``sends``. Different clients may get different names.
        """
        return {}

    def report(self, local: LocalData) -> Mapping[str, Tensor | float]:
        """Compute the values that the client reports beside its update, after its training.

        Returns:
            Tensors or numbers by names declared in ``reports``. No other information about the data is sent.
        """
        return {}

    def before_filters(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> None:
        """Inspect the finite updates before filters change them. Requests may be sent to any of the n clients."""

    def end_round(self, round: Round) -> None:
        """Store at the server the state that the next round needs."""
