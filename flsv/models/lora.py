"""LoRA adapters: a frozen network with small trained matrices, which the clients send.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022: the weight W of a layer is frozen, and
(alpha / r) B A is added to it, where r is the rank, A ``[r, in]`` starts at random and B ``[out, r]`` starts at zero.
The layers are those of ``peft``.

Averaging the matrices of the clients i with weights w_i separately gives (sum_i w_i B_i) (sum_i w_i A_i), which differs
from the average of the clients' changes, sum_i w_i B_i A_i. If all clients have the same A, which is never trained, the
two are equal for all weights: FFA-LoRA (Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR
2024). This is the default here, so that averages, coalitions and contributions are exact, and half as much is sent.
FedEx-LoRA (Singhal et al., ACL 2025), which adds the difference to W and has to send W, is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flsv.models.classifier import ClassifierClient
from flsv.utilities.classifier_head import find_head
from flsv.utilities.declared import Count, Positive, check_arguments
from flsv.utilities.errors import ConfigurationError


def freeze_a(module: nn.Module) -> int:
    """Freeze the matrix A of each LoRA layer of a module. Return the number of these matrices."""
    matrices = []
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        if "lora_A" in parts or "lora_embedding_A" in parts:
            matrices.append(parameter)
    if not matrices:
        raise ConfigurationError(
            f"{type(module).__name__} has no LoRA layer, since none of its parameters is named lora_A."
        )
    for matrix in matrices:
        matrix.requires_grad_(False)
    return len(matrices)


def add_lora(
    network: nn.Module, rank: int, alpha: float, targets: Sequence[str] | str, **kwargs: Any
) -> nn.Module:
    """Insert LoRA layers into a network, in place, and freeze all other parameters.

    ``kwargs`` are further arguments of ``peft.LoraConfig``.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigurationError(
            "LoRA layers need the package peft, which is not installed. Install it: pip install peft."
        ) from error
    # peft accepts "all-linear" for transformers only, where it excludes the layer of the tokens' logits.
    if targets == "all-linear" and not hasattr(network, "get_output_embeddings"):
        targets = linear_layers(network, exclude=None)
    # For mypy: options are of any type.
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **kwargs)  # type: ignore[arg-type]
    return inject_adapter_in_model(config, network)


def has_lora(network: nn.Module) -> bool:
    """Return whether a network has LoRA layers."""
    layer_names = dict(network.named_modules())
    return any(name.endswith("lora_A") for name in layer_names)


def linear_layers(network: nn.Module, exclude: str | None) -> list[str]:
    """Return the names of the linear layers except ``exclude``."""
    return [
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and name != exclude
    ]


class LoRAClient(ClassifierClient):
    """Classifier with a frozen network, of which only LoRA layers and the head are trained.

    It is a :class:`flsv.ClassifierClient`. With ``FederatedLoop(share="trainable")`` only the LoRA layers and the head
    are sent. The frozen network must be the same at all clients before the first round, and is not counted as sent: it
    is pretrained (``network_args: {pretrained: true}``), or its weights follow from the seed.

    Args:
        rank: rank r of the matrices A and B.
        alpha: scale of the adapters: (alpha / r) B A is added to a layer's weight.
        targets: names of the layers to adapt, or ``"all-linear"``. The head is trained as a whole and has no adapter.
        exact: whether to freeze A (FFA-LoRA), so that averaged matrices give the exact average of the clients' changes.
            Otherwise A and B are both trained, and averaged separately.
        kwargs: arguments of :class:`flsv.ClassifierClient`.

    Raises:
        ConfigurationError: ``peft`` is not installed, the network has no layer to adapt, or an argument of
            ``ClassifierClient`` is wrong.
    """

    def __init__(
        self,
        rank: Count = 4,
        alpha: Positive = 8.0,
        targets: list[str] | str = "all-linear",
        exact: bool = True,
        **kwargs: Any,
    ) -> None:
        arguments = check_arguments("LoRAClient", LoRAClient.__init__, locals())
        self.rank = arguments["rank"]
        self.alpha = arguments["alpha"]
        self.exact = arguments["exact"]
        self.targets = targets
        super().__init__(**kwargs)

    def _build(self, num_classes: int, input_shape: tuple[int, ...] | None) -> None:
        super()._build(num_classes, input_shape)
        if has_lora(self.network):
            return  # the network has adapters already
        head, _ = find_head(self.network)
        targets = self._layers_to_adapt(head)
        with torch.device("cpu"):  # as ClassifierClient does
            self.network = add_lora(self.network, self.rank, alpha=self.alpha, targets=targets)
        if head is not None:
            self.network.get_submodule(head).requires_grad_(True)
        if self.exact:
            freeze_a(self.network)

    def _layers_to_adapt(self, head: str | None) -> list[str] | str:
        targets = self.targets
        if targets == "all-linear":
            targets = linear_layers(self.network, exclude=head)
        if not targets:
            raise ConfigurationError(
                f"LoRAClient: {type(self.network).__name__} has no linear layer except its head {head!r}. Name layers "
                "with targets=[...], or use a deeper network."
            )
        return targets
