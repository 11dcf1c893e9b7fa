"""pFedHN: a hypernetwork on the server generates each client's model.

Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1: client i trains
theta_i = h(v_i; phi) to theta~_i, and the server follows the vector-Jacobian product of delta_i = theta_i - theta~_i
through h to its weights phi and to the client's embedding v_i.

Where the paper is silent, or we depart:

- The paper takes one client per round. Here a cohort trains from h's models at the round's start; the server then makes
  one step per client, in the order of the cohort, each through h after the previous step.
- At first, h generates the global model for every client: its last layer starts with zero weights and the global model
  as bias. A random one, as in the authors' code, generates initial models of the wrong scale for most networks.
- One last layer generates all parameters, equivalent to the authors' one layer per parameter tensor. BatchNorm's
  statistics are the global ones.
- The features before the last layer are normalized (LayerNorm), and the embeddings are wider than the authors'
  1 + n / 4: their network takes thousands of small steps to distinguish the clients and diverges with larger steps,
  while this one takes tens of rounds, with plain steps without momentum, weight decay and gradient clipping.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flsv.core import FederationState, Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.personalization.base import Personalizer, Starts
from flsv.utilities.declared import Count, Positive
from flsv.utilities.seeding import generator_for


class HyperNetwork(nn.Module):
    """Network from a client's number to its model: an embedding, an MLP, and a layer that generates all parameters.

    Args:
        num_clients: n.
        num_parameters: number of parameters of a client's model.
        embedding_dim: dimension of the clients' embeddings.
        hidden: width of the MLP.
    """

    def __init__(self, num_clients: int, num_parameters: int, embedding_dim: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_clients, embedding_dim)
        self.features = nn.Sequential(
            nn.Linear(embedding_dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden, elementwise_affine=False),
        )
        self.writer = nn.Linear(hidden, num_parameters)

    @torch.no_grad()
    def initialize(self, model: Tensor, draw: torch.Generator) -> None:
        """Initialize the weights at random, such that it generates ``model [P]`` for every client."""
        self.embedding.weight.normal_(generator=draw)
        for layer in self.features:
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=draw)
                layer.bias.uniform_(-bound, bound, generator=draw)
        self.writer.weight.zero_()
        self.writer.bias.copy_(model)

    def forward(self, client: Tensor) -> Tensor:
        return self.writer(self.features(self.embedding(client)))


class PFedHN(Personalizer):
    """Personalizer with start points from a hypernetwork, which learns from the clients' updates.

    The hypernetwork has ``hidden`` times as many weights as the clients' model.

    Args:
        lr: the server's learning rate; lr (1 + hidden) is the share of the way to a client's trained model that the
            step for this client moves its generated model.
        embedding_dim: dimension of the clients' embeddings.
        hidden: width of the hypernetwork.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> PFedHN()
        PFedHN()
    """

    def __init__(self, lr: Positive = 0.005, embedding_dim: Count = 32, hidden: Count = 100) -> None:
        self.lr = lr
        self.embedding_dim = embedding_dim
        self.hidden = hidden
        self._network: HyperNetwork | None = None
        self._loaded: dict[str, Tensor] = {}

    def begin(self, federation: FederationInfo) -> None:
        model = federation.global_vector[: federation.space.num_parameters].cpu()
        network = self._make(federation)
        network.initialize(model, generator_for(federation.seed, "pfedhn"))
        self._network = network.to(federation.global_vector.device)

    def resume(self, federation: FederationInfo) -> None:
        network = self._network  # set in a second fit of one loop, which may be on another device
        if network is None:
            network = self._make(federation)
            network.load_state_dict(self._loaded)
        self._network = network.to(federation.global_vector.device)

    def _make(self, federation: FederationInfo) -> HyperNetwork:
        clients, parameters = federation.num_clients, federation.space.num_parameters
        network = HyperNetwork(clients, parameters, self.embedding_dim, self.hidden)
        return network.to(federation.space.dtype)

    @torch.no_grad()
    def start(self, client: int, state: FederationState) -> Tensor:
        assert self._network is not None
        global_vector = state.model()
        written = self._network(torch.tensor(client, device=global_vector.device))
        return torch.cat([written, global_vector[len(written) :]])

    @torch.inference_mode(False)
    @torch.enable_grad()
    def personalize(self, round: Round, contributions: Contributions, models: Starts) -> Starts:
        assert self._network is not None
        cut = round.space.num_parameters
        network, writer = self._network, self._network.writer
        small: list[Tensor] = [*network.embedding.parameters(), *network.features.parameters()]
        for row, client in enumerate(round.client_ids):
            delta = -round.matrix.update(row)[:cut]
            features = network.features(network.embedding(client))
            gradients = torch.autograd.grad(features, small, grad_outputs=delta @ writer.weight.detach())
            with torch.no_grad():
                # The last layer's gradient is this outer product, as large as the layer; it is never stored.
                writer.weight.addr_(delta, features, alpha=-self.lr)
                writer.bias.add_(delta, alpha=-self.lr)
                torch._foreach_add_(small, gradients, alpha=-self.lr)
        return {}

    def state_dict(self) -> dict[str, Any]:
        if self._network is None:  # loaded, and not yet resumed
            return {"network": self._loaded}
        return {"network": {name: value.clone() for name, value in self._network.state_dict().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._network, self._loaded = None, state["network"]
