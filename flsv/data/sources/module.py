"""Somebody's LightningDataModule as a source: what its loaders read, and how."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls, _replace_dunder_methods
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from flsv.data.labels import class_names_of
from flsv.data.sources.base import SourceData
from flsv.errors import ConfigurationError
from flsv.seeding import isolated_rngs


def module_source(module: L.LightningDataModule) -> SourceData:
    """The data sets and loader options of a data module's training and validation loaders; its ``setup("fit")`` must
    have been called.

    Raises:
        ConfigurationError: a training loader that does not tell which samples it draws from.
    """
    name = type(module).__name__
    with remembering():
        loader = module.train_dataloader()
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{name}.train_dataloader() returned {type(loader).__name__}. To deal its samples to clients flsv needs a "
            f"single torch DataLoader; or give the training data set itself as source."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(stream(f"{name}'s training data"))
    if loader.batch_sampler is None:
        raise ConfigurationError(
            f"{name}'s training loader has batch_size=None: its data set makes the batches itself, which cannot be "
            f"dealt to clients. A data set of single samples is needed."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            f"{name}'s training loader takes its batches from {type(loader.batch_sampler).__name__}: which samples "
            "make a batch is part of the task there, as in few-shot learning, and it chooses among everybody's "
            "samples. Give a loader with batch_size and shuffle; or a data set whose items are whole batches "
            "(episodes), each of one client, and groups to say whose."
        )
    indices, sampler = None, loader.batch_sampler.sampler
    if isinstance(sampler, SubsetRandomSampler):
        # The usual way to hold out validation samples of the same data set: they must stay held out.
        indices = torch.as_tensor(sampler.indices, dtype=torch.long)
    elif not _draws_all_once(sampler):
        rank_zero_warn(
            f"{name}'s training loader draws samples by {type(sampler).__name__}. Each client's samples are "
            "shuffled plainly instead."
        )
    val, eval_options, val_loaders = None, _options(loader), None
    if is_overridden("val_dataloader", module):
        with remembering():
            val_loaders = _single(module.val_dataloader())
    if isinstance(val_loaders, DataLoader) and _reads_in_order(val_loaders):
        eval_options = _options(val_loaders)
        if not makes_own_batches(val_loaders):
            val, val_loaders = val_loaders.dataset, None
    return SourceData(
        loader.dataset,
        val,
        val_loaders,
        indices=indices,
        class_names=class_names_of(loader.dataset),
        train_options=_options(loader),
        eval_options={**eval_options, "drop_last": False},
        pooled=getattr(module, "pooled_inputs", False),
        columns=getattr(module, "columns_read", ()),
    )


def stream(who: str) -> str:
    return (
        f"{who}: an IterableDataset, whose samples cannot be dealt to clients. A map-style data set, with __len__ and "
        f"__getitem__, is needed."
    )


def _single(loaders: Any) -> Any:
    """None for no loader, the loader for one, several as they are."""
    if isinstance(loaders, list | tuple) and len(loaders) <= 1:
        return loaders[0] if loaders else None
    return loaders


def _draws_all_once(sampler: Any) -> bool:
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return isinstance(sampler, SequentialSampler)


def _reads_in_order(loader: DataLoader) -> bool:
    batches = loader.batch_sampler
    return type(batches) is BatchSampler and isinstance(batches.sampler, SequentialSampler)


def _options(loader: DataLoader) -> dict[str, Any]:
    # Of the batch sampler, which may be given instead of them.
    return {
        "batch_size": loader.batch_sampler.batch_size,  # type: ignore[union-attr]
        "drop_last": loader.batch_sampler.drop_last,  # type: ignore[union-attr]
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        **({"make": OwnLoader(loader)} if makes_own_batches(loader) else {}),
    }


#: Whoever overrides one of these makes other batches, or of other samples, than torch's loader would.
_BATCHES = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


@contextmanager
def remembering() -> Iterator[None]:
    """Loaders that are made within it remember the arguments that they are made with."""
    with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
        yield


def makes_own_batches(loader: DataLoader) -> bool:
    """Whether a loader's class makes its own batches.

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
    """Makes loaders of the user's own class on other samples.

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
                next(iter(loader), None)
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
