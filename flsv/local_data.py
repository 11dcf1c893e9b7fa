"""The trust boundary: what one participant holds, and how the server asks for what follows from it.

The simulation runs in one process, and still no server-side code can read a client's samples: a :class:`LocalData`
opens only while its client answers a question (:meth:`Client.ask`). What the answer holds is exactly what crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from flsv.errors import ConfigurationError

if TYPE_CHECKING:
    from flsv._evaluation.scores import Scores
    from flsv.coalition import ModelEvaluator

Split = Literal["train", "val", "test"]
T = TypeVar("T")
P = ParamSpec("P")

_answering: ContextVar[LocalData | None] = ContextVar("answering", default=None)


def no_model(_: Any) -> Any:
    """In place of an evaluator or a module where nothing is trained."""
    raise ConfigurationError(
        "there is no model before training. Choose features that need none: Pixels(), PCA() or Backbone(...)."
    )


class LocalData:
    """What one participant holds. A client's works only inside a question that this client is asked.

    Args:
        name: of the participant, for messages.
        batches: gives the batches ``(x, y)`` of a split, in a fixed order, on the device of the module.
        class_counts: int64 ``[M]``, training samples of each class.
        population: int64 ``[M]``, those of the whole federation, as secure aggregation would tell every client.
        evaluator: gives an evaluator of models on batches.
        module: gives a copy of the module with a vector ``[P]`` in it.
        model: gives what the client has just trained, ``[P]``.
        guarded: False for the server's own validation set.
    """

    def __init__(
        self,
        name: str,
        batches: Callable[[Split], Iterable[Any]],
        class_counts: Tensor,
        population: Tensor,
        evaluator: Callable[[Iterable[Any]], ModelEvaluator] = no_model,
        module: Callable[[Tensor], nn.Module] = no_model,
        model: Callable[[], Tensor | None] = lambda: None,
        guarded: bool = True,
    ) -> None:
        self._name, self._batches, self._model = name, batches, model
        self._evaluator, self._module = evaluator, module
        self._class_counts, self._population, self._guarded = class_counts, population, guarded
        self._evaluators: dict[Split, ModelEvaluator] = {}

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
    def model(self) -> Tensor | None:
        """``[P]``, what this client has just trained, before anything is done to what it uploads; None before that."""
        self._check()
        return self._model()

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

    def evaluate(self, vectors: Tensor, split: Split = "val") -> Scores:
        """The scores of the models ``[K, P]`` on this participant's samples; ``.value("accuracy")`` is ``[K]``."""
        self._check()
        if split not in self._evaluators:
            self._evaluators[split] = self._evaluator(self._batches(split))
        return self._evaluators[split](vectors)

    def module(self, vector: Tensor) -> nn.Module:
        """A copy of the module with this vector ``[P]`` in it, in evaluation mode; valid until the next call."""
        self._check()
        return self._module(vector)

    def _check(self) -> None:
        if self._guarded and _answering.get() is not self:
            raise PermissionError(
                f"the data of {self._name} were asked for outside of it: only Client.ask(question) may read them, and "
                "what the question returns is what crosses to the server."
            )

    def __repr__(self) -> str:
        return f"LocalData({self._name})"


class Client:
    """A client as the server sees it: a number, and somebody to ask.

    Args:
        id: the client's number.
        data: what it holds.

    Example:
        >>> data = LocalData("client 3", lambda split: [], torch.tensor([2, 5]), torch.tensor([9, 9]))
        >>> client = Client(3, data)
        >>> client.ask(lambda local: int(local.class_counts.sum()))
        7
        >>> data.class_counts  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        PermissionError: the data of client 3 were asked for outside of it: ...
    """

    def __init__(self, id: int, data: LocalData) -> None:
        self.id, self.__data = id, data

    def ask(self, question: Callable[Concatenate[LocalData, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``question(local_data, *args, **kwargs)``, answered at the client. It may run on any thread."""
        with _at(self.__data):
            return question(self.__data, *args, **kwargs)

    def __repr__(self) -> str:
        return f"Client({self.id})"


@contextmanager
def _at(data: LocalData) -> Iterator[None]:
    token = _answering.set(data)
    try:
        yield
    finally:
        _answering.reset(token)
