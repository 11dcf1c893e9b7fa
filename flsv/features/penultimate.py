"""The input of the current global model's classifier head, as features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flsv.errors import ConfigurationError
from flsv.features.base import Features
from flsv.parameters import ParameterSpace

BATCH = 256


class Penultimate(Features):
    """The features that the current global model passes to its classifier head, ``[m, d]``.

    They change from round to round, so distances of one round are not those of another: shares are comparable.

    Args:
        head: name of the head as in ``module.named_modules()``; by default timm's ``get_classifier()`` or the last
            ``nn.Linear``.

    Raises:
        ConfigurationError: at the call, no linear layer, an unknown name, or a module outside whose forward pass the
            head is.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
        >>> Penultimate()(torch.zeros(2, 1, 8, 8), net).shape
        torch.Size([2, 5])
    """

    needs_model = True

    def __init__(self, head: str | None = None) -> None:
        self.head = head

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        if module is None:
            raise ConfigurationError("Penultimate() needs a model, and there is none before training: choose PCA().")
        return head_inputs(module, x, self.head)


@torch.no_grad()
def head_inputs(module: nn.Module, x: Tensor, head: str | None = None) -> Tensor:
    """The inputs ``[m, d]`` of a module's classifier head for samples ``[m, ...]``, in batches.

    Raises:
        ConfigurationError: as :class:`Penultimate`.
    """
    found = ParameterSpace(module, head).head
    if found is None:
        name = type(module).__name__
        raise ConfigurationError(
            f"{name} has no linear layer: name its last with Penultimate(head=...), or choose PCA()."
        )
    seen: list[Tensor] = []
    hook = module.get_submodule(found.name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        for batch in x.split(BATCH):
            module(batch)
    finally:
        hook.remove()
    features = torch.cat([part.flatten(1) for part in seen]) if seen else torch.empty(0, 0)
    if len(features) != len(x):
        raise ConfigurationError(
            f"the head {found.name!r} of {type(module).__name__} was given {len(features)} rows for {len(x)} samples: "
            "it is not called once in every forward pass. Name another layer with Penultimate(head=...)."
        )
    return features.float()
