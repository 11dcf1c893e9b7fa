"""Kinds of sources, which read samples: each client's or all clients' data, and the server's validation and test data.

The data that a user gives are an object, a name or a path. They are read by the first kind of source whose ``match``
returns True for them. Other packages add kinds, which come before flsv's own, by an entry point of the group
``flsv.sources`` that names a class with the two methods of :class:`Source`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

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
    read_frame,
)
from flsv.data.sources.encoder import tables_source
from flsv.data.sources.named import folder_by_client, has_class_folders, image_folder, known_as, load_image_data
from flsv.data.sources.table import Table, find_place, is_columnar, is_table_file, looked_at
from flsv.utilities.errors import ConfigurationError, check_lightning
from flsv.utilities.plugins import installed

KINDS = (
    "a map-style data set, (X, y) arrays, a DataFrame, a Hugging Face data set, or the path of a CSV or Parquet "
    "file or of a folder of images, <class>/*.png"
)


class Source(Protocol):
    """Protocol of a kind of source. For data that a user gives, flsv calls :meth:`match` of one kind after the other,
    and then :meth:`open` of the first that matches.

    Example:
        >>> class Numbers:
        ...     def match(self, given):
        ...         return isinstance(given, range)
        ...     def open(self, given, reading):
        ...         x = torch.tensor(given).float()[:, None]
        ...         return torch.utils.data.TensorDataset(x, torch.zeros(len(x), dtype=torch.long))
        >>> Numbers().match(range(7)), len(Numbers().open(range(7), Reading()))
        (True, 7)
    """

    def match(self, given: Any) -> bool:
        """Return whether this kind of source can read ``given``.

        Args:
            given: the ``Path`` of an existing file or folder, a name that is not such a path, or an object.
        """

    def open(self, given: Any, reading: Reading) -> Any:
        """Read the samples.

        Args:
            given: an object for which :meth:`match` is True.
            reading: the user's options of reading.

        Returns:
            A map-style data set, whose attributes ``targets``, ``classes`` and ``groups`` are read if it has them;
            arrays; an object with columns; or a :class:`~flsv.data.SourceData` if the data have splits of their own and
            must be partitioned as a whole.

        Raises:
            ConfigurationError: the data cannot be read; the message says which forms can be read.
        """


@dataclass(frozen=True)
class _Kind:
    """A :class:`Source` whose methods ``match`` and ``open`` are the functions given to the constructor."""

    match: Callable[[Any], bool]
    open: Callable[[Any, Reading], Any]


def _image_set(given: str | Path, reading: Reading) -> SourceData:
    files = reading.files
    data = load_image_data(str(given), files.root, files.download, files.image_size)
    for part in (data.train, data.val, data.test):
        # The user's own validation and test data must have the same numbers of classes.
        if type(part) is TensorDataset:
            part.classes = data.class_names  # type: ignore[attr-defined]  # an attribute of ours
    return data


def _is_data_set(given: Any) -> bool:
    streams = IterableDataset | Mapping | list | tuple | str
    return hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, streams)


#: Images of a named data set, an archive or a folder with splits. This kind also reports a path that does not exist.
_IMAGES = _Kind(lambda given: isinstance(given, str | Path), _image_set)
SOURCES: tuple[Source, ...] = (
    _Kind(is_table_file, lambda path, reading: reading.table(path)),
    _Kind(
        lambda given: isinstance(given, Path) and given.is_dir() and has_class_folders(given),
        lambda path, reading: image_folder(path, reading.files.image_size),
    ),
    _IMAGES,
    _Kind(is_pair_of_arrays, lambda pair, reading: array_set(*pair)),
    _Kind(is_array, lambda x, reading: array_set(x)),
    _Kind(is_columnar, read_frame),
    _Kind(_is_data_set, lambda samples, reading: samples),
)


@cache
def sources() -> tuple[Source, ...]:
    """Return all kinds of sources, those of other packages first."""
    return (*(kind() for kind in installed("flsv.sources")), *SOURCES)


def _is_rows(place: Path | str) -> bool:
    """Return whether samples of a path or name can be one client's: any kind but images with splits."""
    return any(kind.match(place) for kind in sources() if kind is not _IMAGES)


def _is_one(path: Path) -> bool:
    """Return whether a path has one participant's samples: such a file, or a folder that another package reads."""
    return _is_rows(path) if path.is_file() else any(kind.match(path) for kind in sources()[: -len(SOURCES)])


def read_part(given: Any, reading: Reading, what: str, whole: bool = False) -> Dataset | Table | SourceData:
    """Read one data set as samples or a table; with ``whole`` also data with splits of their own."""
    try:
        part = _open(_place(given, reading, whole) if isinstance(given, str | Path) else given, reading)
        if isinstance(part, SourceData) and not whole:
            raise ConfigurationError(
                f"{given} has its own splits, and can only be partitioned as a whole: give it as source."
            )
        # For mypy: a map-style data set has a length.
        if len(part.train if isinstance(part, SourceData) else part) == 0:  # type: ignore[arg-type]
            raise ConfigurationError("there are no samples.")
        return part
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error}") from error


def _place(given: str | Path, reading: Reading, whole: bool) -> Path | str:
    """Return the path that ``given`` means, such as the only file in a client's folder, or the name of a data set."""
    name = str(given)
    place = find_place(name, reading.files.root)
    if whole or (place is None and _is_rows(name)):
        return name if place is None or known_as(name) else place
    if place is not None and place.is_dir() and not _is_one(place):
        inside = [entry for entry in place.iterdir() if entry.name[0] != "." and _is_one(entry)]
        place = inside[0] if len(inside) == 1 else place
    if place is None or not _is_rows(place):
        looked = looked_at(name, reading.files.root)
        raise ConfigurationError(f"{name!r} was not found, or cannot be read: looked at {looked}. Expected {KINDS}.")
    return place


def _open(given: Any, reading: Reading) -> Dataset | Table | SourceData:
    """Open data by the first kind of source that matches, again and again until samples or a table are left."""
    kind = next((kind for kind in sources() if kind.match(given)), None)
    if kind is None:
        raise ConfigurationError(
            f"a {type(given).__name__} cannot be read as samples, which have a number and a length. Expected {KINDS}. "
            "Instead of a DataLoader give loader.dataset; of named splits give one as source, and "
            "others as val and test."
        )
    found = kind.open(given, reading)
    done = found is given or isinstance(found, Dataset | Table | SourceData)
    return found if done else _open(found, reading)


def open_source(
    source: Any,
    reading: Reading,
    held_out: Mapping[str, Any],
    clients: Mapping[str, Any] | None = None,
    joining: Mapping[str, Any] | None = None,
) -> SourceData:
    """Open a source, or the data of each client, by the first kind of source that matches."""
    if clients is not None:
        return _own_source(clients, held_out, reading, True, joining)
    check_lightning(source)
    if isinstance(source, L.LightningDataModule):
        if joining:
            raise ConfigurationError(f"a client cannot join the data of a {type(source).__name__}: give data sets.")
        if any(each is not None for each in held_out.values()):
            raise ConfigurationError(f"val and test: a {type(source).__name__} has its own loaders. Define them there.")
        return module_source(source)
    place = find_place(source, reading.files.root) if isinstance(source, str) and not known_as(source) else None
    if place is not None and place.is_dir() and not _is_one(place) and (found := folder_by_client(place, _is_one)):
        if reading.group is not None:
            raise ConfigurationError(f"{place} has data by client, which defines the clients: leave groups out.")
        own = {name: found.pop(name, None) for name in ("val", "test")}
        return _own_source(found, _filled(held_out, own), reading, True, joining)
    parts = _splits(source)
    return _own_source({"source": parts.pop("train")}, _filled(held_out, parts), reading, False, joining)


def _splits(source: Any) -> dict[str, Any]:
    """Return ``{"train": source}``, or ``{"train": first, "test": second}`` of a pair of data sets."""
    pair = isinstance(source, list | tuple) and 0 < len(source) <= 2 and not is_pair_of_arrays(source)
    return dict(zip(("train", "test"), source if pair else [source]))


def _filled(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"val": data, "test": data}``, the user's or else the source's own."""
    twice = [name for name, each in found.items() if each is not None and given.get(name) is not None]
    if twice:
        raise ConfigurationError(f"{twice[0]}: the source has {twice[0]} data of its own. Leave it out.")
    return {name: found.get(name) if given.get(name) is None else given[name] for name in ("val", "test")}


def source_name(source: Any) -> str:
    """Return a name of a source for messages: the name or path if the user gave one, else the types of the objects."""
    if isinstance(source, str):
        return source
    return ", ".join(type(part).__name__ for part in (source if isinstance(source, list | tuple) else [source]))


def _own_source(
    train: Mapping[str, Any],
    held_out: Mapping[str, Any],
    reading: Reading,
    clients: bool = False,
    joining: Mapping[str, Any] | None = None,
) -> SourceData:
    """Combine the clients' data, or a single data set under any name, into one source."""
    if clients:
        train = dict(zip(plain_names(train, "site"), train.values()))
    parts: dict[str, Any] = {
        name: read_part(each, reading, f"client {name!r}" if clients else "source", whole=not clients)
        for name, each in train.items()
    }
    base = next(iter(parts.values()))
    if isinstance(base, SourceData):
        parts, held_out = {"source": base.train}, _filled(held_out, {"val": base.val, "test": base.test})
    parts |= {name: read_part(each, reading, f"client {name!r}", whole=False) for name, each in (joining or {}).items()}
    held = {name: None if each is None else read_part(each, reading, name) for name, each in held_out.items()}
    together = {**parts, **{f"the {name} data": part for name, part in held.items() if part is not None}}
    kinds = {isinstance(part, Table): name for name, part in together.items()}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{kinds[True]!r} is a table and {kinds[False]!r} is not: give all data as tables, or none."
        )
    if True in kinds:
        label = reading.table_label(next(iter(parts.values())))  # type: ignore[arg-type]  # all are tables
        # For mypy: all are tables.
        return tables_source(parts, held, label, reading, clients)  # type: ignore[arg-type]
    found = base if isinstance(base, SourceData) else SourceData(base, clients=clients)
    return _sets_source(found, parts, held, reading.pos_label, clients)


def _sets_source(
    found: SourceData, parts: Mapping[str, Any], held: Mapping[str, Any], pos_label: Any, clients: bool
) -> SourceData:
    """Return ``found`` with the clients' data sets concatenated, and with validation and test data."""
    sets, rest, classes = one_numbering(parts, held, pos_label)
    ours = all(map(by_name, parts.values()))
    if clients:
        sizes = torch.tensor([len(part) for part in sets.values()])  # type: ignore[arg-type]  # map-style: has a length
        found = replace(found, groups=torch.repeat_interleave(sizes), group_names=tuple(sets))
    return replace(
        found,
        train=concatenated(sets),
        val=rest.get("val"),
        test=rest.get("test"),
        class_names=classes or found.class_names,
        by_rarity=ours and chosen_by_rarity(classes, pos_label),
    )


#: Methods of ``DataLoader``; a subclass that overrides one of them may make other batches.
_BATCHES = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


def module_source(module: L.LightningDataModule) -> SourceData:
    """Return the source of a data module's training and validation loaders, after its ``setup("fit")``."""
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
    val_loaders = _single(module.val_dataloader()) if is_overridden("val_dataloader", module) else None
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
    """Return the indices that a training loader is confined to, and the weights by which it draws, if it has them."""
    batches: Any = loader.batch_sampler
    sampler = batches.sampler
    held: Any = loader.dataset
    if isinstance(sampler, SubsetRandomSampler):
        # This sampler usually holds out validation samples of the same data set, which must stay held out.
        return torch.as_tensor(sampler.indices, dtype=torch.long), None
    if type(sampler) is WeightedRandomSampler:
        draws = WeightedDraws(sampler.weights.double().cpu(), sampler.num_samples, sampler.replacement)
        if len(draws.weights) != len(held):
            raise ConfigurationError(
                f"{name}'s WeightedRandomSampler has {len(draws.weights)} weights, and the training data have "
                f"{len(held)} samples. Give each sample a weight."
            )
        return None, draws
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(held)
    if not (whole or isinstance(sampler, SequentialSampler)):
        kind = type(sampler).__name__
        rank_zero_warn(
            f"{name}'s training loader draws samples by {kind}. Each client's samples are shuffled uniformly instead."
        )
    return None, None


def _single(loaders: Any) -> Any:
    """Return the only loader of a list, None if the list is empty, and anything else unchanged."""
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
        **{name: getattr(loader, name) for name in ("collate_fn", "num_workers", "pin_memory", "worker_init_fn")},
    }
