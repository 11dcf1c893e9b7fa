"""LoRA with peft's layers: what is trained, and from where. Federations of it: examples/adapters.py."""

from typing import Any

import pytest
import torch
from torch import nn

from flsv.models.lora import LoRAClient, freeze_a
from flsv.utilities.errors import ConfigurationError

pytest.importorskip("peft", reason="peft is not installed: pip install peft")


def test_lora_without_matching_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="SoftmaxRegression has no linear layer beside its head"):
        LoRAClient(network="softmax", num_classes=3, input_shape=(4,))
    with pytest.raises(ValueError, match=r"Target modules .* not found"):
        LoRAClient(network="mlp", num_classes=3, input_shape=(4,), targets=["attention"])
    with pytest.raises(ConfigurationError, match="Linear has no LoRA layer"):
        freeze_a(nn.Linear(2, 2))


@pytest.mark.parametrize("exact", [True, False])
def test_lora_trains_adapters_and_head_and_starts_as_the_frozen_network(exact: bool) -> None:
    options: dict[str, Any] = {"network": "mlp", "network_args": {"hidden": [8, 8]}, "input_shape": (4,)}
    client = LoRAClient(rank=2, alpha=3.0, exact=exact, num_classes=3, **options)
    trained = {name.removeprefix("network.classifier.") for name, p in client.named_parameters() if p.requires_grad}
    kinds = ["B"] if exact else ["A", "B"]
    adapters = {f"{layer}.lora_{kind}.default.weight" for layer in (0, 2) for kind in kinds}
    assert trained == adapters | {"4.weight", "4.bias"}
    x, layer = torch.randn(5, 4), client.network.classifier[0]
    torch.testing.assert_close(layer(x), layer.base_layer(x))
    torch.nn.init.ones_(layer.lora_B["default"].weight)
    step = x @ layer.lora_A["default"].weight.T @ torch.ones(2, 8)
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3.0 / 2 * step)
