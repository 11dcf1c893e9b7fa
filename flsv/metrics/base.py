"""ContributionMetric: the base class of all contribution metrics."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torchmetrics import Metric

from flsv.core import Client, ClientMatrix, LocalData
from flsv.metrics.intervals import WithIntervals
from flsv.metrics.needs import Guide, needs_in_words
from flsv.metrics.plot import plot_contributions
from flsv.metrics.round_checks import check_clients, check_rows
from flsv.utilities.arguments import ReadOnlyArguments
from flsv.utilities.declared import Count, ValidatedArguments
from flsv.utilities.display import html_table
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host
from flsv.utilities.plots import shows


def latest(stretches: Tensor) -> Tensor:
    """Return for each entry the last value that is not NaN, from the states ``[W, ...]`` of W successive parts of a
    run, earliest first.
    """
    latest = stretches[0]
    for later in stretches[1:]:
        latest = torch.where(later.isnan(), latest, later)
    return latest


class ContributionMetric(ReadOnlyArguments, ValidatedArguments, WithIntervals):
    """Base class of contribution metrics.

    ``compute()`` returns ``[num_clients]`` or ``[num_clients, num_classes]``; values of clients that never took part
    are NaN. A subclass defines ``init_states`` (its ``add_state`` calls), ``update`` and ``compute``. The names of
    ``update``'s arguments are those of :class:`flsv.Round`: inside a :class:`flsv.FederatedLoop` the metric gets the
    attributes of the round that it names. Before each update the ``client_ids`` are checked, and whether each tensor
    has one row per client; the state ``rounds`` counts the updates.

    The memory does not grow with the number of rounds, unless a metric says so: each round is folded into the states. A
    state's reduction must therefore merge two such states, the later state second (``forward``, ``merge_state`` and a
    sync between processes call it).

    Arguments that a subclass stores before it calls this constructor are read-only: the states depend on them.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``, which takes it from the data.
        num_classes: M, the number of classes. None inside a ``FederatedLoop``, which takes it from the data.
        kwargs: further arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: a number is out of range, or an argument is changed after construction.
    """

    _instead = "Make another metric, with {0}."
    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    per_class = True
    """Whether values are ``[n, M]``, so that the number of classes has to be known."""

    @property
    def needs_classes(self) -> bool:
        """Whether the training samples must have classes; by default True if values are per class."""
        return self.per_class

    prior: float | None = None
    """Value that samplers, aggregators and personalizers assume for a client that never took part; None: they get NaN.
    ``compute`` does not return this value.
    """

    uses_ground_truth = False
    """Whether values are compared with facts that no real server knows: every client's ``class_counts``."""

    evaluates = False
    """Whether clients evaluate models for the metric on their own validation samples: then every client must have
    validation samples.
    """

    to_pay_by = False
    """True: shares of a budget may be shown by the values, which measure how much a client adds to the model."""

    mergeable = True
    """Whether the metric's states of several parts of a run can be merged, by ``merge_state`` or between processes."""

    unit = "contribution"
    """Unit of a value, as on an axis. With ``sign`` and ``cost`` it is part of the :meth:`guide`."""

    sign = ""
    """Meaning of positive, negative and zero values."""

    cost = "see its documentation."
    """Cost of a round, in words."""

    reported_by: str | None = None
    """The setting, in words, that makes clients report the metric's inputs; None if every round has these inputs."""

    def __init__(
        self,
        num_clients: Annotated[int, Ge(2), "A federation needs 2 clients."] | None = None,
        num_classes: Count | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_clients, self.num_classes = num_clients, num_classes
        self.class_names: Sequence[str] | None = None
        self.client_names: Sequence[str] | None = None
        self.class_counts: Tensor | None = None
        if self._sized:
            self._create_states()
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, ContributionMetric)]
        taken = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
        self._read_only = frozenset(taken & vars(self).keys() - self._defaults.keys())

    def bind(
        self,
        num_clients: int,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        class_counts: Tensor | None = None,
        client_names: Sequence[str] | None = None,
    ) -> None:
        """Take the number of clients and classes from the federation, or check them against it.

        Args:
            num_clients: n, the number of clients.
            num_classes: M, the number of classes.
            class_names: names of the classes, for pictures.
            class_counts: ``[n, M]``, the numbers of training samples of each client and class, which no server of a
                real federation would know. Only a metric with ``uses_ground_truth`` stores them, to compare its values
                with them.
            client_names: names of the clients, for pictures.

        Raises:
            ConfigurationError: the metric was constructed with another number of clients or classes.
        """
        for name, value in (("num_clients", num_clients), ("num_classes", num_classes)):
            mine = getattr(self, name)
            if mine is not None and mine != value:
                raise ConfigurationError(
                    f"{type(self).__name__}({name}={mine}) does not fit the federation, which has {name}={value}. "
                    f"Leave {name} out: it is taken from the data."
                )
        self.class_names = class_names
        self.client_names = client_names
        self.class_counts = class_counts if self.uses_ground_truth else None
        bound = self._sized
        vars(self).update(num_clients=num_clients, num_classes=num_classes)
        if not bound:
            self._create_states()

    def check(self, num_samples: Tensor) -> None:
        """Check the clients' numbers of training samples, which the server knows; called before training.

        Args:
            num_samples: ``[n]``, the numbers of training samples.

        Raises:
            ConfigurationError: the metric cannot work with clients of these sizes.
        """

    def check_rounds(self, rounds: int) -> None:
        """Warn if a run of ``rounds`` rounds will not have some of the values; called before training if the number is
        known.
        """

    def check_server(self, server_data: LocalData | None, model: Tensor) -> None:
        """Raise ConfigurationError if the metric cannot work with the server's validation data (None: there are none)
        or with the model ``[P]`` from which training goes on; called before training."""

    @abstractmethod
    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        """Declare the states with ``add_state``; called once, as soon as the needed sizes are known."""

    if hasattr(Metric, "merge_state"):  # torchmetrics 1.5

        def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
            """Merge the rounds of another metric, or of its state, into this metric; they count as earlier than this
            metric's rounds.

            Raises:
                ConfigurationError: the other metric has another size or other settings.
            """
            self._check_merge(incoming_state)
            super().merge_state(incoming_state)

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        self._check_mergeable()
        super()._sync_dist(*args, **kwargs)

    def _check_mergeable(self) -> None:
        if not self.mergeable:
            raise ConfigurationError(
                f"{type(self).__name__} needs all rounds in one place: parts of a run cannot be merged, nor two "
                "processes' rounds synchronized. Update one metric with every round."
            )

    def _check_merge(self, incoming: dict[str, Any] | Metric) -> None:
        self._check_mergeable()
        if not self._sized:
            raise ConfigurationError(
                f"{type(self).__name__} does not know how many clients and classes there are, so it has nothing to "
                "merge into: pass num_clients and num_classes."
            )
        if not isinstance(incoming, type(self)):
            return
        mine, theirs = _settings(self), _settings(incoming)
        differ = [f"{n}={mine[n]!r} and {theirs[n]!r}" for n in mine if n in theirs and mine[n] != theirs[n]]
        if differ:
            raise ConfigurationError(
                f"{type(self).__name__} metrics with {', '.join(differ)} cannot be merged: their values do not mean "
                "the same. Give both the same arguments."
            )

    def diagnostics(self) -> dict[str, Tensor]:
        """Return further values to log after an update, by name: scalars ``[]`` or one number per client
        ``[num_clients]``.
        """
        return {}

    def columns(self) -> list[str] | None:
        """Return the names of the columns of ``[num_clients, M]`` values in the reports; None: the columns are the
        classes.
        """
        return None

    def per_client(self, value: Tensor) -> Tensor:
        """Reduce a value that ``compute`` returned to one number per client ``[num_clients]``: by default the mean over
        classes.
        """
        return value.mean(-1) if value.ndim == 2 else value

    def __repr__(self) -> str:
        """Return the class's name with the arguments that differ from their defaults."""
        parameters = inspect.signature(type(self)).parameters
        values = {name: getattr(self, name) for name in parameters if hasattr(self, name) and name not in _OF_THE_DATA}
        shown = [
            f"{name}={value!r}"
            for name, value in values.items()
            if not isinstance(value, Tensor) and parameters[name].default != (None if value == {} else value)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """Return the clients' values so far as an HTML table, for a notebook."""
        rounds = int(getattr(self, "rounds", 0))
        values = self.per_client(self.compute()).tolist() if rounds else []
        names = self.client_names or [f"client {i}" for i in range(len(values) if isinstance(values, list) else 0)]
        rows = [[name, f"{value:.4g}"] for name, value in zip(names, values if isinstance(values, list) else [])]
        return html_table(f"{self!r}, {rounds} rounds", ["client", self.guide().unit], rows)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "plot" in vars(cls):
            cls.plot = shows(cls.plot)  # type: ignore[method-assign]  # wrapped on purpose

    def guide(self) -> Guide:
        """Return a guide to reading the values: their unit, sign, needs and cost."""
        sign = self.sign or ("more is better." if self.higher_is_better else "less is better.")
        return Guide(self.unit, sign, needs_in_words(self), self.cost)

    @shows
    def plot(
        self,
        val: Tensor | Sequence[Tensor] | None = None,
        ax: Any = None,
        *,
        limits: tuple[float, float] | None = None,
        stderr: Tensor | None = None,
        title: str | None = None,
    ) -> Any:
        """Plot the contributions: bars for one value per client, a heatmap for per-class values, lines for several
        rounds' values. :func:`flsv.utilities.plots.waterfall` is in the style of shap.

        Args:
            val: a value that ``compute`` or ``forward`` returned, or a list of such values, one per round; by default
                ``compute()``.
            ax: a matplotlib axis to draw into.
            limits: lowest and highest value of the scale; by default the lowest and highest of ``val``.
            stderr: standard errors ``[num_clients]``, drawn on the bars; without ``val``, ``diagnostics`` provides the
                default.
            title: title of the picture; by default the class's name.

        Returns:
            ``(figure, axis)``. As the last line of a notebook's cell the pair is shown as the picture.
        """
        if val is None:
            val = self.compute()
            stderr = self.diagnostics().get("stderr") if stderr is None else stderr
        return plot_contributions(
            val if isinstance(val, Tensor) else [self.per_client(value) for value in val],
            ax=ax,
            name=title or type(self).__name__,
            class_names=self.columns() or self.class_names,
            columns="class" if self.columns() is None else "",
            client_names=self.client_names,
            unit=self.guide().unit,
            limits=limits,
            stderr=stderr,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> torch.nn.Module:
        """Apply a function to the states, as ``torch.nn.Module`` does for ``to``, ``cuda`` and ``set_dtype``; the last
        leaves integer states alone, since they are counts."""
        if not self._dtype_convert:
            return super()._apply(fn, exclude_state)
        return super()._apply(lambda tensor: fn(tensor) if tensor.is_floating_point() else tensor, exclude_state)

    @property
    def update_called(self) -> bool:
        """Return whether the metric has been updated, also before it was saved: torchmetrics' own count is not."""
        return super().update_called or bool(getattr(self, "rounds", 0))

    @property
    def _sized(self) -> bool:
        return self.num_clients is not None and (self.num_classes is not None or not self.per_class)

    def _create_states(self) -> None:
        assert self.num_clients is not None
        self.init_states(self.num_clients, self.num_classes)
        self.add_state("rounds", torch.tensor(0), dist_reduce_fx="sum")
        self._create_spread(self.num_clients)
        self.persistent(True)

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``update`` as torchmetrics does; the wrapper also checks the round's clients and counts the rounds."""
        arguments = inspect.signature(update)

        @functools.wraps(update)
        def counted(*args: Any, **kwargs: Any) -> None:
            bound = arguments.bind(*args, **kwargs).arguments
            if not self._sized:
                raise ConfigurationError(
                    f"{type(self).__name__} does not know how many clients and classes there are: pass num_clients and "
                    "num_classes, or use it in a FederatedLoop."
                )
            if "client_ids" in bound:
                assert self.num_clients is not None
                check_clients(bound["client_ids"], self.num_clients)
                check_rows(bound["client_ids"], bound)
            with torch.inference_mode(False):  # tensors made in inference mode cannot be changed outside of it
                update(*args, **kwargs)
                self.rounds += 1

        return super()._wrap_update(counted)

    def _check_asked(self, client_ids: Tensor, clients: Sequence[Client]) -> None:
        """Raise unless the objects ``clients`` are the round's clients, in the order of ``client_ids``."""
        if [client.id for client in clients] != on_host(client_ids):
            raise ValueError(f"clients {[c.id for c in clients]} are not those of client_ids={client_ids.tolist()}.")

    @staticmethod
    def _matrix(client_ids: Tensor, client_updates: Tensor | ClientMatrix) -> ClientMatrix:
        """Convert a tensor of updates ``[k, P]`` to a :class:`ClientMatrix`, which a ``FederatedLoop`` passes instead
        of a tensor.
        """
        if not isinstance(client_updates, Tensor):
            return client_updates
        if client_updates.ndim != 2 or len(client_updates) != len(client_ids):
            raise ValueError(f"expected client_updates [k={len(client_ids)}, P], got {list(client_updates.shape)}.")
        return ClientMatrix(client_updates, [torch.zeros_like(client_updates[0])] * len(client_updates))


#: Names of the constructor's arguments whose values a metric takes from the federation.
_OF_THE_DATA = ("num_clients", "num_classes")


def _settings(metric: Metric) -> dict[str, Any]:
    """Return ``{name: value}`` for the metric's fold and its arguments that are numbers, texts or dataclasses."""
    names = [*inspect.signature(type(metric)).parameters, "fold"]
    values = {name: getattr(metric, name, None) for name in names}
    plain = (int, float, str, dict, type(None))
    return {name: value for name, value in values.items() if isinstance(value, plain) or is_dataclass(value)}
