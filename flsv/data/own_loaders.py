"""DataLoaders of somebody's own class: what they yield may be something else than what their data set holds.

Lightning puts a distributed sampler into a loader by making it anew, by its class and with the arguments that it was
made with. So is it done here, with one client's samples in place of all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls, _replace_dunder_methods
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.utils.data import BatchSampler, DataLoader, Dataset

from flsv.errors import ConfigurationError
from flsv.seeding import isolated_rngs

#: Whoever overrides one of these makes other batches, or of other samples, than torch's loader would.
_BATCHES = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


@contextmanager
def remembering() -> Iterator[None]:
    """Loaders that are made within it remember the arguments that they are made with."""
    with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
        yield


def makes_own_batches(loader: DataLoader) -> bool:
    """Whether a loader's class has a say in what its batches are.

    Example:
        >>> class Twice(DataLoader):
        ...     def __iter__(self):
        ...         return (2 * batch for batch in super().__iter__())
        >>> makes_own_batches(Twice([1, 2])), makes_own_batches(DataLoader([1, 2]))
        (True, False)
    """
    classes = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    return any(name in vars(each) for each in classes for name in _BATCHES)


class OwnLoader:
    """Makes loaders of another one's class, on other samples: in place of ``DataLoader`` itself.

    Args:
        loader: somebody's; best made while :func:`remembering`.

    Raises:
        ConfigurationError: when called, a class that cannot be made anew, or that takes its samples from elsewhere.

    Example:
        >>> class Twice(DataLoader):
        ...     def __iter__(self):
        ...         return (2 * batch for batch in super().__iter__())
        >>> list(OwnLoader(Twice([1, 2, 3], batch_size=2))([4, 5, 6], batch_size=2, sampler=[2, 0]))
        [tensor([12,  8])]
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __call__(self, dataset: Dataset, *, sampler: Any, generator: Any = None, **wanted: Any) -> DataLoader:
        loader, takes = self._loader, inspect.signature(type(self._loader).__init__).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        other = {name: value for name, value in wanted.items() if value != getattr(loader, name)}
        refused = [f"{name}={value!r}" for name, value in other.items() if not (anything or name in takes)]
        if refused:
            raise ConfigurationError(f"{self._name} takes no {', '.join(refused)}. {self._advice}")
        if anything or "generator" in takes:  # else it draws from the global one, which is seeded
            other["generator"] = generator
        try:
            args, kwargs = _get_dataloader_init_args_and_kwargs(loader, sampler)
            names = getattr(loader, "__pl_saved_arg_names", ())
            given = {**dict(zip(names, args)), **kwargs, "dataset": dataset, **other}
            own = _reinstantiate_wrapped_cls(loader, *args[len(names) :], **given)
        except (TypeError, MisconfigurationException) as error:
            raise ConfigurationError(
                f"{self._name} cannot be made anew, with one client's samples in place of all: {error} {self._advice}"
            ) from error
        if own.dataset is not dataset or own.sampler is not sampler:
            raise ConfigurationError(
                f"{self._name} does not read the data set and the sampler that it is given: every client would be "
                f"trained on other samples than its own. {self._advice}"
            )
        return own

    def attempt(self, loader: DataLoader) -> None:
        """Read the first batch of a loader made here.

        Raises:
            ConfigurationError: it cannot be read.
        """
        with isolated_rngs(0, "trial"):
            try:
                list(islice(loader, 1))
            except Exception as error:
                raise ConfigurationError(
                    f"{self._name} cannot read a torch Subset, which is one client's part of the data "
                    f"({type(error).__name__}: {error}). {self._advice}"
                ) from error

    @property
    def _name(self) -> str:
        return f"{type(self._loader).__name__}, a DataLoader that makes its batches in its own way,"

    @property
    def _advice(self) -> str:
        return (
            "Let its constructor take dataset, batch_size and sampler and hand them on (**kwargs will do), or move "
            "what it does into collate_fn or the data set."
        )
