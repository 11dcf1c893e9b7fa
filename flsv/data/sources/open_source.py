"""Reading of the data that a user gives: objects, names or paths, of all clients together or of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
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
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flsv.data.groups import client_names_of
from flsv.data.hugging_face import are_tables, is_hugging_face
from flsv.data.labels import class_names_of
from flsv.data.loaders import WeightedDraws
from flsv.data.sources.places import TableRows, find_place, is_columnar
from flsv.data.sources.source_data import (
    READABLE_KINDS,
    Reading,
    SourceData,
    array_set,
    check_columns,
    concatenated,
    is_array,
    is_pair_of_arrays,
    known_as,
    one_numbering,
)
from flsv.data.streams import stream_samples
from flsv.utilities.errors import ConfigurationError, check_lightning, listed
from flsv.utilities.wings import from_wing


def read_part(
    source: Any, reading: Reading, description: str, client: str = "", is_whole: bool = False
) -> Dataset[Any] | TableRows | SourceData:
    """Read one data set as samples or a table.

    ``client`` is its client's name, if any. ``description`` names it in messages. If ``is_whole``, it may have training
    and test data.
    """
    try:
        part: Any
        if isinstance(source, str | Path):
            from flsv.data.sources.names_and_paths import read_path

            part = read_path(source, reading, client=client, is_whole=is_whole)
        else:
            part = _read_object(source, reading, client)
        training_samples: Any = part.train if isinstance(part, SourceData) else part
        if len(training_samples) == 0:
            raise ConfigurationError("the data set has no samples.")
        return part
    except ConfigurationError as error:
        raise ConfigurationError(f"{description}: {error}") from error


def _read_object(source: Any, reading: Reading, client: str) -> Dataset[Any] | TableRows:
    """Convert arrays to tensors and a DataFrame to a table. Return a map-style data set unchanged."""
    if is_pair_of_arrays(source):
        return array_set(*source)
    if is_array(source):
        return array_set(source)
    is_read_by_row = is_hugging_face(source) and not reading.has_columns
    if is_columnar(source) and not is_read_by_row:
        table: TableRows = from_wing("readers", "tables").read_table(source, reading, client)
        return table

    if isinstance(source, IterableDataset):
        return stream_samples(source)
    reason = _reason_against(source)
    if reason is None:
        return source
    raise ConfigurationError(
        f"a {type(source).__name__} cannot be read as samples: {reason}. Expected {READABLE_KINDS}. Instead of a "
        "DataLoader, give loader.dataset. Of a dictionary of splits, give one as source, and others as val and test."
    )


#: Types of objects that cannot be samples.
_TYPES_OF_NO_SAMPLE = (Dataset, DataLoader, str, Path)


def _reason_against(source: Any) -> str | None:
    """Return why the samples of an object cannot be read by their indices. None if they can, as those of a list."""
    if isinstance(source, Mapping):
        return "its keys are names instead of the samples' indices"
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        return "it has no __len__ or no __getitem__"
    if not isinstance(source, list | tuple) or len(source) == 0:
        return None

    first_item = source[0]
    if isinstance(first_item, _TYPES_OF_NO_SAMPLE) or is_columnar(first_item):
        return f"its first item is a {type(first_item).__name__}, which is not a sample"
    if len(source) == 2 and _may_be_x_and_y(*source):
        return "its two items may be two samples, or X and y. If they are X and y, X has to be an array"
    return None


def _may_be_x_and_y(first_item: Any, second_item: Any) -> bool:
    """Return whether two items of a list may be ``X`` and ``y``, because each of them has values of a single type."""
    if type(first_item) is not type(second_item):
        return True
    if not isinstance(first_item, list | tuple):
        return False
    types_of_values = [set(map(type, item)) for item in (first_item, second_item)]
    return all(len(types) <= 1 for types in types_of_values)


def open_source(
    source: Any,
    reading: Reading,
    held_out: Mapping[str, Any],
    clients: Mapping[str, Any] | None = None,
) -> SourceData:
    """Read a source, or the data of each client in ``clients``, into one ``SourceData``.

    ``held_out`` has the user's validation and test data.
    """
    if clients is not None:
        return _read_clients(clients, held_out, reading)
    check_lightning(source)
    if isinstance(source, L.LightningDataModule):
        _check_only_own_loaders(source, held_out)
        return module_source(source, reading.label)

    client_paths = _paths_by_client(source, reading)
    if client_paths:
        # What is called val or test belongs to the server.
        held_out_paths = {name: client_paths.pop(name, None) for name in ("val", "test")}
        _check_number_of_clients(source, client_paths, held_out_paths, is_site=reading.is_alone)
        held_out = _merge_held_out(held_out, held_out_paths)
        return _read_clients(client_paths, held_out, reading)

    train, test = _train_and_test(source)
    held_out = _merge_held_out(held_out, {"test": test})
    return _read_all_clients(train, held_out, reading)


def _train_and_test(source: Any) -> tuple[Any, Any]:
    """Return the training data, and the test data or None. A list or a tuple may name both."""
    is_list = isinstance(source, list | tuple) and not is_pair_of_arrays(source)
    if is_list and len(source) == 2:
        return source[0], source[1]
    if is_list and len(source) == 1:
        return source[0], None
    return source, None


def _check_only_own_loaders(module: L.LightningDataModule, held_out: Mapping[str, Any]) -> None:
    if any(data is not None for data in held_out.values()):
        raise ConfigurationError(
            f"val and test: the LightningDataModule {type(module).__name__} has its own loaders. Define "
            "val_dataloader and test_dataloader in it instead."
        )


def _paths_by_client(source: Any, reading: Reading) -> dict[str, Any]:
    """Return the paths in a folder with data by client, which may have ``val`` and ``test``, or an empty dictionary."""
    if not isinstance(source, str) or known_as(source):
        return {}
    folder = find_place(source, reading.files.root)
    if folder is None or not folder.is_dir():
        return {}
    from flsv.data.sources.names_and_paths import folder_by_client

    paths = dict(folder_by_client(folder))
    if paths and reading.group is not None:
        raise ConfigurationError(
            f"{folder} contains the data of each client, so that groups is not used. Remove the argument groups."
        )
    return paths


def _check_number_of_clients(
    folder: str,
    client_paths: Mapping[str, Any],
    held_out_paths: Mapping[str, Any],
    is_site: bool,
) -> None:
    min_clients = 1 if is_site else 2
    if len(client_paths) >= min_clients:
        return
    client_names = [path.name for path in client_paths.values()]
    held_out_names = [path.name for path in held_out_paths.values() if path is not None]
    raise ConfigurationError(
        f"{folder} contains the data of too few clients: {listed(client_names) or 'none'}. The server's data in it: "
        f"{listed(held_out_names) or 'none'}. Expected a table or folder for each of at least {min_clients} clients, "
        "and perhaps the server's as val and test. If one file or folder contains the data of all clients, give its "
        "path as the source, and the server's as the arguments val and test."
    )


def _merge_held_out(held_out: Mapping[str, Any], from_source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's ``{"val": data, "test": data}``, or else the source's own."""
    merged = {}
    for name in ("val", "test"):
        data_of_user = held_out.get(name)
        data_of_source = from_source.get(name)
        if data_of_user is not None and data_of_source is not None:
            raise ConfigurationError(
                f"{name}: the source has its own {name} data. Remove the argument {name}."
            )
        merged[name] = data_of_source if data_of_user is None else data_of_user
    return merged


def source_name(source: Any) -> str:
    """Return a source's name or path, or else the types of its objects, for messages."""
    if isinstance(source, str):
        return source
    # Longer lists are lists of samples.
    is_pair = isinstance(source, list | tuple) and len(source) <= 2
    parts = source if is_pair else [source]
    return ", ".join(type(part).__name__ for part in parts)


def clients_by_name(clients: Any) -> dict[str, Any]:
    """Return the clients' data by name. The clients of a list have their positions as names."""
    data_by_name: dict[str, Any] = {}
    if isinstance(clients, Mapping):
        data_by_name.update(clients)
    elif isinstance(clients, list | tuple):
        for position, data in enumerate(clients):
            data_by_name[str(position)] = data
    if len(data_by_name) < 2:
        raise ConfigurationError(
            f"clients: expected the data of at least 2 clients, as a dictionary {{name: data}} or a list, but got "
            f"{source_name(clients)}."
        )
    return data_by_name


def _read_clients(
    clients: Mapping[str, Any], held_out: Mapping[str, Any], reading: Reading
) -> SourceData:
    names = client_names_of(clients, "site")
    data_by_client = dict(zip(names, clients.values()))
    datasets, options = _open_loaders(data_by_client)
    all_data = [*datasets.values(), *held_out.values()]
    # Loaders, which have options, read samples and never tables.
    has_columns = not options and _have_columns(all_data, reading)
    reading = replace(reading, has_columns=has_columns)

    parts: dict[str, Any] = {}
    for name, data in datasets.items():
        parts[name] = read_part(data, reading, f"client {name!r}", client=name)
    held_out_parts = _read_held_out(held_out, reading)
    if _are_tables(parts, held_out_parts):
        return _tables_source(parts, held_out_parts, reading, are_clients=True)

    sizes = torch.tensor([len(part) for part in parts.values()])
    source = SourceData(
        parts[names[0]],  # the parts are concatenated below
        train_options=options,
        eval_options={**options, "drop_last": False},
        groups=torch.repeat_interleave(sizes),  # the number of each sample's client
        group_names=tuple(parts),
        is_by_client=True,
    )
    return _with_loaders(_with_parts(source, parts, held_out_parts, reading), held_out)


def _read_all_clients(train: Any, held_out: Mapping[str, Any], reading: Reading) -> SourceData:
    """Read the training data of all clients together."""
    has_columns = _have_columns([train, *held_out.values()], reading)
    reading = replace(reading, has_columns=has_columns)
    source: Any = read_part(train, reading, "source", is_whole=True)
    if not isinstance(source, SourceData):
        source = SourceData(source, eval_options={"drop_last": False})
    held_out = _merge_held_out(held_out, {"val": source.val, "test": source.test})

    parts = {"source": source.train}
    held_out_parts = _read_held_out(held_out, reading)
    if _are_tables(parts, held_out_parts):
        return _tables_source(parts, held_out_parts, reading, are_clients=False)
    return _with_loaders(_with_parts(source, parts, held_out_parts, reading), held_out)


def _read_held_out(held_out: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    parts: dict[str, Any] = dict.fromkeys(held_out)
    for name, data in held_out.items():
        if isinstance(data, DataLoader):
            parts[name] = (
                data.dataset
            )  # to compare its classes. Batches are made by the loader itself
        elif data is not None:
            parts[name] = read_part(data, reading, name, client=name)
    return parts


def _are_tables(
    parts: Mapping[str, Any],
    held_out_parts: Mapping[str, Any],
) -> bool:
    """Return whether all data are tables. Raise ConfigurationError if only some are."""
    names_by_kind = {isinstance(part, TableRows): name for name, part in parts.items()}
    for name, part in held_out_parts.items():
        if part is not None:
            names_by_kind[isinstance(part, TableRows)] = f"the {name} data"
    if len(names_by_kind) > 1:
        raise ConfigurationError(
            f"{names_by_kind[True]!r} is a table, but {names_by_kind[False]!r} is not. Give all data as tables, or "
            "none."
        )
    return True in names_by_kind


def _tables_source(
    parts: Mapping[str, Any],
    held_out_parts: Mapping[str, Any],
    reading: Reading,
    are_clients: bool,
) -> SourceData:
    tables = from_wing("readers", "tables")
    source: SourceData = tables.tables_source(
        parts, held_out_parts, reading, are_clients=are_clients
    )
    return source


def _with_parts(
    source: SourceData,
    parts: Mapping[str, Any],
    held_out_parts: Mapping[str, Any],
    reading: Reading,
) -> SourceData:
    """Return the source with all samples, after their classes have got the same numbers."""
    check_columns({**parts, **held_out_parts})
    class_names = one_numbering(parts, held_out_parts, reading.pos_label, label=reading.label)
    return replace(
        source,
        train=concatenated(parts),
        val=held_out_parts.get("val"),
        test=held_out_parts.get("test"),
        class_names=class_names or source.class_names,
        pos_label=reading.pos_label,
    )


def _with_loaders(source: SourceData, held_out: Mapping[str, Any]) -> SourceData:
    """Return the source with the user's loaders of validation and test data in place of their data sets."""
    val = held_out.get("val")
    test = held_out.get("test")
    if isinstance(val, DataLoader):
        source = replace(source, val=None, val_loaders=val)
    if isinstance(test, DataLoader):
        source = replace(source, test=None, test_loader=test)
    return source


def _have_columns(datasets: Sequence[Any], reading: Reading) -> bool:
    """Return whether Hugging Face data sets are read as tables."""
    if reading.dictionary is not None:
        return True
    if reading.label is None:  # the model reads samples, which are dictionaries
        return False
    return are_tables(filter(is_hugging_face, datasets), reading.named_columns)


#: Methods of ``DataLoader`` that make its batches. A subclass that overrides one of them may make other batches.
_METHODS_OF_BATCHES = ("__iter__", "__len__", "_get_iterator", "_index_sampler")


def module_source(module: L.LightningDataModule, label: str | None = None) -> SourceData:
    """Return the source of a data module's loaders, after its ``setup("fit")``.

    ``label`` is the field of the samples that has the class, if the user has named it.
    """
    source = _training_source(module.train_dataloader(), type(module).__name__)
    source = replace(
        source,
        class_names=class_names_of(source.train, label) or _declared_classes(module),
        pos_label=getattr(module, "pos_label", None),
    )
    if not is_overridden("val_dataloader", module):
        return source

    loader = _only_loader(module.val_dataloader())
    _check_class_names(source, getattr(loader, "dataset", None), label)
    has_usual_batches = _makes_usual_batches(loader)
    if has_usual_batches and isinstance(loader.batch_sampler.sampler, SequentialSampler):
        eval_options = {**loader_options(loader), "drop_last": False}
        return replace(source, val=loader.dataset, eval_options=eval_options)
    return replace(source, val_loaders=loader)


def _check_class_names(source: SourceData, val: Any, label: str | None) -> None:
    """Raise ConfigurationError if the validation data name their classes otherwise than the training data."""
    names = class_names_of(source.train, label)
    names_in_val = class_names_of(val, label)
    if names and names_in_val and names != names_in_val:
        raise ConfigurationError(
            f"the classes of the training data are {listed(names, 8)}, and those of the validation data "
            f"{listed(names_in_val, 8)}. Give both the same classes in the same order."
        )


def _declared_classes(module: L.LightningDataModule) -> tuple[str, ...]:
    num_classes = getattr(module, "num_classes", None)
    return tuple(map(str, range(num_classes))) if isinstance(num_classes, int) else ()


def _training_source(loader: Any, name: str) -> SourceData:
    if not _makes_usual_batches(loader):
        raise ConfigurationError(
            f"{name}'s training loader is {_in_words(loader)}, whose samples cannot be divided among clients. "
            "Return one torch DataLoader that makes its batches by batch_size and shuffle, or give the data set as "
            "source."
        )
    train = loader.dataset
    indices = None
    draws = None
    if isinstance(train, IterableDataset):
        train = stream_samples(train)
    else:
        indices, draws = _indices_and_draws(loader, name)
    options = loader_options(loader)
    return SourceData(
        train,
        indices=indices,
        train_loader=loader,
        draws=draws,
        train_options=options,
        eval_options={**options, "drop_last": False},
    )


def _indices_and_draws(
    loader: DataLoader[Any], name: str
) -> tuple[Tensor | None, WeightedDraws | None]:
    """Return the indices of a training loader's sampler and its weighted draws, or None for each."""
    batches: Any = loader.batch_sampler
    sampler = batches.sampler
    dataset: Any = loader.dataset
    if isinstance(sampler, SubsetRandomSampler):
        # The other samples of the data set are usually for validation.
        return torch.as_tensor(sampler.indices, dtype=torch.long), None
    if type(sampler) is WeightedRandomSampler:
        return None, _weighted_draws(sampler, len(dataset), name)
    _warn_unless_shuffled(sampler, len(dataset), name)
    return None, None


def _weighted_draws(sampler: WeightedRandomSampler, num_samples: int, name: str) -> WeightedDraws:
    weights = sampler.weights.double().cpu()
    if len(weights) != num_samples:
        raise ConfigurationError(
            f"{name}'s WeightedRandomSampler has {len(weights)} weights, but the training data have "
            f"{num_samples} samples. Give each sample a weight."
        )
    return WeightedDraws(weights, sampler.num_samples, sampler.replacement)


def _warn_unless_shuffled(sampler: Any, num_samples: int, name: str) -> None:
    draws_each_once = isinstance(sampler, RandomSampler) and not sampler.replacement
    if draws_each_once and sampler.num_samples == num_samples:
        return
    order = f"draws samples by {type(sampler).__name__}"
    if isinstance(sampler, SequentialSampler):
        order = "does not shuffle samples"
    rank_zero_warn(
        f"{name}'s training loader {order}, but flsv shuffles each client's samples uniformly. Set "
        "shuffle=True in that loader if this is what you want."
    )


def _open_loaders(loaders: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data set of each client's loader, and the options that all loaders have. Return other data as they
    are.
    """
    if not any(isinstance(loader, DataLoader) for loader in loaders.values()):
        return dict(loaders), {}
    datasets = {}
    options: dict[str, Any] = {}
    for name, loader in loaders.items():
        datasets[name] = _data_set_of(loader, name)
        options_of_loader = loader_options(loader)
        options = options or options_of_loader
        differences = [key for key in options if options[key] != options_of_loader[key]]
        if differences:
            raise ConfigurationError(
                f"client {name!r}: its loader differs in {listed(differences)} from the first client's. Give all "
                "loaders the same options, or give the data sets."
            )
    return datasets, options


def _data_set_of(loader: Any, client: str) -> Any:
    """Return the samples that a client's loader draws uniformly."""
    sampler = loader.batch_sampler.sampler if _makes_usual_batches(loader) else None
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(loader.dataset, list(sampler.indices))
    if sampler is not None and type(sampler) is not WeightedRandomSampler:
        return loader.dataset
    description = _in_words(loader) if sampler is None else f"a {type(sampler).__name__}"
    raise ConfigurationError(
        f"client {client!r}: expected a torch DataLoader that makes its batches by batch_size and shuffle, as "
        f"another client has, but got {description}. Give the data sets instead."
    )


def _only_loader(loaders: Any) -> Any:
    """Return the only loader of a list, None for an empty list, and anything else unchanged."""
    if isinstance(loaders, list | tuple) and len(loaders) <= 1:
        return loaders[0] if loaders else None
    return loaders


def _makes_usual_batches(loader: Any) -> bool:
    """Return whether ``DataLoader`` itself makes the batches, from the indices of a sampler."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return False
    classes = type(loader).__mro__
    subclasses = classes[: classes.index(DataLoader)]
    return all(vars(subclass).keys().isdisjoint(_METHODS_OF_BATCHES) for subclass in subclasses)


def _in_words(loader: Any) -> str:
    """Describe a loader that does not make usual batches, for messages."""
    text = f"a {type(loader).__name__}"
    if not isinstance(loader, DataLoader):
        return text
    if loader.batch_sampler is None:
        return f"{text} without batches (batch_size=None)"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"{text} with a batch_sampler of its own ({type(loader.batch_sampler).__name__})"
    return f"{text}, which makes batches in a way of its own"


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a loader that concern samples, batches and workers."""
    # The user may have given a batch_sampler instead of batch_size and drop_last.
    batch_sampler: Any = loader.batch_sampler
    return {
        "batch_size": batch_sampler.batch_size,
        "drop_last": batch_sampler.drop_last,
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
    }
