"""From a name in a configuration file to a data set."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from flsv._lightning.old_package import old_class_named
from flsv.data.sets.base import ImageData
from flsv.data.sets.digits import digits
from flsv.data.sets.folder import folder
from flsv.data.sets.gaussians import gaussians
from flsv.data.sets.npz import npz
from flsv.data.sets.vision import KINDS, vision
from flsv.errors import ConfigurationError

#: The data sets known by name.
DATA_SETS = ("digits", *KINDS, "gaussians")


def load_image_data(name: str, root: str = "data", download: bool = False, image_size: int = 224) -> ImageData:
    """Load a data set by name or by path.

    Args:
        name: ``digits``, ``gaussians``, ``mnist``, ``fashion_mnist``, ``cifar10``, ``cifar100`` (in any case, with or
            without separators), a MedMNIST-style ``.npz`` file, or a folder with ``train/<class>`` and
            ``test/<class>`` images or with ``<class>`` images alone. Files and folders are looked up below ``root``,
            then as they are.
        root: folder of the data.
        download: fetch torchvision's sets if they are missing.
        image_size: side in pixels of the images of a folder.

    Raises:
        ConfigurationError: a name nobody knows, or data that are not there.

    Example:
        >>> data = load_image_data("digits")
        >>> data.num_classes, len(data.train)
        (10, 1437)
    """
    known = {_plain(kind): kind for kind in DATA_SETS}
    kind = known.get(_plain(name))
    if kind == "digits":
        return digits()
    if kind == "gaussians":
        return gaussians()
    if kind is not None:
        return vision(kind, root, download)
    places = [Path(root) / name, Path(name)]
    for place in places:
        if place.is_file() and place.suffix.lower() == ".npz":
            return npz(place)
        if place.is_file():
            raise ConfigurationError(
                f"{place} is a file, but not one of data: expected a MedMNIST-style .npz file, a CSV file, or a folder "
                f"of images or with data by client. (A configuration of a data module goes behind --config.)"
            )
        if place.is_dir():
            return folder(place, image_size)
    looked = " and ".join(str(place) for place in dict.fromkeys(place.absolute() for place in places))
    if name.endswith(".npz") or "/" in name:
        raise ConfigurationError(f"{name} was not found: looked at {looked}. Give root the folder that holds it.")
    if (other := old_class_named(name)) is not None:
        raise ConfigurationError(other)
    close = difflib.get_close_matches(_plain(name), known, n=1)
    hint = f" Did you mean {known[close[0]]!r}?" if close else ""
    raise ConfigurationError(
        f"No data set {name!r}.{hint} Known are {', '.join(DATA_SETS)}, any MedMNIST-style .npz file, any CSV file, "
        f"and any folder of images or with data by client (looked at {looked})."
    )


def is_known(name: str) -> bool:
    """Whether there is a data set of this name, which is no path then.

    Example:
        >>> is_known("FashionMNIST"), is_known("hospitals")
        (True, False)
    """
    return _plain(name) in {_plain(kind) for kind in DATA_SETS}


def is_downloadable(name: str) -> bool:
    """Whether ``download`` means anything for the data set of this name.

    Example:
        >>> is_downloadable("FashionMNIST"), is_downloadable("digits")
        (True, False)
    """
    return _plain(name) in {_plain(kind) for kind in KINDS}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
