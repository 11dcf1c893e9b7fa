"""LocalData: one participant's data and state, readable only by functions that :meth:`Client.request` runs."""
# This prevents mistakes, not malice: a client runs any function, and within one process Python cannot hide data.
# docs/reference/sites.md lists what a server can see in a simulation but not in a deployment.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from flsv.scores.performance import Measure, as_measure
from flsv.utilities.errors import ConfigurationError

if TYPE_CHECKING:
    from flsv.functional.shapley.predicted_outputs import OutputMeasure

State = MutableMapping[str, Tensor]


class Prefixed(MutableMapping[str, Tensor]):
    """View of a dictionary's items whose names begin with a prefix. The view's names do not have the prefix."""

    def __init__(self, state: State, prefix: str) -> None:
        self._state = state
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._state[self._prefix + name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._state[self._prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self._state[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        names = [
            name.removeprefix(self._prefix) for name in self._state if name.startswith(self._prefix)
        ]
        return iter(names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


Split = Literal["train", "val", "test"]


class ModelScores(Protocol):
    """Protocol of the scores of K models. ``value(metric)`` returns ``[K]``."""

    def value(self, metric: Any) -> Tensor: ...


Evaluator = Callable[[Tensor], ModelScores]
"""Function from K models ``[K, P]`` to their scores, see :class:`flsv.games.ModelEvaluator`."""

Tell = Callable[[str, float], float]
"""Function from a number's name and true value to the value that a client reports."""

_open_data: ContextVar[LocalData | None] = ContextVar("local data", default=None)


def no_model(_: Any) -> Any:
    """Raise ConfigurationError, since no model exists before training."""
    raise ConfigurationError(
        "there is no model before training. Choose features that need no model: Pixels(), PCA() or Backbone(...)."
    )


def no_task(split: Split, performance: Any) -> Any:
    raise ConfigurationError(
        f"performance={performance!r} can be computed only by a client within a fit."
    )


class LocalData:
    """One participant's data and state, with M classes and vectors ``[P]``. Only functions that :meth:`Client.request`
    runs
    can read a client's data.

    Args:
        name: the participant's name, for messages.
        batches: function from a split to its batches ``(x, y)``, in a fixed order, on the module's device.
        class_counts: int64 ``[M]``, the participant's number of training samples of each class.
        federation_class_counts: int64 ``[M]``, the whole federation's number of training samples of each class. A
            deployment could compute it by secure aggregation.
        evaluator: function from batches to an :data:`Evaluator` of models on these batches.
        module: function from a vector ``[P]`` to a copy of the module that holds it.
        state: function that returns the tensors that the participant keeps between rounds. With None they are kept in a
            new dictionary.
        guarded: whether data can be read only inside :meth:`Client.request`. False for the server's own validation set.
        score_evaluator: function from a split and a :class:`flsv.scores.Measure` to an :data:`Evaluator` of this
            score on the split.
        training: function from a random generator to an iterable over the training batches, shuffled by the generator,
            as ``training_step`` gets them.
        order: function from a random generator to the indices of the training samples, in the order of an epoch.
    """

    def __init__(
        self,
        name: str,
        batches: Callable[[Split], Iterable[Any]],
        class_counts: Tensor,
        federation_class_counts: Tensor,
        evaluator: Callable[[Iterable[Any]], Evaluator] = no_model,
        module: Callable[[Tensor], nn.Module] = no_model,
        state: Callable[[], State] | None = None,
        guarded: bool = True,
        score_evaluator: Callable[[Split, Any], Evaluator] = no_task,
        training: Callable[[torch.Generator], Iterable[Any]] = no_model,
        order: Callable[[torch.Generator], Tensor] = no_model,
    ) -> None:
        self._name = name
        self._class_counts = class_counts
        self._counts_of_federation = federation_class_counts
        self._is_guarded = guarded

        self._batches = batches
        self._training_batches = training
        self._sample_order = order
        self._module = module
        self._evaluator = evaluator
        self._evaluator_of_task = score_evaluator
        self._evaluators: dict[tuple[Split, Any], Evaluator] = {}

        self._state_function = state
        self._unsaved_state: State = {}
        self._memory: dict[Any, Any] = {}

        self._initial_model: Tensor | None = None
        self._trained_model: Tensor | None = None
        self._sent_model: Tensor | None = None
        self._tell: Tell | None = None

    @property
    def num_classes(self) -> int:
        """Return M, the number of classes."""
        return len(self._counts_of_federation)

    @property
    def class_counts(self) -> Tensor:
        """Return the participant's training samples of each class by its own labels, int64 ``[M]``."""
        self._check_is_open()
        return self._class_counts

    @property
    def federation_class_counts(self) -> Tensor:
        """Return the federation's number of training samples per class, int64 ``[M]``."""
        return self._counts_of_federation

    @property
    def start(self) -> Tensor | None:
        """Return the model ``[P]`` from which this client's training starts. None: it does not take part."""
        self._check_is_open()
        return self._initial_model

    @property
    def model(self) -> Tensor | None:
        """Return the trained model ``[P]`` before attacks, noise and compression, None before training."""
        self._check_is_open()
        return self._trained_model

    @property
    def sent(self) -> Tensor | None:
        """Return the model ``[P]`` as sent, after attacks, noise and compression, None before sending."""
        self._check_is_open()
        return self._sent_model

    @property
    def state(self) -> State:
        """Return the tensors that this client keeps between rounds, by name.

        They are saved with the run and never sent. Changes in a round that is interrupted are undone.
        """
        self._check_is_open()
        if self._state_function is None:
            return self._unsaved_state
        return self._state_function()

    @property
    def memory(self) -> dict[Any, Any]:
        """Return the dictionary of objects that this client keeps between requests (:meth:`Client.request`).

        The memory is not saved with the run, unlike :attr:`state`. The server may choose the keys.

        Example:
            >>> from flsv.core import Client
            >>> count = torch.tensor([1, 1])
            >>> client = Client(0, LocalData("client 0", lambda split: [], count, count))
            >>> client.request(lambda local: local.memory.update(secret=3))
            >>> client.request(lambda local: local.memory["secret"] + 1)
            4
        """
        self._check_is_open()
        return self._memory

    @property
    def private(self) -> State:
        """Return the parameters and buffers in :attr:`state` that are not shared with the server."""
        return Prefixed(self.state, "module.")

    def set_models(
        self,
        initial_model: Tensor | None,
        model: Tensor | None,
        sent: Tensor | None = None,
        tell: Tell | None = None,
    ) -> None:
        """Set this round's models ``[P]`` and the function that falsifies the numbers that this client reports.

        Args:
            initial_model: the model from which it trains. None: it does not take part.
            model: the trained model. None: before the training.
            sent: the model that it sends. None: the trained model.
            tell: function that changes a reported number. None: the client reports true numbers.
        """
        self._initial_model = initial_model
        self._trained_model = model
        self._sent_model = model if sent is None else sent
        self._tell = tell

    @property
    def tell(self) -> Tell | None:
        """Return the attack that falsifies the numbers that this client reports, or None."""
        return self._tell

    def reported(self, name: str, value: Tensor) -> Tensor:
        """Return the scalar ``value`` called ``name`` as this client reports it. :attr:`tell` may falsify it."""
        if self._tell is None:
            return value
        reported = self._tell(name, float(value))
        return torch.full_like(value, reported)

    def samples(self, split: Split = "train") -> tuple[Tensor, Tensor]:
        """Return all m samples of a split in a fixed order. They are x ``[m, ...]`` and the client's own labels y
        ``[m]``.

        Raises:
            ConfigurationError: the split is empty, or its batches are not pairs of tensors.
        """
        self._check_is_open()
        batches = list(self._batches(split))
        if not batches:
            raise ConfigurationError(f"{self._name} has no {split} samples.")
        for batch in batches:
            if not _is_pair_of_tensors(batch):
                raise ConfigurationError(
                    f"the {split} batches of {self._name} are not pairs of tensors (x, y), which FedBary and other "
                    "values of samples need. Return pairs from the data set, or use ShadowShapley, which works with "
                    "any batches."
                )

        inputs = torch.cat([batch[0] for batch in batches])
        labels = torch.cat([batch[1] for batch in batches])
        return inputs, labels

    def batches(self, generator: torch.Generator) -> Iterable[Any]:
        """Return an iterable over the client's training batches, shuffled, as ``training_step`` gets them."""
        self._check_is_open()
        return self._training_batches(generator)

    def evaluate(self, vectors: Tensor, split: Split = "val", keep: bool = False) -> ModelScores:
        """Compute the scores of K models, ``vectors [K, P]``, on a split of this participant's samples. With ``keep``
        the result holds the models' outputs, too."""
        evaluate = self._classifiers(split)
        if keep:
            return evaluate(vectors, keep=True)
        return evaluate(vectors)

    def output_measure(self, name: str) -> OutputMeasure:
        """Return a classifier's score, given its name in :class:`flsv.games.vector_evaluator.Scores`, as a function of
        models' outputs ``[c, V, M]`` for the validation samples."""
        output_measure: OutputMeasure = self._classifiers("val").output_measure(as_measure(name))
        return output_measure

    def _classifiers(self, split: Split) -> Any:
        self._check_is_open()
        key = (split, None)
        if key not in self._evaluators:
            self._evaluators[key] = self._evaluator(self._batches(split))
        return self._evaluators[key]

    def utility(self, vectors: Tensor, performance: str | Measure = "accuracy") -> Tensor:
        """Compute the utilities (more is better) of models on this participant's validation samples.

        Args:
            vectors: ``[K, P]``, the K models.
            performance: the name of a classifier's score, or a :class:`flsv.scores.Measure`.

        Returns:
            The utilities, float64 ``[K]``.
        """
        measure = as_measure(performance)
        if measure.is_of_classifier:
            return self.evaluate(vectors).value(measure.name)

        self._check_is_open()
        key: tuple[Split, Any] = ("val", measure)
        if key not in self._evaluators:
            self._evaluators[key] = self._evaluator_of_task("val", measure)
        evaluate = self._evaluators[key]
        scores = evaluate(vectors)
        return measure.utility(scores.value(measure.name))

    def order(self, generator: torch.Generator) -> Tensor:
        """Return the indices of the training samples, int64, in the order of an epoch."""
        self._check_is_open()
        return self._sample_order(generator)

    def module(self, vector: Tensor) -> nn.Module:
        """Return a copy of the module in evaluation mode that holds ``vector [P]``."""
        self._check_is_open()
        return self._module(vector)

    def _check_is_open(self) -> None:
        if self._is_guarded and _open_data.get() is not self:
            raise PermissionError(
                f"the data of {self._name} can be read only at the client: run a function there by "
                "Client.request(function), which returns its result to the server."
            )

    def __repr__(self) -> str:
        return f"LocalData({self._name})"


def _is_pair_of_tensors(batch: Any) -> bool:
    is_pair = isinstance(batch, list | tuple) and len(batch) >= 2  # further items are not read
    return is_pair and all(isinstance(part, Tensor) for part in batch[:2])


@contextmanager
def opened(data: LocalData) -> Iterator[LocalData]:
    """Make a client's data readable within this context, for the client's own code."""
    token = _open_data.set(data)
    try:
        yield data
    finally:
        _open_data.reset(token)
