"""Pictures that are answered with pictures, and graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from compat.kinds.base import Items, Kind, Sets, drawn
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class UNet(L.LightningModule):
    """Down, up and across; a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = self.down(x)
        return self.out(torch.cat([across, self.up(self.middle(across))], dim=1))

    def _loss(self, batch: Any) -> Tensor:
        x, mask = batch
        return nn.functional.cross_entropy(self(x), mask, ignore_index=255)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        return [optimizer], [schedule]


def scenes() -> Sets:
    x = torch.randn(56, 1, 8, 8, generator=drawn())
    masks = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
    masks[:, 0] = 255
    return Sets(TensorDataset(x[:44], masks[:44]), TensorDataset(x[44:], masks[44:]))


@dataclass
class Graph:
    """Nodes, edges, a target for the graph, and, of a batch, to which graph each node belongs."""

    x: Tensor
    edge_index: Tensor
    y: Tensor
    batch: Tensor | None = None
    num_graphs: int = 1

    def to(self, device: Any) -> Graph:
        moved = {name: getattr(self, name).to(device) for name in ("x", "edge_index", "y")}
        return replace(self, **moved, batch=None if self.batch is None else self.batch.to(device))


def collate(graphs: list[Graph]) -> Graph:
    """One graph of several, as PyTorch Geometric batches them."""
    offsets = torch.tensor([0, *(len(g.x) for g in graphs)]).cumsum(0)
    return Graph(
        torch.cat([g.x for g in graphs]),
        torch.cat([g.edge_index + int(offset) for g, offset in zip(graphs, offsets)], dim=1),
        torch.cat([g.y for g in graphs]),
        torch.cat([torch.full((len(g.x),), i) for i, g in enumerate(graphs)]),
        len(graphs),
    )


class GraphNet(L.LightningModule):
    """Two rounds of messages along the edges, then the mean over a graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, graph: Graph) -> Tensor:
        x = graph.x
        for layer in (self.first, self.second):
            sources, targets = graph.edge_index
            x = torch.relu(layer(x + torch.zeros_like(x).index_add(0, targets, x[sources])))
        sums = x.new_zeros(graph.num_graphs, x.shape[1]).index_add(0, graph.batch, x)
        counts = torch.bincount(graph.batch, minlength=graph.num_graphs)
        return self.head(sums / counts[:, None]).squeeze(-1)

    def _loss(self, graph: Graph) -> Tensor:
        return nn.functional.mse_loss(self(graph), graph.y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def molecules() -> Sets:
    generator, graphs = drawn(), []
    for i in range(56):
        nodes = 3 + i % 4
        x = torch.randn(nodes, 3, generator=generator)
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
        graphs.append(Graph(x, edges, x[:, 0].mean()[None]))
    return Sets(Items(graphs[:44]), Items(graphs[44:]), collate_fn=collate)


KINDS = {
    "segmentation": Kind(UNet, scenes),
    "graphs": Kind(GraphNet, molecules),
}
