"""Where the samples come from: a name, data sets, or somebody's LightningDataModule, all brought to one form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
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
from flsv.data.sets import load_image_data
from flsv.errors import ConfigurationError


@dataclass(frozen=True)
class SourceData:
    """What a source has to offer.

    Args:
        train: the training data, map-style.
        val: the source's own validation data, or None.
        val_loaders: a loader, or several, to validate with as they are, where ``val`` would not do them justice.
        test: test data, or None.
        indices: which samples of ``train`` may be used, int64 ``[n]``; None for all.
        class_names: names of the classes, empty where the source has none.
        train_options: ``batch_size`` and what else a ``DataLoader`` is told, as far as the source says.
        eval_options: the same for evaluation.
    """

    train: Dataset
    val: Dataset | None = None
    val_loaders: Iterable[Any] | None = None
    test: Dataset | None = None
    indices: Tensor | None = None
    class_names: tuple[str, ...] = ()
    train_options: dict[str, Any] = field(default_factory=dict)
    eval_options: dict[str, Any] = field(default_factory=dict)


def open_source(
    source: str | L.LightningDataModule | Dataset | Sequence[Dataset], root: str, download: bool, image_size: int
) -> SourceData:
    """The data of a name or path (see :func:`~flsv.data.load_image_data`), a data module, or data sets."""
    if isinstance(source, L.LightningDataModule):
        return module_source(source)
    if isinstance(source, str):
        data = load_image_data(source, root, download, image_size)
        return SourceData(data.train, data.val, test=data.test, class_names=data.class_names)
    return dataset_source(source)


def source_name(source: str | L.LightningDataModule | Dataset | Sequence[Dataset]) -> str:
    """The name given, or the types of what was given."""
    if isinstance(source, str):
        return source
    return ", ".join(type(part).__name__ for part in (source if isinstance(source, list | tuple) else [source]))


def dataset_source(datasets: Dataset | Sequence[Dataset]) -> SourceData:
    """Training data, or training and test data.

    Raises:
        ConfigurationError: anything but one or two map-style data sets.
    """
    pair: list[Any] = list(datasets) if isinstance(datasets, list | tuple) else [datasets]
    for part in pair:
        if isinstance(part, IterableDataset):
            raise ConfigurationError(_stream(type(part).__name__))
    if not 1 <= len(pair) <= 2 or not all(hasattr(part, "__getitem__") and hasattr(part, "__len__") for part in pair):
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise ConfigurationError(
            f"source=({kinds}): expected a training data set or (training, test), each with __len__ and __getitem__; "
            f"or a LightningDataModule, or the name of a data set."
        )
    return SourceData(pair[0], test=pair[1] if len(pair) == 2 else None, class_names=class_names_of(pair[0]))


def module_source(module: L.LightningDataModule) -> SourceData:
    """What a data module's training and validation loaders read, and how; its ``setup("fit")`` must have been called.

    Raises:
        ConfigurationError: a training loader that does not tell which samples it draws from.
    """
    name = type(module).__name__
    loader = module.train_dataloader()
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"{name}.train_dataloader() returned {type(loader).__name__}. To deal its samples to clients flsv needs a "
            f"single torch DataLoader; or give the training data set itself as source."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(_stream(f"{name}'s training data"))
    if loader.batch_sampler is None:
        raise ConfigurationError(
            f"{name}'s training loader has batch_size=None: its data set makes the batches itself, which cannot be "
            f"dealt to clients. A data set of single samples is needed."
        )
    indices = None
    if isinstance(loader.sampler, SubsetRandomSampler):
        # The usual way to hold out validation samples of the same data set: they must stay held out.
        indices = torch.as_tensor(loader.sampler.indices, dtype=torch.long)
    elif not isinstance(loader.sampler, RandomSampler | SequentialSampler) or not _has_plain_batches(loader):
        rank_zero_warn(
            f"{name}'s training loader draws samples by {type(loader.sampler).__name__} and "
            f"{type(loader.batch_sampler).__name__}. Each client's samples are shuffled plainly instead."
        )
    val, eval_options = None, _options(loader)
    val_loaders = _single(module.val_dataloader()) if is_overridden("val_dataloader", module) else None
    if (
        isinstance(val_loaders, DataLoader)
        and isinstance(val_loaders.sampler, SequentialSampler)
        and _has_plain_batches(val_loaders)
    ):
        val, eval_options, val_loaders = val_loaders.dataset, _options(val_loaders), None
    return SourceData(
        loader.dataset,
        val,
        val_loaders,
        indices=indices,
        class_names=class_names_of(loader.dataset),
        train_options=_options(loader),
        eval_options={**eval_options, "drop_last": False},
    )


def _stream(who: str) -> str:
    return (
        f"{who}: an IterableDataset, whose samples cannot be dealt to clients. A map-style data set, with __len__ and "
        f"__getitem__, is needed."
    )


def _single(loaders: Any) -> Any:
    """None for no loader, the loader for one, several as they are."""
    if isinstance(loaders, list | tuple) and len(loaders) <= 1:
        return loaders[0] if loaders else None
    return loaders


def _has_plain_batches(loader: DataLoader) -> bool:
    return type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None


def _options(loader: DataLoader) -> dict[str, Any]:
    # A custom batch sampler hides its size from the loader.
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return {
        "drop_last": loader.drop_last,
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        **({"batch_size": size} if size else {}),
    }
