"""FedEM's client: a mixture of networks with the client's own mixture weights.

Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021, Algorithm 1. Keeping the
mixture weights at their client is :class:`flsv.personalization.FedEM`'s part: ``configs/fedem.yaml``.

The paper works out the responsibilities q of all samples once per round, and then trains on them for several epochs.
Here every batch has its own, from the models as they are (incremental EM, Neal and Hinton 1998): the gradient of the
mixture's own loss, -log sum_k pi_k p_k(y|x), is that of the weighted loss sum_k q_k l_k with these q, so training is
ordinary. The weights pi follow from the responsibilities of the visit so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from flsv.models.classifier import ClassifierClient, NotBuilt
from flsv.utilities.declared import Count, check_arguments
from flsv.utilities.errors import ConfigurationError


class Mixture(nn.Module):
    """Mixture of networks, whose logits ``[B, M]`` are the log-probabilities of sum_k pi_k softmax(component_k(x)).

    Its floating-point buffer ``responsibility [K]`` counts the samples that each component has been responsible for; pi
    are the components' shares of them.

    Args:
        components: K networks that return logits ``[B, M]``.
    """

    responsibility: Tensor

    def __init__(self, components: Sequence[nn.Module]) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        # On the components' device, whatever device context this is built in.
        device = next((parameter.device for parameter in self.components.parameters()), None)
        self.register_buffer("responsibility", torch.full((len(components),), 1 / len(components), device=device))

    @property
    def weights(self) -> Tensor:
        """Mixture weights pi ``[K]``, which sum to 1."""
        return self.responsibility / self.responsibility.sum()

    def joint(self, x: Tensor) -> Tensor:
        """Compute the joint log-probabilities log pi_k + log p_k(y|x), ``[K, B, M]``."""
        logits = torch.stack([component(x) for component in self.components])
        return logits.float().log_softmax(-1) + self.weights.log()[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(x).logsumexp(0)


class MixtureClient(ClassifierClient):
    """:class:`flsv.ClassifierClient` with a mixture of K networks of one kind, each initialized by itself.

    Args:
        num_components: K, at least 1.
        kwargs: as for :class:`flsv.ClassifierClient`. If ``network`` is an object, the other components are copies of
            it with new parameters.

    Raises:
        ConfigurationError: as ``ClassifierClient``; fewer than 1 component; a network object without a layer that can
            be initialized anew (``reset_parameters``).

    Example:
        >>> client = MixtureClient(num_components=2, network="mlp", num_classes=3, input_shape=(4,))
        >>> torch.allclose(client(torch.rand(5, 4)).exp().sum(1), torch.ones(5))
        True
    """

    def __init__(self, num_components: Count = 3, **kwargs: Any) -> None:
        (self.num_components,) = check_arguments("MixtureClient", MixtureClient.__init__, locals()).values()
        super().__init__(**kwargs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the mixture, a scalar, and count the batch's responsibilities."""
        x, y = batch
        assert isinstance(self.network, Mixture)
        joint = self.network.joint(x)
        with torch.no_grad():
            q = joint[:, torch.arange(len(y), device=y.device), y].softmax(0)
            self.network.responsibility += q.sum(1)
        return self._loss(joint.logsumexp(0), y)

    def _make_network(self, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        make = super()._make_network
        return Mixture([make(num_classes, input_shape) for _ in range(self.num_components)])

    def _build(self, num_classes: int, input_shape: tuple[int, ...] | None) -> None:
        if not isinstance(self.network, NotBuilt | Mixture):
            others = [_another(self.network) for _ in range(1, self.num_components)]
            self.network = Mixture([self.network, *others])
        super()._build(num_classes, input_shape)


def _another(network: nn.Module) -> nn.Module:
    """Copy a network and give it new initial parameters."""
    other = deepcopy(network)
    layers = [layer for layer in other.modules() if callable(getattr(layer, "reset_parameters", None))]
    if not layers:
        raise ConfigurationError(
            f"MixtureClient: {type(network).__name__} has no layer with reset_parameters(), so its copies would stay "
            "the same. Name a network instead."
        )
    for layer in layers:
        layer.reset_parameters()  # type: ignore[operator]  # callable, as checked above
    return other
