"""IFCA: clients choose clusters, each of which has its own model.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1 with model averaging
(option II).

Departures, and choices that the paper leaves open:

- The first cluster starts from the global model. Every other cluster starts from the global model plus noise, which has
  in each layer the standard deviation of the layer's weights. So initial models are random as in the paper's
  experiments, and near a pretrained network if there is one. The paper's theory requires initial models near the
  optimum, and its experiments restart several times.
- The model of a cluster that no client chose stays unchanged. BatchNorm's statistics belong to the cluster's model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.core import ClientUpdate, FederationState, Instruction, LocalData, Numbers, Round
from flsv.core.strategy import Contributions, FederationInfo
from flsv.personalization.base import Personalizer, Starts
from flsv.utilities.declared import Count
from flsv.utilities.seeding import generator_for


class IFCA(Personalizer):
    """Personalizer in which each client starts from its best cluster model. That is the one with the lowest loss on the
    client's training samples.

    The next model of a cluster is the mean of the models that the clients of the cluster trained. Every client
    downloads the models of all clusters. The global model, an aggregate over all clusters, is meaningless.

    Args:
        num_clusters: number of clusters, at least 1. With 1 the method is FedAvg with equal weights.

    Raises:
        ConfigurationError: ``num_clusters`` is below 1.

    Example:
        >>> IFCA(num_clusters=3)
        IFCA(num_clusters=3)
    """

    sends = ("clusters",)
    reports = ("cluster",)
    saved = ("_clusters",)

    evaluates = True

    def __init__(self, num_clusters: Count = 5) -> None:
        self.num_clusters = num_clusters
        self._clusters = torch.zeros(0)  # [K, P]

    def begin(self, federation: FederationInfo) -> None:
        generator = generator_for(federation.seed, "ifca")
        model = federation.global_vector
        # For each element of the vector, the standard deviation of the tensor that it belongs to: [P].
        deviations_of_tensors = []
        for tensor in federation.space.unflatten(model).values():
            deviation = tensor.std(correction=0)
            deviations_of_tensors.append(deviation.expand(tensor.numel()))
        deviations = torch.cat(deviations_of_tensors)
        deviations[federation.space.num_parameters :] = 0  # BatchNorm's statistics

        # The first cluster keeps the initial model. The others get noise with each tensor's standard deviation.
        self._clusters = model.repeat(self.num_clusters, 1)
        for cluster_model in self._clusters[1:]:
            noise = torch.randn(len(model), generator=generator, dtype=model.dtype)
            cluster_model += deviations * noise.to(model.device)

    def resume(self, federation: FederationInfo) -> None:
        self._clusters = self._clusters.to(federation.global_vector.device)

    def start(self, client: int, state: FederationState) -> None:
        """Return None, since the client chooses among the clusters' models."""

    def send(
        self,
        client: int,
        start: Tensor | None,
        state: FederationState,
    ) -> dict[str, Tensor]:
        return {"clusters": self._clusters}

    def receive(self, local: LocalData, instruction: Instruction) -> Tensor:
        clusters = instruction.tensors["clusters"]
        cluster = closest(local, clusters)
        local.memory[IFCA] = cluster
        return clusters[cluster]

    def report(self, local: LocalData) -> dict[str, Tensor | float]:
        return {"cluster": local.memory[IFCA]}

    def expected_reports(self) -> dict[str, Numbers]:
        index = Numbers(
            torch.float64,
            lowest=0,
            highest=self.num_clusters - 1,
            whole=True,
        )
        return {"cluster": index}

    def started(self, update: ClientUpdate) -> Tensor:
        cluster = int(update.reports["cluster"])
        return self._clusters[cluster]

    def personalize(
        self,
        round: Round,
        contributions: Contributions,
        models: Starts,
    ) -> Starts:
        clusters = round.reports["cluster"].long()
        self._clusters = self._clusters.clone()  # clients hold the former tensor
        for cluster in clusters.unique().tolist():
            is_member = clusters == cluster
            cluster_vectors = round.client_vectors[is_member]
            self._clusters[cluster] = cluster_vectors.mean(0)
        return {}


def closest(local: LocalData, clusters: Tensor) -> int:
    """Find the cluster whose model has the lowest loss on the client's training samples."""
    scores = local.evaluate(clusters, "train").value("negative_loss")
    return int(scores.nan_to_num(-torch.inf).argmax())
