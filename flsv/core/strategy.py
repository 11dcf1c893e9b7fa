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
from flsv.core.fields import TrainedCoalitions
from flsv.core.local_data import LocalData
from flsv.core.parameter_space import ParameterSpace
from flsv.core.round import Round
from flsv.core.state import ClientUpdate, FederationState
from flsv.utilities.declared import ValidatedArguments

Contributions = Mapping[str, Tensor]
"""The metrics' current values by name: ``[n]`` or ``[n, M]`` over all clients. Clients never seen are NaN, or the
metric's ``prior`` where it has one. A metric that has not been updated yet has no entry."""


@dataclass(frozen=True)
class Federation:
    """What is known before the first round: n = clients, M = classes, P = length of the parameter vector.

    Args:
        global_vector: ``[P]``, the model that the first round starts from.
        space: the map between vectors and modules.
        num_clients: n.
        num_classes: M.
        split_sizes: ``"train"``, ``"val"`` and ``"test"`` to int64 ``[n]``, how many samples every client has of each.
        seed: of the run's random choices.
        optimizers: the clients', as the module configures them.
        strategies: all that take part, by their roles: ``"aggregator"``, ``"personalizer"``, ``"sampler"``,
            ``"client_algorithm"``.
        local_epochs: passes over a client's data per round.
        uploads: what happens to the clients' updates before they leave.
        client_names: by number.
        metrics: the contribution metrics, by name.
        filters: what the server does to updates before they are averaged.
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
    """Base class of the parts of a federation: learns the federation's sizes, has a state, and describes itself."""

    def begin(self, federation: Federation) -> None:
        """Before the first round of a new fit: forget an earlier fit, check, prepare. For a resumed fit
        ``load_state_dict`` is called instead, and then :meth:`resume`.

        Raises:
            ConfigurationError: what is needed is not there.
        """

    def resume(self, federation: Federation) -> None:
        """After ``load_state_dict``, before the first round of a resumed fit. The global vector is that round's."""

    #: Names of the attributes that the next round needs: tensors, numbers, lists and dicts of them. What is in them is
    #: replaced, never changed in place.
    saved: ClassVar[Sequence[str]] = ()

    def state_dict(self) -> dict[str, Any]:
        """The state that the next round needs. By default what :attr:`saved` names."""
        return {name.lstrip("_"): _held(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        for name in self.saved:
            setattr(self, name, _held(state[name.lstrip("_")]))


def _held(value: Any) -> Any:
    """What a dictionary or list holds now, whatever is put into it later; tensors are the same."""
    return value if isinstance(value, Tensor) else copy(value)


class Strategy(Component):
    """A small object with one decision to override.

    It has two sides. What it does at the server may use its own attributes; what it does at a client
    (:meth:`report`) may use its arguments and what is on the client, and nothing that the server has found out since.
    What crosses between them it declares by name: such a name can then be asked for by metrics, and two strategies
    cannot use the same one.

    A strategy that reads a metric stores its name as ``self.metric``; the loop then checks, before training, that a
    metric of that name is defined, and has the shape ``metric_shape`` if the class says one: ``("n",)``, a value per
    client, ``("n", "M")``, per client and class, or ``("n", "n")``, per pair of clients. One that keeps state between
    rounds names it in ``saved``, or returns it from ``state_dict``.

    Attributes:
        sends: names of the tensors that :meth:`send` gives.
        reports: names of what :meth:`report` gives.
        needs_classes: whether it is of use only where the training samples have classes.
        private: patterns (``fnmatch``) of the names of parameters and buffers that stay at their client.
    """

    metric: str | None = None
    #: Whether clients evaluate models for it: then it is tried before the first round whether the module can be copied.
    evaluates: ClassVar[bool] = False
    metric_shape: ClassVar[tuple[str, ...] | None] = None
    #: Whether it reads what the metric says of the very round that it aggregates: then that must be known before.
    metric_of_round: ClassVar[bool] = False
    sends: Sequence[str] = ()
    reports: Sequence[str] = ()
    private: Sequence[str] = ()
    needs_classes: bool = False

    @property
    def needs_class_counts(self) -> bool:
        """Whether clients work with how many samples of each class they, or all, have, which sites are not told; by
        default where it needs classes."""
        return self.needs_classes

    def bind_evaluator(self, games: Any) -> None:
        """Before the first instructions of a fit in which metrics evaluate models on the server's validation set: what
        does, see :class:`flsv.games.CoalitionGames`."""

    def send(self, client: int, start: Tensor | None, state: FederationState) -> Mapping[str, Tensor]:
        """At the server: what goes down to a client of the cohort, beside its start point.

        Args:
            client: the client's number.
            start: ``[P]``, the model that it is sent to start from; None where it goes on from what it has.
            state: the federation at the start of the round.

        Returns:
            Tensors by names declared in ``sends``; not all need to be sent to everybody.
        """
        return {}

    def report(self, local: LocalData) -> Mapping[str, Tensor | float]:
        """At a client, after its training: what it adds to its update, worked out from its own data.

        Returns:
            Tensors or numbers by names declared in ``reports``. Nothing else of the data crosses to the server.
        """
        return {}

    def before_filters(self, updates: Sequence[ClientUpdate], clients: Sequence[Client]) -> None:
        """At the server, before filters look at what the cohort has sent.

        Args:
            updates: of those whose model is finite.
            clients: all n.
        """

    def end_round(self, round: Round) -> None:
        """At the server, after aggregation and personalization: take what the next round needs from this one."""

    def coalition_models(self, round: Round) -> TrainedCoalitions | None:
        """At the server, after :meth:`end_round`: the models of coalitions of clients, where this strategy has them
        trained beside the global one."""
        return None


def own_parts(strategies: Mapping[str, Any]) -> dict[str, Any]:
    """Strategies by role, without the roles that nothing has. Where a metric trains beside the clients' algorithm
    (``ShadowShapley``), this is the algorithm itself."""
    parts = {role: getattr(strategy, "algorithm", strategy) for role, strategy in strategies.items()}
    return {role: strategy for role, strategy in parts.items() if strategy is not None}
