"""Networks by name: those of papers in flsv, and those of timm and torchvision."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from flsv.models.cnn import LeNet5, McMahanCNN, ShapFedCNN, ShapleyFLCifarCNN, ShapleyFLFashionCNN, resnet34_small
from flsv.models.linear import MLP, Classes, FastText, Shape, SoftmaxRegression, check_output, image_shape
from flsv.utilities.declared import checked
from flsv.utilities.errors import ConfigurationError

#: Networks from papers, by the name that configuration files use.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "fast_text": FastText,
    "lenet5": LeNet5,
    "mcmahan_cnn": McMahanCNN,
    "mlp": MLP,
    "resnet34_small": resnet34_small,
    "shapfed_cnn": ShapFedCNN,
    "shapley_fl_cifar": ShapleyFLCifarCNN,
    "shapley_fl_fmnist": ShapleyFLFashionCNN,
    "softmax": SoftmaxRegression,
}


@checked
def build_network(name: str, num_classes: Classes, input_shape: Shape, **kwargs: Any) -> nn.Module:
    """Build a classifier by name.

    A name without a prefix is searched in :data:`NETWORKS`, then in timm, then in torchvision; ``timm:NAME`` is
    searched only in timm, ``torchvision:NAME`` only in torchvision.

    Args:
        name: name of the network, such as ``"lenet5"``, ``"resnet18.a1_in1k"``, ``"timm:vit_tiny_patch16_224"`` or
            ``"torchvision:resnet18"``.
        num_classes: number of classes M, at least 2; the network returns logits ``[B, M]``.
        input_shape: shape of one sample without the batch, (C, H, W) for images. timm networks accept any number of
            channels C (their ``in_chans``), torchvision's only 3.
        kwargs: options of the network. ``pretrained=True`` downloads weights for a timm or torchvision network; a
            torchvision network also takes ``weights="IMAGENET1K_V1"``. The head is replaced if the pretrained network
            has another number of classes.

    Raises:
        ConfigurationError: the name is unknown (the message lists the closest known names), or the network does not
            return ``num_classes`` logits for samples of this shape.

    Example:
        >>> build_network("lenet5", 10, (1, 28, 28), channels=(10, 20), hidden=(50,)).classifier[-1]
        Linear(in_features=50, out_features=10, bias=True)
        >>> build_network("lenet", 10, (1, 28, 28))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: Unknown network 'lenet'. Close matches: 'lenet5', ...
    """
    library, _, bare = name.rpartition(":") if name.startswith(("timm:", "torchvision:")) else ("", "", name)
    if not library and bare in NETWORKS:
        return NETWORKS[bare](num_classes=num_classes, input_shape=input_shape, **kwargs)
    if library != "torchvision" and _is_timm(bare):
        options = {"in_chans": image_shape(name, input_shape)[0], **kwargs}
        network = import_timm(name).create_model(bare, num_classes=num_classes, **options)
    elif library != "timm" and bare in _torchvision_names():
        network = _build_torchvision(name, bare, num_classes, kwargs)
    else:
        raise ConfigurationError(_unknown(name, bare, library))
    check_output(network, name, num_classes, input_shape)
    return network


def import_timm(name: str) -> ModuleType:
    """Import timm, which takes seconds, when it is needed."""
    try:
        import timm
    except ImportError as error:
        raise ConfigurationError(
            f"Network {name!r} is looked for in timm, which is not installed: pip install timm. Networks that "
            f"need no timm are {', '.join(NETWORKS)}, and torchvision's by their names with torchvision: before them."
        ) from error
    return timm


def _is_timm(name: str) -> bool:
    return name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) or import_timm(name).is_model(name)


def _torchvision_names() -> list[str]:
    import torchvision.models

    return torchvision.models.list_models(module=torchvision.models)


def _build_torchvision(name: str, bare: str, num_classes: int, kwargs: dict[str, Any]) -> nn.Module:
    import torchvision.models

    options = dict(kwargs)
    if options.pop("pretrained", False):
        options.setdefault("weights", "DEFAULT")
    if options.get("weights") is None:
        if bare in ("googlenet", "inception_v3"):
            # Auxiliary classifiers would make the training-mode output a tuple, and the default would warn.
            options = {"aux_logits": False, "init_weights": True, **options}
        return torchvision.models.get_model(bare, num_classes=num_classes, **options)
    network = torchvision.models.get_model(bare, **options)
    if bare == "inception_v3":
        network.aux_logits, network.AuxLogits = False, None
    return _with_new_head(network, name, num_classes)


def _with_new_head(network: nn.Module, name: str, num_classes: int) -> nn.Module:
    """Give a network a last linear layer of ``num_classes`` outputs, in place."""
    linears = [(path, module) for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ConfigurationError(f"{name} has no linear layer to replace by a head for {num_classes} classes.")
    path, head = linears[-1]
    if head.out_features != num_classes:
        parent, _, leaf = path.rpartition(".")
        setattr(network.get_submodule(parent), leaf, nn.Linear(head.in_features, num_classes))
    return network


def _unknown(name: str, bare: str, library: str) -> str:
    names = [*NETWORKS, *_torchvision_names(), *([] if library == "torchvision" else import_timm(name).list_models())]
    close = list(dict.fromkeys(difflib.get_close_matches(bare, names, n=5)))
    hint = f"Close matches: {', '.join(map(repr, close))}." if close else f"flsv's own are {', '.join(NETWORKS)}."
    return f"Unknown network {name!r}. {hint}"
