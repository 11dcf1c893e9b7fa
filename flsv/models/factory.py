"""build_network: builds flsv's and timm's networks by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from flsv.models.linear import (
    MLP,
    Classes,
    FastText,
    Shape,
    SoftmaxRegression,
    check_output,
    image_shape,
)
from flsv.utilities.declared import checked
from flsv.utilities.errors import ConfigurationError, nearest
from flsv.utilities.wings import brought, from_wing

#: Networks from papers, by the name that configuration files use.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "fast_text": FastText,
    "mlp": MLP,
    "softmax": SoftmaxRegression,
    **{name: from_wing("networks", name) for name in brought("networks")},
}


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(?P<name>\w+)'")


@checked
def build_network(name: str, num_classes: Classes, input_shape: Shape, **kwargs: Any) -> nn.Module:
    """Build a classifier by its name in :data:`NETWORKS` or timm.

    Args:
        name: name of the network, such as ``"lenet5"``, ``"resnet18.a1_in1k"`` or ``"timm:vit_tiny_patch16_224"``. A
            name without a prefix that is not in :data:`NETWORKS` is timm's.
        num_classes: number of classes M, at least 2. The network returns logits ``[B, M]``.
        input_shape: shape of one sample without the batch, (C, H, W) for images. timm networks accept any number of
            channels C (their ``in_chans``).
        kwargs: options of the network. ``pretrained=True`` downloads weights for a timm network, whose head is replaced
            if it has another number of classes.

    Raises:
        ConfigurationError: the name is unknown, the network has no such option, or it does not return ``num_classes``
            logits for samples of this shape.

    Example:
        >>> build_network("lenet5", 10, (1, 28, 28), channels=(10, 20), hidden=(50,)).classifier[-1]
        Linear(in_features=50, out_features=10, bias=True)
    """
    make = network_maker(name)
    if name in NETWORKS:
        options = {"input_shape": input_shape, **kwargs}
    else:
        channels, _, _ = image_shape(name, input_shape)
        options = {"in_chans": channels, **kwargs}  # timm's name
    try:
        network = make(num_classes=num_classes, **options)
    except TypeError as error:
        unknown = _UNKNOWN_OPTION.search(str(error))
        if unknown is None:  # another error than Python's for an unexpected argument
            raise
        option = unknown["name"]
        hint = nearest(option, inspect.signature(make).parameters)
        raise ConfigurationError(
            f"{name}({option}={options.get(option)!r}): the network has no such option.{hint} To drop all options of "
            "a configuration file, pass --model.network_args={}."
        ) from None
    if name not in NETWORKS:
        check_output(network, name, num_classes, input_shape)
    return network


def network_maker(name: str) -> Callable[..., nn.Module]:
    """Return the function that makes a network, and import its library. Raise ConfigurationError if it is unknown."""
    if name in NETWORKS:
        return NETWORKS[name]
    return _timm_maker(name)


#: Prefixes of networks that timm loads from a hub or a folder.
_PREFIXES_OF_FILES = ("hf-hub:", "hf_hub:", "local-dir:")


def _timm_maker(name: str) -> Callable[..., nn.Module]:
    import timm  # slow to import

    known_names = ", ".join(sorted(NETWORKS))
    name_in_library = name.removeprefix("timm:")
    is_in_library = timm.is_model(name_in_library)
    if not is_in_library and not name_in_library.startswith(_PREFIXES_OF_FILES):
        raise ConfigurationError(
            f"Unknown network {name!r}.{nearest(name, NETWORKS)} flsv has {known_names}, and all other names must be "
            "networks of timm. For a network of another library, set its class_path and init_args."
        )
    return partial(timm.create_model, name_in_library)
