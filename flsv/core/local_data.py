"""LocalData: one participant's data, readable only inside a question to it; and what it keeps between rounds.

The simulation runs in one process. A :class:`LocalData` opens only while its client answers a question
(:meth:`Client.ask`), and what the answer holds is exactly what crosses. That guards against mistakes: code of the
server that touches a client's samples in passing fails. It does not guard against malice: a client answers any
question, also ``client.ask(lambda local: local.samples())``, and within one process Python hides nothing. A boundary
that is enforced is one between processes. What a simulation shows that a deployment would not: ``docs/trust.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from flsv.utilities.errors import ConfigurationError

State = MutableMapping[str, Tensor]


class Prefixed(MutableMapping[str, Tensor]):
    """The entries of a state whose names begin with a prefix, without it.

    Example:
        >>> import torch
        >>> state = {"module.weight": torch.tensor(1.0), "visits": torch.tensor(2)}
        >>> dict(Prefixed(state, "module."))
        {'weight': tensor(1.)}
    """

    def __init__(self, state: State, prefix: str) -> None:
        self._state, self._prefix = state, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._state[self._prefix + name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._state[self._prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self._state[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter([name[len(self._prefix) :] for name in self._state if name.startswith(self._prefix)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


Split = Literal["train", "val", "test"]


class ModelScores(Protocol):
    """The scores of K models, see :class:`flsv.games.Scores`."""

    def value(self, metric: Any) -> Tensor: ...


Evaluator = Callable[[Tensor], ModelScores]
"""Models ``[K, P]`` to their scores, see :class:`flsv.games.ModelEvaluator`."""

Tell = Callable[[str, float], float]
"""A number's name and the number to what a client says it is."""

_answering: ContextVar[LocalData | None] = ContextVar("answering", default=None)


def no_model(_: Any) -> Any:
    """In place of an evaluator or a module where nothing is trained."""
    raise ConfigurationError(
        "there is no model before training. Choose features that need none: Pixels(), PCA() or Backbone(...)."
    )


def no_task(split: Split, performance: Any) -> Any:
    """In place of an evaluator for any task where there is none."""
    raise ConfigurationError(f"models are not measured by {performance!r} here: only a client of a fit knows it.")


class LocalData:
    """One participant's data. A client's data can be read only inside a question to this client: a guard against
    mistakes, not against malice.

    Args:
        name: of the participant, for messages.
        batches: gives the batches ``(x, y)`` of a split, in a fixed order, on the device of the module.
        class_counts: int64 ``[M]``, training samples of each class.
        population: int64 ``[M]``, those of the whole federation, as secure aggregation would tell every client.
        evaluator: gives an evaluator of models on batches.
        module: gives a copy of the module with a vector ``[P]`` in it.
        state: gives what it keeps between rounds; by default its own dictionary.
        guarded: False for the server's own validation set.
        any_task: gives an evaluator of models on a split by what is no classifier's score.
        training: gives a pass over the training batches, as ``training_step`` gets them, shuffled by a generator.
    """

    def __init__(
        self,
        name: str,
        batches: Callable[[Split], Iterable[Any]],
        class_counts: Tensor,
        population: Tensor,
        evaluator: Callable[[Iterable[Any]], Evaluator] = no_model,
        module: Callable[[Tensor], nn.Module] = no_model,
        state: Callable[[], State] | None = None,
        guarded: bool = True,
        any_task: Callable[[Split, Any], Evaluator] = no_task,
        training: Callable[[torch.Generator], Iterable[Any]] = no_model,
    ) -> None:
        self._name, self._batches = name, batches
        self._evaluator, self._module = evaluator, module
        self._class_counts, self._population, self._guarded = class_counts, population, guarded
        self._any_task, self._training = any_task, training
        self._evaluators: dict[tuple[Split, Any], Evaluator] = {}
        own: State = {}
        self._state = state or (lambda: own)
        self._start: Tensor | None = None
        self._model: Tensor | None = None
        self._sent: Tensor | None = None
        self._tell: Tell | None = None
        self._memory: dict[Any, Any] = {}

    @property
    def num_classes(self) -> int:
        """M."""
        return len(self._population)

    @property
    def class_counts(self) -> Tensor:
        """int64 ``[M]``, this participant's training samples of each class, by its own labels."""
        self._check()
        return self._class_counts

    @property
    def population(self) -> Tensor:
        """int64 ``[M]``, the whole federation's training samples of each class."""
        return self._population

    @property
    def start(self) -> Tensor | None:
        """``[P]``, what this client started the current round from; None where it takes no part in it."""
        self._check()
        return self._start

    @property
    def model(self) -> Tensor | None:
        """``[P]``, the model that this client has just trained, before uploads change it; None before training."""
        self._check()
        return self._model

    @property
    def sent(self) -> Tensor | None:
        """``[P]``, the model that it has sent: after attacks, noise and compression; None before."""
        self._check()
        return self._sent

    @property
    def state(self) -> State:
        """What this client keeps between rounds, tensors by name: saved with the run, and seen by nobody else.

        What is written in a round that is interrupted is forgotten with it.
        """
        self._check()
        return self._state()

    @property
    def memory(self) -> dict[Any, Any]:
        """What this client keeps for itself between questions: features, per-sample values, pictures.

        The server may send a key to keep something under. It is not saved with the run: what cannot be worked out again
        belongs into :attr:`state`.

        Example:
            >>> from flsv.core import Client
            >>> count = torch.tensor([1, 1])
            >>> client = Client(0, LocalData("client 0", lambda split: [], count, count))
            >>> client.ask(lambda local: local.memory.update(secret=3))
            >>> client.ask(lambda local: local.memory["secret"] + 1)
            4
        """
        self._check()
        return self._memory

    @property
    def private(self) -> State:
        """Of its state the module's own entries that it does not share, by their names in the module."""
        return Prefixed(self.state, "module.")

    def set_models(
        self, start: Tensor | None, model: Tensor | None, sent: Tensor | None = None, tell: Tell | None = None
    ) -> None:
        """Said by the client's own training: what it started this round from, what it has made of it, what it has sent
        where that is something else, and what it says instead of numbers that it has found out."""
        self._start, self._model, self._sent = start, model, model if sent is None else sent
        self._tell = tell

    @property
    def tell(self) -> Tell | None:
        """How this client falsifies numbers that it reports in this round; None if it does not."""
        return self._tell

    def told(self, name: str, value: Tensor) -> Tensor:
        """The number that this client reports for the true ``value []``."""
        self._check()
        return value if self._tell is None else torch.full_like(value, self._tell(name, float(value)))

    def samples(self, split: Split = "train") -> tuple[Tensor, Tensor]:
        """All samples of a split in a fixed order, x ``[m, ...]`` and y ``[m]``, with the client's own labels.

        Raises:
            ConfigurationError: the split is empty, or its batches are no pairs of tensors.
        """
        self._check()
        batches = list(self._batches(split))
        if not batches:
            raise ConfigurationError(f"{self._name} has no {split} samples.")
        if not all(isinstance(part, Tensor) for batch in batches for part in batch[:2]):
            raise ConfigurationError(f"the {split} batches of {self._name} are not pairs of tensors (x, y).")
        return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])

    def batches(self, generator: torch.Generator) -> Iterable[Any]:
        """A pass over its training batches, as ``training_step`` gets them, shuffled by the generator."""
        self._check()
        return self._training(generator)

    def evaluate(self, vectors: Tensor, split: Split = "val") -> ModelScores:
        """The scores of the models ``[K, P]`` on this participant's samples; ``.value("accuracy")`` is ``[K]``."""
        self._check()
        if (split, None) not in self._evaluators:
            self._evaluators[split, None] = self._evaluator(self._batches(split))
        return self._evaluators[split, None](vectors)

    def utility(self, vectors: Tensor, performance: Any = "accuracy", split: Split = "val") -> Tensor:
        """The utilities of the models ``[K, P]`` on this participant's samples, float64 ``[K]``; more is better.

        Args:
            vectors: the models.
            performance: a score of classifiers, or a :class:`flsv.games.ModelScore`.
            split: of this participant's samples.
        """
        if isinstance(performance, str):
            return self.evaluate(vectors, split).value(performance)
        self._check()
        key = (split, performance)
        if key not in self._evaluators:
            self._evaluators[key] = self._any_task(split, performance)
        return performance.utility(self._evaluators[key](vectors).value(performance.name))

    def module(self, vector: Tensor) -> nn.Module:
        """A copy of the module with this vector ``[P]`` in it, in evaluation mode; valid until the next call."""
        self._check()
        return self._module(vector)

    def _check(self) -> None:
        if self._guarded and _answering.get() is not self:
            raise PermissionError(
                f"the data of {self._name} were asked for outside of it: read them in a question, "
                "Client.ask(question), and what that returns is what crosses to the server."
            )

    def __repr__(self) -> str:
        return f"LocalData({self._name})"


@contextmanager
def opened(data: LocalData) -> Iterator[LocalData]:
    """For the client's own code: its data are open."""
    token = _answering.set(data)
    try:
        yield data
    finally:
        _answering.reset(token)
