"""ContributionMetric: the base class of all contribution metrics."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torchmetrics import Metric

from flsv.core import VOCABULARY, Client, ClientMatrix, Values
from flsv.metrics.guide import needs_in_words
from flsv.scores import OWN_SCORES
from flsv.scores.performance import Measure
from flsv.utilities.arguments import ReadOnlyArguments
from flsv.utilities.declared import Count, ValidatedArguments
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host

#: The properties that a metric's values have, see :attr:`ContributionMetric.claims`.
Claims = Sequence[Literal["value", "effect", "agreement", "weight"]]
#: Names of a run's table whose numbers belong to a single round and are not valid in the next.
NAMES_OF_ONE_ROUND = ("weight", *OWN_SCORES, "update_norm")
#: Prefix of the scores of clients' own models in curves.
CLIENT_SCORE_PREFIX = "client_"
#: Names that no metric may have, since a run's table, curves or pictures use them.
NAMES_IN_USE = (
    *NAMES_OF_ONE_ROUND,
    "train_loss",
    *(f"{CLIENT_SCORE_PREFIX}{score}" for score in OWN_SCORES),
    "data",
    "how to read",
)


def latest(stretches: Tensor) -> Tensor:
    """Merge the states ``[W, ...]`` of successive parts of a run. The last number that is not NaN is kept."""
    latest = stretches[0]
    for later in stretches[1:]:
        latest = torch.where(later.isnan(), latest, later)
    return latest


def last_values(stretches: Tensor) -> Tensor:
    """Merge the last rounds' values of W successive parts of a run, ``[W, L, ...]``. Return the run's last L values,
    with NaN in front if there are fewer."""
    num_rounds = stretches.shape[1]
    rounds = stretches.flatten(0, 1)  # [W * L, ...]
    is_empty = rounds.flatten(1).isnan().all(1)
    padding = torch.full_like(stretches[0], torch.nan)
    return torch.cat([padding, rounds[~is_empty]])[-num_rounds:]


_DEFINE_RESULT = "Define result(), which returns values, their intervals and their evidence as one flsv.core.Values."
#: Attributes of metrics that flsv 3.0.0 has read, and what is defined instead.
_NO_LONGER_READ = {
    "intervals": _DEFINE_RESULT,
    "error_bars": _DEFINE_RESULT,
    "payment_record": _DEFINE_RESULT,
    "extension": "Set trains_coalitions = True if the values need trained coalitions.",
}


class ContributionMetric(ReadOnlyArguments, ValidatedArguments, Metric):
    """Base class of contribution metrics.

    A contribution metric is a torchmetrics metric that is updated once per round. ``compute()`` returns
    ``[num_clients]`` or ``[num_clients, num_classes]``. Values of clients that never took part are NaN. A subclass
    defines ``init_states`` (its ``add_state`` calls), ``update`` and ``compute``. The names of ``update``'s arguments
    are attributes of :class:`flsv.Round`: a :class:`flsv.FederatedLoop` passes these attributes of each round. This
    class checks before each update that the ``client_ids`` are valid and that each tensor has one row per client, and
    counts the updates in the state ``rounds``.

    The states do not grow with the number of rounds, unless a metric says so: ``update`` accumulates each round into
    them. A state's reduction must be able to merge the states of two parts of a run, the later part second.
    ``forward``, ``merge_state`` and a sync between processes call it.

    Arguments that a subclass stores before it calls this constructor are read-only afterwards, since the states depend
    on them.

    Args:
        num_clients: n, the number of clients. None inside a ``FederatedLoop``.
        num_classes: M, the number of classes. None inside a ``FederatedLoop``.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ConfigurationError: a number is out of range, or an argument is changed after construction.
    """

    _remedy_template = "Make another metric, with {0}."
    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    per_class = True
    """Whether values are ``[n, M]``, so that the number of classes has to be known."""

    @property
    def needs_classes(self) -> bool:
        """Return whether the training samples must have classes. By default True if values are per class."""
        return self.per_class

    prior: float | None = None
    """Value that samplers, aggregators and personalizers assume for a client that never took part. None: they get NaN.
    ``compute`` returns NaN for such a client in either case.
    """

    uses_ground_truth = False
    """Whether the metric compares its values with every client's ``class_counts``, which no real server knows."""

    needs: Sequence[str] | None = None
    """Names of attributes of a :class:`flsv.Round` that the functions in ``round_fields`` read. None: there are no such
    functions.
    """

    rows_of_clients: Sequence[str] = ()
    """Names of arguments of ``update``, other than a round's attributes, that are tensors with a row per client."""

    measure: Measure | str | None = None
    """The performance measure by which models are scored for the metric, or the name of a classifier's score. None:
    accuracy, if it reads utilities."""

    evaluates = False
    """Whether each client evaluates models for the metric on validation samples of its own."""

    trains_coalitions = False
    """Whether the values need models that coalitions train after the run, as :class:`flsv.metrics.ShadowShapley`."""

    claims: Claims = ()
    """Properties of the values, which :mod:`flsv.testing` checks. ``"value"``: clients that help more have larger
    values. ``"effect"``: likewise, and a client without samples has the value 0. ``"agreement"``: values depend on the
    directions of updates, but not on their lengths. ``"weight"``: values are shares that sum to 1."""

    to_pay_by = False
    """Whether reports may divide a budget by the values: True if they measure how much a client adds to the model."""

    mergeable = True
    """Whether the states of several parts of a run can be merged, by ``merge_state`` or a sync between processes."""

    unit = "contribution"
    """Unit of a value, as on an axis. :meth:`guide` returns ``unit``, ``sign`` and ``cost``."""

    sign = ""
    """Meaning of positive, negative and zero values, in words. If empty, guides say whether more or less is better."""

    cost = "see its documentation."
    """Cost of a round, in words."""

    reported_by: str | None = None
    """Code of the setting that makes clients report the metric's inputs. None if every round has these inputs."""

    rounds: Tensor
    compute_at_run_end: Callable[[], None] | None = None
    """Function that ``update`` sets, and that :meth:`end_run` calls if this round was the run's last."""

    def __init__(
        self,
        num_clients: Annotated[int, Ge(2), "A federation needs 2 clients."] | None = None,
        num_classes: Count | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_clients = num_clients
        self.num_classes = num_classes
        self.class_names: Sequence[str] | None = None
        self.client_names: Sequence[str] | None = None
        self.class_counts: Tensor | None = None
        if self._has_sizes:
            self._create_states()
        # The states of torchmetrics, its defaults, may change.
        self._read_only = frozenset(self._stored_arguments() - self._defaults.keys())

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise ConfigurationError if a metric defines an attribute that only older versions of flsv read."""
        super().__init_subclass__(**options)
        for name, remedy in _NO_LONGER_READ.items():
            if hasattr(cls, name):
                raise ConfigurationError(f"{cls.__name__}.{name} is not read any more. {remedy}")

    def _stored_arguments(self) -> set[str]:
        """Return the names of the constructors' arguments that are attributes."""
        argument_names = set[str]()
        for metric_class in type(self).__mro__:
            if issubclass(metric_class, ContributionMetric):
                argument_names.update(inspect.signature(metric_class.__init__).parameters)
        return argument_names & vars(self).keys()

    def bind(
        self,
        num_clients: int,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        class_counts: Tensor | None = None,
        client_names: Sequence[str] | None = None,
    ) -> None:
        """Set the federation's numbers of clients and classes, or check that the metric's numbers equal them.

        Args:
            num_clients: n, the number of clients.
            num_classes: M, the number of classes.
            class_names: names of the classes, for pictures.
            class_counts: ``[n, M]``, the numbers of training samples of each client and class, which no server of a
                real federation would know. They are stored only if :attr:`uses_ground_truth`.
            client_names: names of the clients, for pictures.

        Raises:
            ConfigurationError: the metric was constructed with another number of clients or classes.
        """
        self._check_size("num_clients", num_clients)
        self._check_size("num_classes", num_classes)
        self.class_names = class_names
        self.client_names = client_names
        self.class_counts = class_counts if self.uses_ground_truth else None
        has_states = self._has_sizes  # the constructor has created them if it was given the sizes
        # The sizes are read-only attributes, which cannot be assigned.
        vars(self)["num_clients"] = num_clients
        vars(self)["num_classes"] = num_classes
        if not has_states:
            self._create_states()

    def _check_size(self, name: str, size: int) -> None:
        argument = getattr(self, name)
        if argument is not None and argument != size:
            raise ConfigurationError(
                f"{type(self).__name__}({name}={argument}) does not fit the federation, which has {name}={size}. "
                f"Remove the argument {name}, which is set by the data."
            )

    def check(self, num_samples: Tensor) -> None:
        """Check before training that the metric works with the clients' numbers of training samples.

        By default nothing is checked.

        Args:
            num_samples: ``[n]``, the numbers of training samples.

        Raises:
            ConfigurationError: the metric cannot work with clients of these sizes.
        """

    def check_rounds(self, rounds: int) -> None:
        """Prepare for a run of ``rounds`` rounds, and warn if the metric has no values after so few.

        It is called before training if the number of rounds is known, and does nothing by default.
        """

    def end_run(self) -> bool:
        """Compute the values of the run's last round, see :attr:`compute_at_run_end`. Return False if this was done
        before."""
        if self.compute_at_run_end is None:
            return False
        compute_values = self.compute_at_run_end
        self.compute_at_run_end = None
        self._computed = None  # torchmetrics' stored result
        compute_values()
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without :attr:`compute_at_run_end`, which holds the fit's models."""
        return {**super().__getstate__(), "compute_at_run_end": None}

    @abstractmethod
    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        """Declare the metric's states with ``add_state``. Called once, as soon as both sizes are known.

        Args:
            num_clients: n, the number of clients.
            num_classes: M, the number of classes. It may be None if ``per_class`` is False.
        """

    if hasattr(Metric, "merge_state"):  # torchmetrics 1.5

        def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
            """Merge the rounds of another metric, or of its state, as earlier ones than its own.

            Raises:
                ConfigurationError: the other metric has other arguments.
            """
            is_metric = isinstance(incoming_state, type(self))
            if is_metric and repr(incoming_state) != repr(self):
                raise ConfigurationError(
                    f"{self!r} and {incoming_state!r} cannot be merged, because their values have different meanings. "
                    "Create both with the same arguments."
                )
            super().merge_state(incoming_state)

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        if not self.mergeable:
            raise ConfigurationError(
                f"{type(self).__name__} needs all rounds in one process, so the rounds of two processes cannot be "
                "synchronized. Update one metric with every round."
            )
        super()._sync_dist(*args, **kwargs)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return further values to log after each round, ``{name: value}``. They are scalars ``[]``, or one number per
        client ``[num_clients]``.
        """
        return {}

    def result(self) -> Values:
        """Return the current values with all that is known about them: ``compute``, :meth:`per_client` and
        :meth:`diagnostics`. By default without intervals: the spread over the rounds of one run does not show how far
        another seed's values are."""
        value = self.compute()
        return Values(value, self.per_client(value), diagnostics=self.diagnostics())

    def columns(self) -> list[str] | None:
        """Return, for reports, the names of the M columns of ``compute``'s result ``[num_clients, M]``. None if the
        columns are the classes.
        """
        return None

    def per_client(self, value: Tensor) -> Tensor:
        """Reduce the result ``value`` of ``compute`` to one number per client ``[num_clients]``. By default, take the
        mean over the classes.
        """
        return value.mean(-1) if value.ndim == 2 else value

    def __repr__(self) -> str:
        """Return the class's name with the arguments that differ from their defaults, without sizes and tensors."""
        parameters = inspect.signature(type(self)).parameters
        arguments = []
        for name, parameter in parameters.items():
            if name in _SET_BY_DATA or not hasattr(self, name):
                continue
            value = getattr(self, name)
            if isinstance(value, Tensor):
                continue
            # An argument that was None may be stored as an empty dictionary.
            argument = None if value == {} else value
            if argument != parameter.default and repr(argument) != repr(parameter.default):
                arguments.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def guide(self) -> dict[str, str]:
        """Return the values' ``unit``, the meaning of their ``sign``, the metric's ``needs`` and its ``cost``, in
        words."""
        sign = self.sign or ("more is better." if self.higher_is_better else "less is better.")
        return {"unit": self.unit, "sign": sign, "needs": needs_in_words(self), "cost": self.cost}

    def plot(
        self,
        val: Tensor | Sequence[Tensor] | None = None,
        ax: Any = None,
        *,
        limits: tuple[float, float] | None = None,
        intervals: tuple[Tensor, Tensor] | None = None,
        kind: Literal["bars", "waterfall"] = "bars",
        initial_score: float | None = None,
    ) -> Any:
        """Plot the contributions. One value per client gives bars, values per class a heatmap, several rounds' values
        lines.

        Args:
            val: a result of ``compute`` or ``forward``, or a list of such results, one per round. By default
                ``compute()``.
            ax: a matplotlib axis to draw into. By default that of a new figure.
            limits: lowest and highest value of the scale. By default the lowest and highest of ``val``.
            intervals: the ends ``[num_clients]`` of intervals, drawn on the bars. By default the error bars of
                :meth:`result` if ``val`` is None, otherwise none.
            kind: how one value per client is drawn. ``"bars"``: from 0. ``"waterfall"``: as steps from the score of the
                untrained model to that of the model of all clients.
            initial_score: the score of the untrained model, for a waterfall. By default that from which the values add
                up to the score of the model of all clients if the metric knows it, otherwise 0.

        Returns:
            ``(figure, axis)``. A notebook shows the pair as a picture if it is the last line of a cell.
        """
        if val is None:
            current = self.result()
            val = current.value
            if intervals is None:
                intervals = current.error_bars
        values = val
        if not isinstance(values, Tensor):
            values = [self.per_client(value) for value in values]  # a vector [n] for each round
        waterfall_from = None
        if kind == "waterfall":
            waterfall_from = self._score_of_untrained(values, initial_score)

        from flsv.metrics.plot import plot_contributions  # matplotlib is slow to import

        options = self._options_of_plot()
        return plot_contributions(
            values, ax, limits=limits, intervals=intervals, waterfall_from=waterfall_from, **options
        )

    def _options_of_plot(self) -> dict[str, Any]:
        # A metric's values are per client [n], or a matrix [n, columns] of classes or of columns of its own.
        columns: Sequence[str] | None = self.columns()
        return {
            "name": type(self).__name__,
            "column_names": self.class_names if columns is None else columns,
            "kind_of_columns": "class" if columns is None else "",
            "client_names": self.client_names,
            "unit": self.unit,
        }

    def _score_of_untrained(
        self,
        values: Tensor | Sequence[Tensor],
        initial_score: float | None,
    ) -> float:
        """Return the score from which values add up to that of the model of all clients."""
        if not isinstance(values, Tensor) or values.ndim != 1:
            raise ValueError(
                "plot(kind='waterfall'): expected one value per client, [num_clients]."
            )
        if initial_score is not None:
            return initial_score
        ends = (self.result().evidence or {}).get("ends")
        if ends is None:
            return 0.0
        _start, end = ends
        return float(end - values.nansum())

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> torch.nn.Module:
        """Apply ``fn`` to the states. In ``set_dtype``, skip integer states, which are counts."""
        if not self._dtype_convert:
            return super()._apply(fn, exclude_state)
        return super()._apply(
            lambda tensor: fn(tensor) if tensor.is_floating_point() else tensor, exclude_state
        )

    @property
    def update_called(self) -> bool:
        """Return whether the metric has ever been updated. Updates before a state was saved and loaded count, too, in
        contrast to torchmetrics."""
        return super().update_called or bool(getattr(self, "rounds", 0))

    @property
    def _has_sizes(self) -> bool:
        needs_num_classes = self.per_class and self.num_classes is None
        return self.num_clients is not None and not needs_num_classes

    def _create_states(self) -> None:
        assert self.num_clients is not None
        self.init_states(self.num_clients, self.num_classes)
        self.add_state("rounds", torch.tensor(0), dist_reduce_fx="sum")
        self.persistent(True)

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``update`` as torchmetrics does. The wrapper first checks the arguments, and finally counts the
        round."""
        signature = inspect.signature(update)

        @functools.wraps(update)
        def checked_update(*args: Any, **kwargs: Any) -> None:
            arguments = signature.bind(*args, **kwargs).arguments
            self._check_arguments(arguments)
            # States made in inference mode could not be changed outside of it.
            with torch.inference_mode(False):
                update(*args, **kwargs)
                self.rounds += 1

        return super()._wrap_update(checked_update)

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of ``update``, and that the metric knows its sizes."""
        if not self._has_sizes:
            raise ConfigurationError(
                f"{type(self).__name__} does not know the numbers of clients and classes. Pass num_clients and "
                "num_classes, or use the metric in a FederatedLoop."
            )
        if "client_ids" in arguments:
            assert self.num_clients is not None
            client_ids = arguments["client_ids"]
            check_clients(client_ids, self.num_clients)
            check_rows(client_ids, arguments, self.rows_of_clients)

    def _check_asked(self, client_ids: Tensor, clients: Sequence[Client]) -> None:
        """Raise ValueError unless ``clients`` are the round's clients, in the order of ``client_ids``."""
        if [client.id for client in clients] != on_host(client_ids):
            raise ValueError(
                f"the clients {[client.id for client in clients]} differ from client_ids={client_ids.tolist()}. Pass "
                "the same clients in the same order."
            )

    @staticmethod
    def _matrix(client_updates: Tensor | ClientMatrix) -> ClientMatrix:
        """Convert updates ``[k, P]`` to a :class:`ClientMatrix`. A ``FederatedLoop`` already passes one. It is returned
        unchanged.
        """
        if not isinstance(client_updates, Tensor):
            return client_updates
        if client_updates.ndim != 2:
            raise ValueError(f"expected client_updates [k, P], got {list(client_updates.shape)}.")
        # A ClientMatrix has models minus start points: updates are models that started from 0.
        no_start = torch.zeros_like(client_updates[0])
        return ClientMatrix(client_updates, [no_start] * len(client_updates))


#: Names of the constructor's arguments that a ``FederatedLoop`` sets.
_SET_BY_DATA = ("num_clients", "num_classes")


def check_clients(client_ids: Tensor, num_clients: int) -> None:
    """Raise ValueError unless ``client_ids [k]``, at least one, are different numbers in 0 .. ``num_clients`` - 1."""
    if client_ids.numel() == 0:
        raise ValueError("client_ids is empty, but a round needs at least one client.")
    ids = on_host(client_ids)
    lowest = int(min(ids))
    highest = int(max(ids))
    if lowest < 0 or highest >= num_clients:
        raise ValueError(
            f"client_ids must lie in [0, {num_clients}), num_clients={num_clients}; got {lowest} to {highest}."
        )
    if len(set(ids)) != len(ids):
        raise ValueError(
            f"client_ids={client_ids.tolist()} names a client twice. Pass each client of a round once."
        )


def check_rows(
    client_ids: Tensor, arguments: Mapping[str, Any], more_names: Sequence[str] = ()
) -> None:
    """Raise ValueError unless each of ``update``'s tensors with a row per client has k = len(client_ids) rows.

    These tensors are attributes of a round that have a row per client, and the arguments in ``more_names``.
    """
    # Without this check a single row would be broadcast to all clients.
    for name, value in arguments.items():
        entry = VOCABULARY.get(name)  # None for an argument that is no attribute of a round
        is_per_client = name in more_names or (entry is not None and entry.per_client)
        if not is_per_client or not isinstance(value, Tensor):
            continue
        has_row_per_client = value.shape[:1] == client_ids.shape
        if not has_row_per_client:
            shape = "[k]" if entry is None else entry.shape
            expected_shape = shape.replace("[k", f"[k={len(client_ids)}")  # [k, P] -> [k=3, P]
            raise ValueError(f"expected {name} {expected_shape}, got {list(value.shape)}.")
