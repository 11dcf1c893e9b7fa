"""Where the samples come from: a name, data sets, or somebody's LightningDataModule, all brought to one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from flsv.data.labels import class_names_of
from flsv.data.loaders import OwnLoader, makes_own_batches, remembering
from flsv.data.sources.arrays import is_array, is_pair_of_arrays
from flsv.data.sources.base import SourceData
from flsv.data.sources.given import Reading, find_place, own_source
from flsv.data.sources.images import TABLES, folder_layout
from flsv.data.sources.named import is_known, load_image_data
from flsv.data.tables.columns import Columns
from flsv.data.tables.table import is_columnar
from flsv.errors import ConfigurationError

#: What may be dealt out: a name or a path, a data module, a data set, ``(train, test)``, arrays ``(X, y)``, or an
#: object with named columns.
Source = Any


@dataclass(frozen=True)
class OwnData:
    """What a user says of data of their own, see :class:`~flsv.data.FederatedDataModule`."""

    clients: Mapping[str, Any] | None = None
    val: Any = None
    test: Any = None
    label: str | None = None
    groups: Any = None
    columns: Columns | None = None


def open_source(source: Source, root: str, download: bool, image_size: int, own: OwnData | None = None) -> SourceData:
    """The data of a name or path (see :func:`~flsv.data.load_image_data`), a data module, data sets, or a user's own.

    Raises:
        ConfigurationError: what cannot be read, with what can.
    """
    own = own or OwnData()
    group = own.groups if isinstance(own.groups, str) else None
    reading = Reading(root, image_size, own.label, group, own.columns or Columns())
    held = {"val": own.val, "test": own.test}
    if own.clients is not None:
        return own_source(own.clients, held, reading, clients=True)
    if isinstance(source, L.LightningDataModule):
        given = [name for name in ("val", "test", "label", "columns") if getattr(own, name) is not None]
        if given:
            raise ConfigurationError(
                f"{given[0]} says how data are read, but a {type(source).__name__} reads its own. Say it there."
            )
        return module_source(source)
    if isinstance(source, str):
        return _named_source(source, download, held, reading, own)
    if isinstance(source, Mapping):
        return own_source(*_by_split(source, held), reading)
    if isinstance(source, DataLoader):
        return own_source({"source": source}, held, reading)  # which refuses it, as in any other place
    pair = isinstance(source, list | tuple) and len(source) == 2 and not is_pair_of_arrays(source)
    if pair and not all(isinstance(part, Dataset) for part in source):
        return own_source({"source": source[0]}, _filled(held, {"test": source[1]}), reading)
    if is_pair_of_arrays(source) or is_array(source) or is_columnar(source):
        return own_source({"source": source}, held, reading)
    found = dataset_source(source)
    if own.val is None and own.test is None and own.label is None:
        return found
    return own_source({"source": found.train}, _filled(held, {"test": found.test}), reading)


def _named_source(name: str, download: bool, held: dict[str, Any], reading: Reading, own: OwnData) -> SourceData:
    place = None if is_known(name) else find_place(name, reading.root)
    if place is not None and place.is_file() and place.suffix.lower() in TABLES:
        return own_source({"source": name}, held, reading)
    if place is not None and place.is_dir():
        layout = folder_layout(place)
        if layout.kind == "clients":
            if own.groups is not None:
                raise ConfigurationError(
                    f"groups={own.groups!r}: {place} has a folder or a file per client, which says whose the samples "
                    "are. Leave groups out."
                )
            return own_source(layout.clients, _filled(held, layout.held_out), reading, clients=True)
    data = load_image_data(name, reading.root, download, reading.image_size)
    if reading.label is not None:
        raise ConfigurationError(
            f"label={reading.label!r} names a column of a table, and {name} has images. Leave it out."
        )
    held = _filled(held, {"val": data.val, "test": data.test})
    if own.val is None and own.test is None:
        return SourceData(data.train, data.val, test=data.test, class_names=data.class_names)
    # What is given besides has to mean the same by its classes' numbers.
    if type(data.train) is TensorDataset:
        data.train.classes = data.class_names  # type: ignore[attr-defined]
        for part in (data.val, data.test):
            if part is not None:
                part.classes = data.class_names  # type: ignore[attr-defined]
    return own_source({"source": data.train}, held, reading)


def _filled(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What is held out, as given or else as found with the source."""
    twice = [name for name, each in found.items() if each is not None and given.get(name) is not None]
    if twice:
        raise ConfigurationError(f"{twice[0]}: the source has {twice[0]} data of its own. Leave it out.")
    return {name: found.get(name) if given.get(name) is None else given[name] for name in ("val", "test")}


def _by_split(source: Mapping[str, Any], held: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits by name, as Hugging Face's ``DatasetDict`` has them."""
    known = {"train": "train", "test": "test", "validation": "val", "valid": "val", "val": "val"}
    strange = [str(name) for name in source if name not in known]
    if "train" not in source or strange:
        raise ConfigurationError(
            f"source is a {type(source).__name__} of {', '.join(map(str, list(source)[:5])) or 'nothing'}: as a source "
            "it has train and perhaps validation and test. Data by client are given as clients={...}."
        )
    found: dict[str, Any] = {}
    for name, part in source.items():
        found = {**found, known[str(name)]: part}
    return {"source": found.pop("train")}, _filled(held, found)


def source_name(source: Source) -> str:
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
            f"or a LightningDataModule, the name of a data set, the path of a file or a folder, arrays (X, y), a "
            f"DataFrame or a Hugging Face data set."
        )
    return SourceData(pair[0], test=pair[1] if len(pair) == 2 else None, class_names=class_names_of(pair[0]))


def module_source(module: L.LightningDataModule) -> SourceData:
    """What a data module's training and validation loaders read, and how; its ``setup("fit")`` must have been called.

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
        raise ConfigurationError(_stream(f"{name}'s training data"))
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
