"""Reading of the data that a user gives, as objects, names or paths.

They are each client's or all clients' samples, and the server's validation and test data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
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
    TensorDataset,
    WeightedRandomSampler,
)

from flsv.data.groups import plain_names
from flsv.data.labels import chosen_by_rarity, class_names_of
from flsv.data.loaders import WeightedDraws
from flsv.data.sources.base import (
    Reading,
    SourceData,
    array_set,
    by_name,
    concatenated,
    is_array,
    is_pair_of_arrays,
    one_numbering,
)
from flsv.data.sources.named import (
    folder_by_client,
    has_class_folders,
    image_folder,
    known_as,
    load_image_data,
    warn_of_empty_classes,
)
from flsv.data.sources.table import (
    Table,
    find_place,
    frame_table,
    is_columnar,
    is_table_file,
    looked_at,
    read_table_file,
)
from flsv.utilities.errors import ConfigurationError, check_lightning

KINDS = (
    "a map-style data set, (X, y) arrays, a DataFrame, a Hugging Face data set, or the path of a CSV or Parquet "
    "file or of a folder of images, <class>/*.png"
)


def read_part(
    given: Any, reading: Reading, what: str, whole: bool = False
) -> Dataset | Table | SourceData:
    """Read one data set as samples or a table.

    ``what`` names it in messages. With ``whole``, it may have training and test data.
    """
    try:
        part = (
            _read_path(given, reading, whole)
            if isinstance(given, str | Path)
            else _read_object(given, reading)
        )
        # For mypy: a map-style data set has a length.
        if len(part.train if isinstance(part, SourceData) else part) == 0:  # type: ignore[arg-type]
            raise ConfigurationError("there are no samples.")
        return part
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error}") from error


def _read_path(source: str | Path, reading: Reading, whole: bool) -> Dataset | Table | SourceData:
    """Read a table file or a folder of images by class.

    With ``whole``, the path may also be a data set's name.
    """
    files = reading.files
    path = None if whole and known_as(source) else find_place(source, files.root)
    if path is not None and path.is_dir() and not whole:  # one file in a client's folder
        tables = [
            entry for entry in path.iterdir() if entry.name[0] != "." and is_table_file(entry)
        ]
        path = tables[0] if len(tables) == 1 else path
    if path is not None and is_table_file(path):
        return read_table_file(path, reading.columns.encoding)
    if path is not None and path.is_dir() and has_class_folders(path):
        images = image_folder(path, files.image_size)
        if whole:
            warn_of_empty_classes(path, images)
        return images
    if not whole:
        looked = looked_at(str(source), files.root)
        raise ConfigurationError(
            f"{str(source)!r} was not found, or cannot be read: looked at {looked}. Expected {KINDS}."
        )
    data = load_image_data(str(source), files.root, files.download, files.image_size)
    for part in (data.train, data.val, data.test):
        # The user's own validation and test data must have the same numbers of classes.
        if type(part) is TensorDataset:
            part.classes = data.class_names  # type: ignore[attr-defined]  # an attribute of ours
    return data


def _read_object(given: Any, reading: Reading) -> Dataset | Table:
    """Convert arrays to tensors and a DataFrame to a table. Return a map-style data set unchanged."""
    if is_pair_of_arrays(given):
        return array_set(*given)
    if is_array(given):
        return array_set(given)
    # A model may read the rows of a Hugging Face data set itself.
    by_row = isinstance(getattr(given, "features", None), Mapping) and reading.label is None
    if is_columnar(given) and not by_row:
        return frame_table(given)
    streams = IterableDataset | Mapping | list | tuple
    if (
        hasattr(given, "__len__")
        and hasattr(given, "__getitem__")
        and not isinstance(given, streams)
    ):
        return given
    raise ConfigurationError(
        f"a {type(given).__name__} cannot be read as samples, which have a number and a length. Expected {KINDS}. "
        "Instead of a DataLoader give loader.dataset; of named splits give one as source, and others as val and test."
    )


def open_source(
    source: Any,
    reading: Reading,
    held_out: Mapping[str, Any],
    clients: Mapping[str, Any] | None = None,
    joining: Mapping[str, Any] | None = None,
) -> SourceData:
    """Read a source, or the data of each client in ``clients``, into one ``SourceData``.

    ``held_out`` has the user's validation and test data, ``joining`` a client to add.
    """
    if clients is not None:
        return _own_source(clients, held_out, reading, True, joining)
    check_lightning(source)
    if isinstance(source, L.LightningDataModule):
        if joining:
            raise ConfigurationError(
                f"a client cannot join the data of a {type(source).__name__}: give data sets."
            )
        if any(each is not None for each in held_out.values()):
            raise ConfigurationError(
                f"val and test: a {type(source).__name__} has its own loaders. Define them there."
            )
        return module_source(source)
    place = (
        find_place(source, reading.files.root)
        if isinstance(source, str) and not known_as(source)
        else None
    )
    if place is not None and place.is_dir() and (found := folder_by_client(place)):
        if reading.group is not None:
            raise ConfigurationError(
                f"{place} has data by client, which defines the clients: leave groups out."
            )
        own = {name: found.pop(name, None) for name in ("val", "test")}
        return _own_source(found, _filled(held_out, own), reading, True, joining)
    pair = (
        isinstance(source, list | tuple) and 0 < len(source) <= 2 and not is_pair_of_arrays(source)
    )
    train, *test = source if pair else [source]
    return _own_source(
        {"source": train}, _filled(held_out, dict(zip(["test"], test))), reading, False, joining
    )


def tables_source(
    tables: Mapping[str, Table],
    held_out: Mapping[str, Table | None],
    reading: Reading,
    clients: bool,
) -> SourceData:
    """Return the source of the clients' and the held-out tables."""
    # Loaded here, since most data are no tables.
    make_source = resolve_name("flsv.data.sources.encoder:tables_source")
    source: SourceData = make_source(tables, held_out, reading, clients)
    return source


def _filled(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"val": data, "test": data}`` as ``given`` by the user, or else the source's own ``found``."""
    twice = [
        name for name, each in found.items() if each is not None and given.get(name) is not None
    ]
    if twice:
        raise ConfigurationError(
            f"{twice[0]}: the source has {twice[0]} data of its own. Leave it out."
        )
    return {
        name: found.get(name) if given.get(name) is None else given[name]
        for name in ("val", "test")
    }


def source_name(source: Any) -> str:
    """Return a source's name for messages: the user's name or path, or else the objects' types."""
    if isinstance(source, str):
        return source
    return ", ".join(
        type(part).__name__ for part in (source if isinstance(source, list | tuple) else [source])
    )


def _own_source(
    train: Mapping[str, Any],
    held_out: Mapping[str, Any],
    reading: Reading,
    clients: bool = False,
    joining: Mapping[str, Any] | None = None,
) -> SourceData:
    """Combine the clients' data, or a single data set in ``train``, into one source."""
    if clients:
        train = dict(zip(plain_names(train, "site"), train.values()))
    parts: dict[str, Any] = {
        name: read_part(
            each, reading, f"client {name!r}" if clients else "source", whole=not clients
        )
        for name, each in train.items()
    }
    base = next(iter(parts.values()))
    if isinstance(base, SourceData):
        parts, held_out = (
            {"source": base.train},
            _filled(held_out, {"val": base.val, "test": base.test}),
        )
    parts |= {
        name: read_part(each, reading, f"client {name!r}") for name, each in (joining or {}).items()
    }
    held = {
        name: None if each is None else read_part(each, reading, name)
        for name, each in held_out.items()
    }
    together = {
        **parts,
        **{f"the {name} data": part for name, part in held.items() if part is not None},
    }
    kinds = {isinstance(part, Table): name for name, part in together.items()}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{kinds[True]!r} is a table and {kinds[False]!r} is not: give all data as tables, or none."
        )
    if True in kinds:
        # For mypy: all are tables.
        return tables_source(parts, held, reading, clients)  # type: ignore[arg-type]
    found = base if isinstance(base, SourceData) else SourceData(base, clients=clients)
    # For mypy: none is a table.
    sets, rest, classes = one_numbering(parts, held, reading.pos_label)  # type: ignore[arg-type]
    if clients:
        # For mypy: a map-style data set has a length.
        sizes = torch.tensor([len(part) for part in sets.values()])  # type: ignore[arg-type]
        found = replace(found, groups=torch.repeat_interleave(sizes), group_names=tuple(sets))
    return replace(
        found,
        train=concatenated(sets),
        val=rest.get("val"),
        test=rest.get("test"),
        class_names=classes or found.class_names,
        by_rarity=all(map(by_name, parts.values()))
        and chosen_by_rarity(classes, reading.pos_label),
    )


#: Methods of ``DataLoader``; a subclass that overrides one of them may make other batches.
_BATCHES = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


def module_source(module: L.LightningDataModule) -> SourceData:
    """Return the source of a data module's loaders, after its ``setup("fit")``."""
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
    indices, draws = _drawn_by(loader, name)
    val, eval_options = None, _options(loader)
    val_loaders = (
        _single(module.val_dataloader()) if is_overridden("val_dataloader", module) else None
    )
    if (
        isinstance(val_loaders, DataLoader)
        and type(val_loaders.batch_sampler) is BatchSampler
        and isinstance(val_loaders.batch_sampler.sampler, SequentialSampler)
        and not makes_own_batches(val_loaders)
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
        pooled=getattr(module, "pooled_inputs", False),
        columns=getattr(module, "columns_read", ()),
        by_rarity=getattr(loader.dataset, "by_rarity", False),
        draws=draws,
    )


def _drawn_by(loader: DataLoader[Any], name: str) -> tuple[Tensor | None, WeightedDraws | None]:
    """Return the indices to which a training loader's sampler is restricted, and its weighted draws.

    Either is None if the sampler has none.
    """
    batches: Any = loader.batch_sampler
    sampler = batches.sampler
    dataset: Any = loader.dataset
    if isinstance(sampler, SubsetRandomSampler):
        # This sampler usually holds out validation samples of the same data set, which must stay held out.
        return torch.as_tensor(sampler.indices, dtype=torch.long), None
    if type(sampler) is WeightedRandomSampler:
        draws = WeightedDraws(
            sampler.weights.double().cpu(), sampler.num_samples, sampler.replacement
        )
        if len(draws.weights) != len(dataset):
            raise ConfigurationError(
                f"{name}'s WeightedRandomSampler has {len(draws.weights)} weights, and the training data have "
                f"{len(dataset)} samples. Give each sample a weight."
            )
        return None, draws
    is_shuffled = (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(dataset)
    )
    if not is_shuffled:
        order = f"draws samples by {type(sampler).__name__}"
        if isinstance(sampler, SequentialSampler):
            order = "reads samples in their order (shuffle=False)"
        rank_zero_warn(
            f"{name}'s training loader {order}. Each client's samples are shuffled uniformly instead. With "
            "shuffle=True there they are, without this warning."
        )
    return None, None


def _single(loaders: Any) -> Any:
    """Return the only loader of a list, or None if the list is empty. Return anything else unchanged."""
    if isinstance(loaders, list | tuple) and len(loaders) <= 1:
        return loaders[0] if loaders else None
    return loaders


def makes_own_batches(loader: DataLoader) -> bool:
    """Return whether a loader's class overrides how ``DataLoader`` makes batches."""
    classes = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    return any(name in vars(each) for each in classes for name in _BATCHES)


def _options(loader: DataLoader) -> dict[str, Any]:
    return {
        # From the batch sampler, which may be given instead of these two options.
        "batch_size": loader.batch_sampler.batch_size,  # type: ignore[union-attr]  # module_source checks it
        "drop_last": loader.batch_sampler.drop_last,  # type: ignore[union-attr]  # module_source checks it
        **{
            name: getattr(loader, name)
            for name in ("collate_fn", "num_workers", "pin_memory", "worker_init_fn")
        },
    }
