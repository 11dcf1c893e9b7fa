"""Data sets by name (scikit-learn's digits, Gaussians, torchvision's) or by path (tables, ``.npz``, images)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from flsv.data.sources.places import TableRows, data_root, find_place, is_table_file, looked_at
from flsv.data.sources.source_data import (
    DATA_SETS,
    READABLE_KINDS,
    Files,
    Reading,
    SourceData,
    image_tensor,
    known_as,
    tensor_set,
)
from flsv.utilities.errors import ConfigurationError, listed, nearest
from flsv.utilities.plugins import import_error_text
from flsv.utilities.seeding import generator_for
from flsv.utilities.wings import from_wing

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder


def digits() -> SourceData:
    """Load scikit-learn's digits: 1,437 training and 360 test images ``[1, 8, 8]`` in 0 .. 1, split by class."""
    # scikit-learn is imported here, since its import takes longer than that of flsv.
    from sklearn.model_selection import train_test_split

    pixels, labels = load_pixels()
    train_pixels, test_pixels, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return SourceData(
        _digit_images(train_pixels, train_labels),
        test=_digit_images(test_pixels, test_labels),
        class_names=tuple(map(str, range(10))),
    )


def load_pixels() -> Any:
    """Read the digits' pixels ``[1797, 64]`` and labels from scikit-learn's text file."""
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)


def _digit_images(pixels: Any, labels: Any) -> TensorDataset:
    brightness = torch.tensor(pixels, dtype=torch.float32) / 16
    images = brightness.view(-1, 1, 8, 8)
    return tensor_set(images, labels)


#: Centres of the Gaussians' four classes. Classes 0 and 1 lie close to one axis, classes 2 and 3 close to the other.
CENTRES = ((2.0, 0.2), (-2.0, -0.2), (0.2, 2.0), (-0.2, -2.0))
STANDARD_DEVIATION = 0.8


def gaussians() -> SourceData:
    """Draw 4,000 training and 2,000 test points from four Gaussians, one per class.

    Inputs are x, y, x^2, y^2 and xy, float32 ``[5]``.
    """
    sets = []
    for size, split in ((4000, "train"), (2000, "test")):
        labels = torch.arange(size) % len(CENTRES)
        noise = torch.randn(size, 2, generator=generator_for(0, "gaussians", split))
        centres = torch.tensor(CENTRES)[labels]
        x, y = (centres + STANDARD_DEVIATION * noise).unbind(1)
        features = [x, y, x.square(), y.square(), x * y]
        inputs = torch.stack(features, dim=1)
        sets.append(tensor_set(inputs, labels))
    train, test = sets
    return SourceData(train, test=test, class_names=("0", "1", "2", "3"))


# The class in torchvision.datasets, its folder, and mean and standard deviation by channel of the training pixels in
# 0 .. 1.
TORCHVISION_FACTS = {
    "mnist": ("MNIST", "MNIST/raw", (0.1307,), (0.3081,)),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw", (0.2860,), (0.3530,)),
    "cifar10": (
        "CIFAR10",
        "cifar-10-batches-py",
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": (
        "CIFAR100",
        "cifar-100-python",
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
}


def vision(name: str, root: str | None, download: bool = False) -> SourceData:
    """Load a data set of torchvision, normalized by each channel's mean and deviation in training."""
    from torchvision import datasets

    class_name, folder_name, mean, std = TORCHVISION_FACTS[name]
    try:
        dataset_class = getattr(datasets, class_name)
        train = dataset_class(data_root(root), train=True, download=download)
        train_set = _normalized(train, mean, std)
        test = dataset_class(data_root(root), train=False, download=download)
        test_set = _normalized(test, mean, std)
    except Exception as error:
        # Damaged files raise any exception: AssertionError, KeyError, TypeError, EOFError.
        folder = data_root(root).absolute() / folder_name
        raise ConfigurationError(
            f"{name} was not found in {folder}, or cannot be read ({type(error).__name__}: {error}). Set the folder "
            f"that contains it by {SETTING_OF_ROOT}, or set --data.files.download true."
        ) from error
    return SourceData(train_set, test=test_set, class_names=tuple(train.classes))


def _normalized(dataset: Any, mean: Sequence[float], std: Sequence[float]) -> TensorDataset:
    images = image_tensor(dataset.data, mean, std)
    return tensor_set(images, torch.as_tensor(dataset.targets))


def read_path(
    source: str | Path, reading: Reading, client: str, is_whole: bool
) -> Dataset[Any] | TableRows | SourceData:
    """Read a table file or a folder of images by class.

    If ``is_whole``, the path may also be a data set's name.
    """
    files = reading.files
    name = str(source)
    path = None
    is_name = is_whole and known_as(source) is not None
    if not is_name:
        path = find_place(source, files.root)
    if path is not None and is_table_file(path):
        table: TableRows = from_wing("readers", "tables").read_table(path, reading, client)
        return table
    if is_whole:  # perhaps a name, or a folder with test data
        return _read_by_name(name, files)
    if path is not None and path.is_dir() and has_class_folders(path):
        return image_folder(path, files.image_size)
    raise ConfigurationError(
        f"{name!r} was not found, or cannot be read (looked at {looked_at(name, files.root)}). Expected "
        f"{READABLE_KINDS}."
    )


def _read_by_name(name: str, files: Files) -> SourceData:
    data = load_image_data(
        name, root=files.root, download=files.download, image_size=files.image_size
    )
    for part in (data.train, data.val, data.test):
        # The user's own validation and test data have to number the classes in the same way.
        if type(part) is TensorDataset:
            part.classes = data.class_names  # type: ignore[attr-defined]  # an attribute of ours
    return data


#: Options with which the user sets the folder of the data, for messages.
SETTING_OF_ROOT = "--data.files.root (in Python files=Files(root=...)) or $FLSV_DATA_ROOT"


def load_image_data(
    name: str, root: str | None = None, download: bool = False, image_size: int = 224
) -> SourceData:
    """Load a data set by name or by path.

    Args:
        name: one of :data:`DATA_SETS`, a MedMNIST-style ``.npz`` file, or a folder with ``train/<class>`` and
            ``test/<class>`` images or with ``<class>`` images alone. Paths are relative to ``root`` or, if they do
            not exist there, to the working folder.
        root: see :class:`flsv.data.Files`, as for the next two.
        download: see there.
        image_size: see there.

    Raises:
        ConfigurationError: the name is unknown, or data are missing.

    Example:
        >>> data = load_image_data("digits")
        >>> len(data.class_names), len(data.train)
        (10, 1437)
    """
    if name in TORCHVISION_FACTS:
        return vision(name, root, download)
    if name == "digits":
        return digits()
    if name == "gaussians":
        return gaussians()
    path = find_place(name, root)
    if path is not None and path.is_dir():
        return folder(path, image_size)
    if path is not None and path.suffix.lower() == ".npz":
        return npz(path)
    hint = import_error_text(name)
    names_here = [path_here.name for path_here in Path().glob("[!.]*")]
    question = nearest(name, [*DATA_SETS, *names_here])
    raise ConfigurationError(
        f"No data set {name!r} was found.{hint or question} Expected {', '.join(DATA_SETS)}, the path of an .npz or "
        f"CSV file, or of a folder of images or with data by client (looked at {looked_at(name, root)}). Set the "
        f"folder that contains it by {SETTING_OF_ROOT}."
    )


def npz(path: Path) -> SourceData:
    """Load an ``.npz`` file with arrays as of MedMNIST: ``train_images``, ``train_labels``, ``test_...``, ``val_...``.

    8-bit pixels are scaled to -1 .. 1, as usual for MedMNIST. The ``val_...`` arrays may be missing.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except Exception as error:
        # Damaged files raise errors of zlib, zipfile or NumPy, or a MemoryError.
        raise ConfigurationError(
            f"{path} cannot be read as an .npz archive of plain arrays: {error}."
        ) from error
    splits = ["train", "test"]
    if "val_images" in arrays or "val_labels" in arrays:
        splits.append("val")
    _check_arrays(path, splits, arrays)
    sets: dict[str, Any] = {split: _split_of(path, split, arrays) for split in splits}
    return SourceData(**sets)


def _check_arrays(path: Path, splits: list[str], arrays: dict[str, np.ndarray]) -> None:
    """Raise ConfigurationError if an array is missing, or the images of two splits differ in shape or type."""
    missing = []
    for split in splits:
        names = (f"{split}_images", f"{split}_labels")
        missing += [name for name in names if name not in arrays]
    if missing:
        raise ConfigurationError(
            f"{path} has no array {', '.join(missing)}. Its arrays are {', '.join(sorted(arrays))}."
        )

    kinds = set()
    for split in splits:
        images = arrays[f"{split}_images"]
        kinds.add(f"{images.dtype} {list(images.shape[1:])}")
    if len(kinds) > 1:  # only 8-bit pixels are scaled
        raise ConfigurationError(
            f"{path}: the images are {' and '.join(sorted(kinds))} each. Give all of them the same shape and type."
        )


def _split_of(path: Path, split: str, arrays: dict[str, np.ndarray]) -> TensorDataset:
    images = arrays[f"{split}_images"]
    labels = np.atleast_1d(arrays[f"{split}_labels"])
    has_label_per_image = labels.size == len(labels) == len(images)
    has_whole_numbers = labels.dtype.kind in "biu"
    if not (_are_images(images) and has_label_per_image and has_whole_numbers):
        raise ConfigurationError(
            f"{path}: {split}_images are {images.dtype} {list(images.shape)}, and {split}_labels are {labels.dtype} "
            f"{list(labels.shape)}. Expected uint8 or floating-point numbers, [N, H, W] or [N, H, W, 1 or 3], and one "
            "whole number for each image."
        )
    label_vector = labels.reshape(-1)
    if images.dtype == np.uint8:
        inputs = image_tensor(images, mean=[0.5], std=[0.5])
        return tensor_set(inputs, label_vector)
    if images.ndim == 3:
        images = images[..., None]
    pixels = torch.from_numpy(images.astype(np.float32))
    return tensor_set(pixels.permute(0, 3, 1, 2).contiguous(), label_vector)


def _are_images(array: np.ndarray) -> bool:
    has_channels = array.ndim == 4 and array.shape[3] in (1, 3)
    has_pixels = array.dtype.kind == "f" or array.dtype == np.uint8
    return (array.ndim == 3 or has_channels) and has_pixels


def folder(path: Path, image_size: int = 224) -> SourceData:
    """Open a folder of images by split and class, or by class. Images are decoded when they are read."""
    if not (path / "train").is_dir():
        all_images = image_folder(path, image_size)
        warn_of_empty_classes(path, all_images)
        return SourceData(all_images, class_names=tuple(all_images.classes))
    sets = {}
    for split in ("train", "test", "val"):
        if (path / split).is_dir():
            sets[split] = image_folder(path / split, image_size, allow_empty=False)
    classes = sets["train"].classes
    for split, images in sets.items():
        # ImageFolder numbers the classes of each split. If one were missing, all later ones would have other numbers.
        if images.classes != classes:
            raise ConfigurationError(
                f"{path}: {split} has the classes {images.classes}, but train has {classes}. Give both the same "
                "folders of classes."
            )
    return SourceData(**sets, class_names=tuple(classes))


def warn_of_empty_classes(path: Path, images: ImageFolder) -> None:
    """Warn if a folder of images has classes without images."""
    numbers_with_images = set(images.targets)
    empty_classes = [
        name for number, name in enumerate(images.classes) if number not in numbers_with_images
    ]
    if empty_classes:
        rank_zero_warn(
            f"{path} has folders without images: {listed(empty_classes, show=repr)}. Each of them is a class of "
            "the model, without samples. Remove folders that are not classes."
        )


def image_folder(path: Path, image_size: int = 224, allow_empty: bool = True) -> ImageFolder:
    """Open a folder's images ``<class>/*.png`` as a data set that resizes them.

    With ``allow_empty``, classes may have no images.
    """
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    transform = transforms.Compose(
        [transforms.Resize((image_size, image_size)), transforms.ToTensor()]
    )
    images = ImageFolder(str(path), transform=transform, loader=read_image, allow_empty=allow_empty)
    images.by_name = True  # flsv has numbered the classes' names in sorted order, as in array_set
    return images


def read_image(path: str) -> Image.Image:
    """Read an image in RGB."""
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would clip pixels at 255
                raise ValueError("it has more than 8 bits per pixel, and their scale is not known")
            return image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise any exception
        raise ConfigurationError(
            f"{path} cannot be read as an image: {error}. Convert, repair or remove it."
        ) from error


def unreadable_images(*datasets: Any) -> list[str]:
    """Return an error message for each image that cannot be read, of folders that :func:`image_folder` has opened."""
    paths = []
    pending = list(datasets)
    while pending:
        dataset = pending.pop()
        if getattr(dataset, "loader", None) is read_image:
            paths += [path for path, _ in dataset.samples]
        elif isinstance(dataset, ConcatDataset):
            pending += dataset.datasets

    with ThreadPoolExecutor() as threads:  # decoders release Python's lock
        errors = threads.map(_error_of_image, sorted(set(paths)))
        return [error for error in errors if error]


def _error_of_image(path: str) -> str:
    try:
        read_image(path)
    except ConfigurationError as error:
        return str(error)
    return ""


def has_class_folders(path: Path) -> bool:
    """Return whether a folder's subfolders are classes: each has images directly in it or is empty, and not all are
    empty.
    """
    have_images = False
    for folder in filter(Path.is_dir, _visible(path)):
        content = _visible(folder)
        if any(map(_is_image, content)):
            have_images = True
        elif content:
            return False
    return have_images


def folder_by_client(path: Path) -> dict[str, Path]:
    """Return ``{client: path}`` of a folder with one table or subfolder per client.

    ``val`` and ``test`` may be among the keys. It is empty for a folder of images by class or split.
    """
    folders = {folder.name: folder for folder in _visible(path) if folder.is_dir()}
    tables = {file.stem: file for file in _visible(path) if is_table_file(file)}
    if "train" in folders:
        return {}
    if not tables and has_class_folders(path):
        return {}
    has_both_or_none = bool(tables) == bool(folders)
    paths_in_folders = chain.from_iterable(map(_visible, folders.values()))
    have_images = any(map(_is_image, paths_in_folders))
    if has_both_or_none or have_images:
        raise ConfigurationError(
            f"{path} contains {listed([*tables, *folders]) or 'nothing'}, which cannot be read as a federation. "
            "Expected images as train/<class>/*.png, test/<class>/*.png and optionally val/<class>/*.png; images "
            "as <class>/*.png; images by client as <client>/<class>/*.png; or tables by client, as <client>.csv. "
            "Folders or tables val and test beside the clients' are the server's."
        )
    return tables or folders


def _is_image(path: Path) -> bool:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return path.suffix.lower() in IMG_EXTENSIONS and path.is_file()


def _visible(folder: Path) -> list[Path]:
    paths = []
    for path in folder.iterdir():
        is_hidden = path.name.startswith((".", "__MACOSX"))
        if not is_hidden:
            paths.append(path)
    return sorted(paths, key=lambda path: natural_key(path.name))


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return a sorting key by which clinic 2 comes before clinic 10."""
    key = []
    for position, part in enumerate(re.split(r"(\d+)", name)):
        is_number = position % 2 == 1  # the parts between words
        key.append(int(part) if is_number else part.casefold())
    return key, name
