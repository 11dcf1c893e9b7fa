"""Function that makes a source of a Lightning data module, from the data sets and options of its loaders."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from flsv.data.labels import class_names_of
from flsv.data.sources.base import SourceData
from flsv.utilities.errors import ConfigurationError

#: Methods of ``DataLoader``; a subclass that overrides one of them may make other batches.
_BATCHES = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


def module_source(module: L.LightningDataModule) -> SourceData:
    """Return the source that has the data sets and options of a data module's training and validation loaders. Call the
    data module's ``setup("fit")`` before.

    Raises:
        ConfigurationError: the samples of the training loader cannot be listed, or the loader makes its own batches.
    """
    name, loader = type(module).__name__, _single(module.train_dataloader())
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or type(loader.batch_sampler) is not BatchSampler
        or makes_own_batches(loader)
    ):
        raise ConfigurationError(
            f"{name}'s training loader is a {type(loader).__name__} whose samples cannot be divided among clients: "
            "give a single torch DataLoader of a map-style data set that makes its batches by batch_size and shuffle, "
            "or the data set as source."
        )
    indices, sampler = None, loader.batch_sampler.sampler
    if isinstance(sampler, SubsetRandomSampler):
        # This sampler usually holds out validation samples of the same data set, which must stay held out.
        indices = torch.as_tensor(sampler.indices, dtype=torch.long)
    elif not isinstance(sampler, SequentialSampler) and not (
        # For mypy: a map-style data set has a length.
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    ):
        kind = type(sampler).__name__
        rank_zero_warn(
            f"{name}'s training loader draws samples by {kind}. Each client's samples are shuffled uniformly instead."
        )
    val, eval_options = None, _options(loader)
    val_loaders = _single(module.val_dataloader()) if is_overridden("val_dataloader", module) else None
    if isinstance(val_loaders, DataLoader) and _reads_in_order(val_loaders):
        val, eval_options, val_loaders = val_loaders.dataset, _options(val_loaders), None
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
        by_rarity=getattr(loader.dataset, "by_rarity", False),
    )


def _single(loaders: Any) -> Any:
    """Return the only loader of a list, None if the list is empty, and anything else unchanged."""
    if isinstance(loaders, list | tuple) and len(loaders) <= 1:
        return loaders[0] if loaders else None
    return loaders


def _reads_in_order(loader: DataLoader) -> bool:
    batches = loader.batch_sampler
    in_order = type(batches) is BatchSampler and isinstance(batches.sampler, SequentialSampler)
    return in_order and not makes_own_batches(loader)


def makes_own_batches(loader: DataLoader) -> bool:
    """Return whether a loader's class overrides how ``DataLoader`` makes batches.

    Example:
        >>> class Twice(DataLoader):
        ...     def __iter__(self):
        ...         return (2 * batch for batch in super().__iter__())
        >>> makes_own_batches(Twice([1, 2])), makes_own_batches(DataLoader([1, 2]))
        (True, False)
    """
    classes = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    return any(name in vars(each) for each in classes for name in _BATCHES)


def _options(loader: DataLoader) -> dict[str, Any]:
    return {
        # From the batch sampler, which may be given instead of these two options.
        "batch_size": loader.batch_sampler.batch_size,  # type: ignore[union-attr]  # module_source checks it
        "drop_last": loader.batch_sampler.drop_last,  # type: ignore[union-attr]  # module_source checks it
        **{name: getattr(loader, name) for name in ("collate_fn", "num_workers", "pin_memory", "worker_init_fn")},
    }
