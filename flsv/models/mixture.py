"""MixtureClient: a mixture of networks with each client's own mixture weights, for FedEM.

Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021, Algorithm 1. The
personalizer :class:`flsv.personalization.FedEM` keeps the mixture weights at their client: ``configs/fedem.yaml``.

The responsibility q_k of component k for a sample is the probability that the sample comes from this component. The
paper computes the responsibilities of all samples once per round, and then trains with them for several epochs. Here
they are computed for every batch from the current models (incremental EM, Neal and Hinton 1998). The gradient of the
mixture's loss, -log sum_k pi_k p_k(y|x), then equals that of the weighted loss sum_k q_k l_k, where l_k is the loss of
component k, so training is ordinary. The mixture weights pi follow from the responsibilities of all batches of the
client's round so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from flsv.models.classifier import ClassifierClient, NotBuilt
from flsv.utilities.classifier_head import find_head
from flsv.utilities.declared import Count, check_arguments
from flsv.utilities.errors import ConfigurationError


class Mixture(nn.Module):
    """Mixture of networks with weights pi_k.

    The logits ``[B, M]`` are the logarithm of sum_k pi_k softmax(component_k(x)).
    """

    responsibility: Tensor

    def __init__(self, components: Sequence[nn.Module]) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        # The buffer is on the device of the components, even inside a context of another device.
        parameters = list(self.components.parameters())
        device = parameters[0].device if parameters else None
        count = len(components)
        responsibility = torch.full((count,), 1 / count, device=device)
        self.register_buffer("responsibility", responsibility)

    @property
    def weights(self) -> Tensor:
        """Mixture weights pi ``[K]``, which sum to 1."""
        return self.responsibility / self.responsibility.sum()

    def joint(self, x: Tensor) -> Tensor:
        """Compute log pi_k + log p_k(y|x) of component k and class y, ``[K, B, M]``."""
        logits = torch.stack([component(x) for component in self.components])
        log_probabilities = logits.float().log_softmax(-1)
        log_weights = self.weights.log()
        return log_probabilities + log_weights[:, None, None]

    def get_classifier(self) -> nn.Module | None:
        """Return the head of the last component, by the name of timm's networks. All components have equal heads."""
        last_component = self.components[-1]
        name, _ = find_head(last_component)
        if name is None:
            return None
        return last_component.get_submodule(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(x).logsumexp(0)


class MixtureClient(ClassifierClient):
    """Classifier with a mixture of networks of one kind, each with its own random initial weights.

    It is a :class:`flsv.ClassifierClient`.

    Args:
        num_components: number of networks, at least 1.
        kwargs: arguments of :class:`flsv.ClassifierClient`. If ``network`` is an object, the other components are
            copies of it with new initial weights.

    Raises:
        ConfigurationError: ``num_components`` is below 1, ``network`` is an object without a layer that can be
            initialized again (``reset_parameters``), or an argument of ``ClassifierClient`` is wrong.

    Example:
        >>> client = MixtureClient(num_components=2, network="mlp", num_classes=3, input_shape=(4,))
        >>> torch.allclose(client(torch.rand(5, 4)).exp().sum(1), torch.ones(5))
        True
    """

    def __init__(self, num_components: Count = 3, **kwargs: Any) -> None:
        arguments = check_arguments("MixtureClient", MixtureClient.__init__, locals())
        self.num_components = arguments["num_components"]
        super().__init__(**kwargs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the mixture, and add up the batch's responsibilities."""
        x, y = batch
        assert isinstance(self.network, Mixture)
        joint = self.network.joint(x)
        with torch.no_grad():
            rows = torch.arange(len(y), device=y.device)
            joint_of_labels = joint[:, rows, y]  # [K, B]
            responsibilities = joint_of_labels.softmax(0)
            self.network.responsibility += responsibilities.sum(1)
        return self._loss(joint.logsumexp(0), y)

    def _make_network(self, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        components = []
        for _ in range(self.num_components):
            component = super()._make_network(num_classes, input_shape)
            components.append(component)
        return Mixture(components)

    def _build(self, num_classes: int, input_shape: tuple[int, ...] | None) -> None:
        is_single_network = not isinstance(self.network, NotBuilt | Mixture)
        if is_single_network:
            components = [self.network]
            while len(components) < self.num_components:
                components.append(_copy_with_new_weights(self.network))
            self.network = Mixture(components)
        super()._build(num_classes, input_shape)


def _copy_with_new_weights(network: nn.Module) -> nn.Module:
    new_network = deepcopy(network)
    resets = []
    for layer in new_network.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            resets.append(reset)
    if not resets:
        raise ConfigurationError(
            f"MixtureClient: {type(network).__name__} has no layer with reset_parameters(), so all components would "
            "have the same weights. Give the network by name."
        )
    for reset in resets:
        reset()
    return new_network
