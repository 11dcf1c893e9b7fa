"""pFedHN: a hypernetwork on the server generates each client's model.

Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1: client i trains
theta_i = h(v_i; phi) to theta~_i, and the server follows the vector-Jacobian product of delta_i = theta_i - theta~_i
through h to its weights phi and to the client's embedding v_i.

Where the paper is silent, or we depart:

- The paper takes one client per round. A cohort trains from what h wrote at the round's start; the server then makes
  one step per client, in the order of the cohort, each through h as the step before left it.
- h writes the global model for every client at first: its last layer starts with zero weights and the global model as
  bias. A random one, as in the authors' code, writes initial models of the wrong scale for most networks.
- One last layer writes all parameters, which is the authors' one layer per parameter tensor. BatchNorm's statistics are
  the global ones.
- The features before the last layer are normalized (LayerNorm), and the embeddings are wider than the authors'
  1 + n / 4: their network takes thousands of small steps to tell the clients apart and blows up with larger ones, this
  one takes tens of rounds. Plain steps then do, without momentum, weight decay and gradient clipping.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flsv.core import FederationState, Round
from flsv.core.strategy import Contributions, Federation
from flsv.personalization.base import Personalizer, Starts
from flsv.utilities.declared import Count, Positive
from flsv.utilities.seeding import generator_for


class HyperNetwork(nn.Module):
    """From a client's number to its model: an embedding, an MLP, and a layer that writes all parameters.

    Args:
        num_clients: n.
        num_parameters: what it writes per client.
        embedding_dim: of the clients' embeddings.
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
        """Random, but so that it writes ``model`` for everybody."""
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
    """Each client starts from the model that the hypernetwork generates for it; the hypernetwork learns from the
    client's update.

    The hypernetwork has ``hidden`` times as many weights as the clients' model.

    Args:
        lr: the server's learning rate; lr (1 + hidden) is the share of the way that a client's own step takes its model
            to what it has trained.
        embedding_dim: of the clients' embeddings.
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

    def begin(self, federation: Federation) -> None:
        model = federation.global_vector[: federation.space.num_parameters].cpu()
        network = self._make(federation)
        network.initialize(model, generator_for(federation.seed, "pfedhn"))
        self._network = network.to(federation.global_vector.device)

    def resume(self, federation: Federation) -> None:
        network = self._network  # a second fit of one loop goes on, if on another device
        if network is None:
            network = self._make(federation)
            network.load_state_dict(self._loaded)
        self._network = network.to(federation.global_vector.device)

    def _make(self, federation: Federation) -> HyperNetwork:
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
                # The last layer's gradient is this outer product. It would be as large as all that h has to learn.
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
