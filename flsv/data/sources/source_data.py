"""SourceData, the common form of all data that a user gives, and functions that make it.

These convert arrays ``(X, y)``, give classes the same numbers in several data sets, and concatenate data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import lightning as L
import numpy as np
import torch
from jsonargparse.typing import register_type, restricted_string_type
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from flsv.data.groups import check_spelling, number_values
from flsv.data.hugging_face import is_hugging_face
from flsv.data.labels import class_names_of, declared_order, in_declared_order, positive_last
from flsv.data.loaders import WeightedDraws, make_loader, tensors_of
from flsv.data.sources.places import data_root, is_columnar
from flsv.data.sources.table_facts import ColumnCard, DataDictionary, TableWarning
from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError, listed

if TYPE_CHECKING:
    # Arrays, a DataFrame, a path, objects that other packages read.
    Source: TypeAlias = Any
else:
    #: Name of a file. Without this type, the command line takes visits.csv for a class csv in visits.py.
    FileName = restricted_string_type("FileName", r"(?i).*\.(csv|tsv|parquet|npz)$")
    # jsonargparse's own serializer would save each class path as a text.
    register_type(FileName, lambda name: str(FileName(name)), fail_already_registered=False)
    # Types that the command line can make, in this order: a data module before str, so that YAML may name just its
    # class; Dataset after str, so that names of torchvision's data sets are not taken for its classes. With Path,
    # jsonargparse does not read a text file as the option's value. It is last, since it saves all objects as texts.
    Source = FileName | L.LightningDataModule | str | Dataset | Sequence[FileName | Dataset] | Path


Datasets: TypeAlias = Mapping[str, Dataset[Any]]
Names: TypeAlias = tuple[str, ...]
#: Names of the data sets of torchvision.
TORCHVISION_SETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")
#: Names of the data sets that can be loaded by name.
DATA_SETS = ("digits", *TORCHVISION_SETS, "gaussians")
#: What the user may give as the samples of a client.
READABLE_KINDS = (
    "a map-style data set, a list of samples, (X, y) arrays, a DataFrame, a Hugging Face data set, or the path of a "
    "CSV or Parquet file or of a folder of images, <class>/*.png"
)


@dataclass(frozen=True)
class SourceData:
    """Data that a user has given, after they were read.

    Args:
        train: the training data, a map-style data set.
        val: the source's own validation data.
        val_loaders: loaders of validation data, instead of ``val``.
        test: the test data.
        test_loader: loader of test data, instead of ``test``.
        indices: indices of the samples of ``train`` that may be used, int64 ``[n]``. None: all.
        class_names: names of the classes, or empty.
        train_loader: the training loader of the user's data module.
        draws: draws of training samples by weights. None: every sample once in an epoch.
        train_options: the source's ``DataLoader`` options for training.
        eval_options: the source's ``DataLoader`` options for evaluation.
        groups: number of each training sample's group, int64 ``[N]``.
        group_names: names of the groups, by number.
        is_by_client: whether the user gave the data by client. Then each client keeps a training sample.
        has_target_column: whether the targets are in a table's column, which the argument ``labels`` names.
        pos_label: the positive one of two classes, if the user has named it.
        columns: one :class:`ColumnCard` per column of a table.
        make_features: function that makes the features of a table. It takes the clients' training indices by name, and
            returns a new ``SourceData``.
        dictionary: the data dictionary by which a table is read, incomplete before the features are made.
        is_inferred: whether the dictionary, or a part of it, was inferred from the samples.
        missing_from_dictionary: what is missing in the user's dictionary.
        data_warnings: data warnings about the clients' tables.
        split_columns: training rows' values in the columns by which a table is split.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None = None
    val_loaders: Iterable[Any] | None = None
    test: Dataset[Any] | None = None
    test_loader: DataLoader[Any] | None = None
    indices: Tensor | None = None
    class_names: tuple[str, ...] = ()
    train_loader: DataLoader[Any] | None = None
    draws: WeightedDraws | None = None
    train_options: dict[str, Any] = field(default_factory=dict)
    eval_options: dict[str, Any] = field(default_factory=dict)
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    is_by_client: bool = False
    has_target_column: bool = False
    pos_label: str | bool | int | None = None
    columns: tuple[ColumnCard, ...] = ()
    make_features: Callable[[Mapping[str, Tensor]], SourceData] | None = None
    dictionary: DataDictionary | None = None
    is_inferred: bool = False
    missing_from_dictionary: str = ""
    data_warnings: tuple[TableWarning, ...] = ()
    split_columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, for which one sample is read. Empty if a batch has no tensor."""
        loader = make_loader(
            self.train,
            torch.zeros(1, dtype=torch.long),
            batch_size=1,
            collate_fn=self.eval_options.get("collate_fn"),
        )
        for part in tree_leaves(next(iter(loader))):
            if isinstance(part, Tensor):
                return tuple(part.shape[1:])
        return ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors from which training batches are gathered, ``[N, ...]``. Empty if samples are read one by one."""
        collate_fn = self.train_options.get("collate_fn")
        tensors, _ = tensors_of(self.train, collate_fn=collate_fn)
        return tensors or ()

    def to_device(self, device: torch.device) -> SourceData:
        """Return a copy whose training and validation tensors lie on ``device``."""
        # By the ids of the tensors' tuples: data sets for training and validation may share tensors.
        moved_sets: dict[int, TensorDataset] = {}
        train = _on_device(self.train, device, self.train_options, moved_sets)
        val = _on_device(self.val, device, self.eval_options, moved_sets)
        return replace(self, train=train, val=val)


def _on_device(
    dataset: Any,
    device: torch.device,
    options: Mapping[str, Any],
    moved_sets: dict[int, TensorDataset],
) -> Any:
    """Return a data set on ``device``, from ``moved_sets`` if another one has the same tensors, or add it there."""
    tensors, rows = tensors_of(dataset, collate_fn=options.get("collate_fn"))
    if tensors is None:
        return dataset
    if id(tensors) not in moved_sets:
        moved_tensors = [tensor.to(device) for tensor in tensors]
        moved_sets[id(tensors)] = TensorDataset(*moved_tensors)
    moved_set = moved_sets[id(tensors)]
    if rows is None:
        return moved_set
    return Subset(moved_set, rows.tolist())


@checked
@dataclass(frozen=True)
class Files:
    """Location of the source's files, and size of images.

    Args:
        root: folder of named data sets and files. None: ``$FLSV_DATA_ROOT``, else ``data``.
        download: whether to download torchvision's data sets if they are missing.
        image_size: side in pixels to which the images of a folder are resized.

    Raises:
        ConfigurationError: ``image_size`` is below 1, or an argument has another type.
    """

    root: str | None = None
    download: bool = False
    image_size: Count = 224

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", str(data_root(self.root)))


@dataclass(frozen=True)
class Reading:
    """Options of reading data.

    Args:
        files: location of files, and the size of a folder's images.
        label: the column to predict.
        group: the column with each row's client.
        dictionary: the user's data dictionary of tables.
        pos_label: the positive one of two classes. None: the larger number or ``True``.
        split_columns: columns by which rows are held out. They become no features unless the dictionary names them.
        is_alone: whether the data are of one site.
        has_columns: whether Hugging Face data sets are read as tables, instead of sample by sample.
    """

    files: Files = field(default_factory=Files)
    label: str | None = None
    group: str | None = None
    dictionary: DataDictionary | None = None
    pos_label: str | bool | int | None = None
    is_alone: bool = False
    split_columns: tuple[str, ...] = ()
    has_columns: bool = False

    @property
    def named_columns(self) -> tuple[str | None, ...]:
        """Columns of a table that become no features unless the dictionary names them."""
        return (self.label, self.group, *self.split_columns)


def known_as(name: object) -> str | None:
    """Return ``name`` if it is in :data:`DATA_SETS`, or None if it can only be a path."""
    return name if isinstance(name, str) and name in DATA_SETS else None


def image_tensor(
    images: Any, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Tensor:
    """Convert uint8 ``[N, H, W]`` or ``[N, H, W, C]`` to ``(pixel / 255 - mean) / std``, float32 ``[N, C, H, W]``."""
    pixels = torch.as_tensor(images)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2)
    # Changed in place in one contiguous copy, since data sets may be large compared with the memory of a laptop.
    floats = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return floats.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(std).view(-1, 1, 1))


def tensor_set(images: Tensor, labels: Any) -> TensorDataset:
    """Make a data set of images and classes."""
    return TensorDataset(images, torch.from_numpy(np.asarray(labels).astype(np.int64)))


def is_array(value: Any) -> bool:
    """Return whether ``value`` is a NumPy array or a tensor."""
    return isinstance(value, np.ndarray | Tensor)


def is_pair_of_arrays(value: Any) -> bool:
    """Return whether ``value`` is ``(X, y)``, an array or DataFrame of inputs and an array or list of targets."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    x, y = value
    is_table = is_columnar(x) and not is_hugging_face(x)
    if not is_array(x) and not is_table:
        return False
    if is_array(y):
        return True
    # Targets in a list are numbers or words, but a list of arrays or lists is a second data set.
    if isinstance(y, list | tuple):
        return not any(is_array(target) or isinstance(target, list | tuple) for target in y)
    # Other kinds of arrays, such as a pandas Series, may be targets, but a table or a data set is a second data set.
    is_table_or_dataset = isinstance(y, Dataset) or is_columnar(y)
    return hasattr(y, "shape") and not is_table_or_dataset


def array_set(x: Any, y: Any = None) -> TensorDataset:
    """Make a data set of tensors from inputs ``x`` and, if given, targets ``y``.

    Floating-point and boolean inputs become float32. 8-bit pixels ``[N, H, W]``, ``[N, H, W, 1 or 3]`` or
    ``[N, 1 or 3, H, W]`` become images ``[N, C, H, W]`` in 0 .. 1. Other whole numbers, such as tokens, become int64.
    Targets that are whole numbers or words are classes. Words are numbered in sorted order, and those of categories (as
    of pandas) in the order of these. Floating-point targets are numbers to predict (float32).

    Args:
        x: inputs ``[N, ...]``, or a DataFrame of numbers, which become float32.
        y: targets ``[N]``, ``[N, 1]`` or, for numbers, ``[N, ...]``. None: no targets.

    Returns:
        The data set. If ``y`` are words, its attribute ``classes`` has the names of the classes, ``by_name`` is True,
        see :func:`is_numbered_by_flsv`, and ``declared_order`` has the categories of ``y``.

    Raises:
        ConfigurationError: the inputs are not numbers, an image's channels may be its second or its last dimension,
            ``x`` and ``y`` have different lengths, or a target is missing.

    Example:
        >>> data = array_set(np.eye(3), ["ill", "well", "ill"])
        >>> data.tensors[1], data.classes
        (tensor([0, 1, 0]), ('ill', 'well'))
    """
    if is_columnar(x):
        numbers, names = _numbers_of_table(x)
        data: Any = array_set(numbers, y)
        data.columns = names
        return data
    inputs = _inputs(x)
    if y is None:
        return TensorDataset(inputs)
    targets = _targets(y, inputs.shape)
    if targets.dtype.kind in "biu":
        return TensorDataset(inputs, torch.from_numpy(targets.astype(np.int64)))
    if targets.dtype.kind == "f" and np.isfinite(targets).all():
        return TensorDataset(inputs, torch.from_numpy(targets.astype(np.float32)))
    are_words = all(isinstance(target, str) for target in targets.tolist())
    if targets.ndim == 1 and are_words:
        return _set_of_words(inputs, targets, _declared_order_of(y))
    raise ConfigurationError(
        f"(X, y): y has the type {targets.dtype} and the shape {list(targets.shape)}. Expected one class for each "
        "sample, or numbers, none of them NaN or infinite."
    )


def _targets(y: Any, input_shape: torch.Size) -> np.ndarray:
    """Return one target for each input, classes ``[N, 1]`` as ``[N]``."""
    targets = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if targets.shape[:1] != input_shape[:1]:
        raise ConfigurationError(
            f"(X, y): X has the shape {list(input_shape)}, but y has the shape {list(targets.shape)}. Give one target "
            "for each sample."
        )
    if targets.ndim == 2 and targets.shape[1] == 1 and targets.dtype.kind != "f":
        return targets[:, 0]
    return targets


def _set_of_words(inputs: Tensor, words: np.ndarray, order: Names) -> TensorDataset:
    class_names, labels = number_values(words.astype(str))
    data: Any = TensorDataset(inputs, labels)
    data.classes = tuple(class_names)
    data.by_name = True
    data.declared_order = order
    return data


def _declared_order_of(y: Any) -> Names:
    """Return the order that the categories of pandas, polars or Arrow declare, or an empty tuple."""
    if hasattr(getattr(y, "dtype", None), "pyarrow_dtype"):  # a pandas Series with a type of Arrow
        y = y.array.__arrow_array__().to_pandas()
    dtype = getattr(y, "dtype", None)
    categories = getattr(dtype, "categories", None)
    if not isinstance(categories, Iterable):
        return ()
    is_ordered = getattr(dtype, "ordered", True)
    return declared_order(list(map(str, categories)), is_ordered=bool(is_ordered))


def _numbers_of_table(table: Any) -> tuple[np.ndarray, Names]:
    """Return a DataFrame's values, float32 ``[N, D]``, and the names of its columns."""
    frame = table.to_pandas() if hasattr(table, "to_pandas") else table
    names = tuple(map(str, frame.columns))
    other_names = []
    for name, dtype, has_gaps in zip(names, frame.dtypes, frame.isna().any()):
        if dtype.kind not in "biuf" or has_gaps:
            other_names.append(name)
    if other_names:
        raise ConfigurationError(
            f"(X, y): the columns {listed(other_names, show=repr)} of X are not numbers, or have missing values. Give "
            "one DataFrame with the column to predict, and name that column by labels."
        )
    return frame.to_numpy(dtype=np.float32), names


def check_columns(datasets: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless all data sets of ``(DataFrame, y)`` have the same columns in the same order."""
    name_by_columns = {}
    for name, dataset in datasets.items():
        if hasattr(dataset, "columns"):
            name_by_columns[dataset.columns] = name
    if len(name_by_columns) > 1:
        descriptions = [f"{name!r} has {columns}" for columns, name in name_by_columns.items()]
        raise ConfigurationError(
            f"(X, y): the DataFrames have different columns: {listed(descriptions)}. Give all of them the same columns "
            "in the same order."
        )


def _inputs(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        inputs = x.detach().cpu()
    else:
        inputs = _tensor_of(np.asarray(x))
    if inputs.dtype == torch.uint8 and inputs.ndim in (3, 4):
        pixels = _channels_last(inputs)
        if pixels is not None:
            rank_zero_info(
                f"flsv: uint8 inputs {list(inputs.shape)} are read as images and divided by 255. If they are not "
                "images, convert them to int64 or float32."
            )
            return image_tensor(pixels)
    if inputs.is_floating_point() or inputs.dtype == torch.bool:
        return inputs.float()
    if inputs.is_complex():
        return inputs
    return inputs.long()


def _tensor_of(array: np.ndarray) -> Tensor:
    # A tensor shares an array's memory, which has to be contiguous, writable and in native byte order.
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    if array.dtype.kind in "iu" and array.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(array)


def _channels_last(pixels: Tensor) -> Tensor | None:
    """Return 8-bit images as ``[N, H, W]`` or ``[N, H, W, C]``, or None if they are not images."""
    if pixels.ndim == 3:
        return pixels
    may_be_second = pixels.shape[1] in (1, 3)
    may_be_last = pixels.shape[3] in (1, 3)
    if may_be_second and may_be_last:
        raise ConfigurationError(
            f"(X, y): in uint8 images {list(pixels.shape)}, the channels may be the second or the last dimension. Give "
            "the images as float32 [N, C, H, W] in 0 .. 1."
        )
    if may_be_last:
        return pixels
    if may_be_second:
        return pixels.permute(0, 2, 3, 1)
    return None


def one_numbering(
    client_sets: Datasets,
    held_out: Mapping[str, Dataset[Any] | None],
    pos_label: Any = None,
    label: Any = None,
) -> Names:
    """Give each class the same number in all data sets. Return the names of the classes by their numbers.

    Numbers are changed only if flsv has numbered the classes of all data sets itself. ``label`` is the field of the
    samples that has the class, if the user has named it.
    """
    all_sets = dict(client_sets)
    for name, dataset in held_out.items():
        if dataset is not None:
            all_sets[name] = dataset
    names_by_set = {name: class_names_of(dataset, label) for name, dataset in all_sets.items()}
    if not all(map(is_numbered_by_flsv, all_sets.values())):
        _check_numbers_mean_the_same(client_sets, all_sets, names_by_set)
        first_client = next(iter(client_sets))
        return names_by_set[first_client]

    names_by_client = {client: names_by_set[client] for client in client_sets}
    orders = {}
    for client, dataset in client_sets.items():
        order = getattr(dataset, "declared_order", ())
        if order and pos_label is None:
            orders[client] = order
    class_names = in_declared_order(_classes_of_clients(names_by_client), orders, "The data")
    class_names = positive_last(class_names, pos_label)
    for name, dataset in all_sets.items():
        _check_classes_of_clients(name, names_by_set[name], class_names)
        _renumber(dataset, class_names)
    return class_names


def _classes_of_clients(names_by_client: Mapping[str, Names]) -> Names:
    """Return the names of all clients' classes. Raise ConfigurationError if two are spellings of one name."""
    clients_by_class: dict[str, list[str]] = {}
    for client, class_names in names_by_client.items():
        for class_name in class_names:
            clients_by_class.setdefault(class_name, []).append(client)
    check_spelling(clients_by_class, "The data", clients_by_class)
    return tuple(clients_by_class)


def _check_classes_of_clients(name: str, names_of_set: Names, class_names: Names) -> None:
    unknown_names = [label for label in names_of_set if label not in class_names]
    if unknown_names:
        raise ConfigurationError(
            f"The {name} data have classes that no client has: {listed(unknown_names, 8)}. Use the clients' names "
            "for them, or remove these samples."
        )


def _check_numbers_mean_the_same(
    client_sets: Datasets, all_sets: Datasets, names_by_set: Mapping[str, Names]
) -> None:
    """Raise ConfigurationError unless the user has numbered all classes, and all data sets have the same names."""
    names_of_clients = {names_by_set[client] for client in client_sets}
    # Validation and test data may have no names of classes.
    names_of_sets = set(filter(None, names_by_set.values()))
    have_same_names = len(names_of_clients) == 1 and len(names_of_sets) <= 1
    are_numbered_by_user = not any(map(is_numbered_by_flsv, all_sets.values()))
    if are_numbered_by_user and have_same_names:
        return

    descriptions = []
    for name, class_names in names_by_set.items():
        description = f"the names {listed(class_names, 8)}" if class_names else "no names"
        descriptions.append(f"{name!r} has {description}")
    raise ConfigurationError(
        f"The data sets number their classes in different ways: {listed(descriptions, 8)}. Use words as labels in all "
        "of them, or the same numbers and the same attribute `classes` (in Hugging Face data sets "
        "align_labels_with_mapping)."
    )


def is_numbered_by_flsv(dataset: Dataset[Any]) -> bool:
    """Return whether flsv itself numbered a data set's classes, by sorting their names."""
    return getattr(dataset, "by_name", False)


def concatenated(parts: Mapping[str, Dataset[Any]]) -> Dataset[Any]:
    """Concatenate the clients' data sets."""
    datasets = list(parts.values())
    if len(datasets) == 1:
        return datasets[0]

    columns_by_part = []
    name_by_format = {}  # a part with samples of these types and shapes
    for name, dataset in parts.items():
        tensors, rows = tensors_of(dataset)
        if tensors is None:
            return ConcatDataset(datasets)
        columns = tensors if rows is None else [tensor[rows] for tensor in tensors]
        columns_by_part.append(columns)
        formats = [f"{column.dtype} {list(column.shape[1:])}" for column in columns]
        name_by_format[", ".join(formats)] = name

    _check_same_format(name_by_format)
    return TensorDataset(*[torch.cat(column_parts) for column_parts in zip(*columns_by_part)])


def _check_same_format(name_by_format: Mapping[str, str]) -> None:
    if len(name_by_format) <= 1:
        return
    differences = [f"those of {name!r} ({text})" for text, name in name_by_format.items()]
    raise ConfigurationError(
        f"The samples differ: {' and '.join(differences)}. All train one model, so all samples need the same shape "
        "and type."
    )


def _renumber(dataset: Any, class_names: Names) -> None:
    """Renumber the classes of a data set that flsv has made of arrays or of a folder of images."""
    numbers_by_name = {name: number for number, name in enumerate(class_names)}
    new_numbers = [numbers_by_name[name] for name in dataset.classes]
    dataset.classes = class_names
    if isinstance(dataset, TensorDataset):
        inputs, labels = dataset.tensors
        dataset.tensors = (inputs, torch.tensor(new_numbers)[labels])
        return
    dataset.class_to_idx = numbers_by_name
    dataset.samples = [(path, new_numbers[number]) for path, number in dataset.samples]
    dataset.imgs = dataset.samples
    dataset.targets = [number for _, number in dataset.samples]
