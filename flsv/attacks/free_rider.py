"""FreeRider: clients that return the global model, or noise, without training.

Lin, Du, Liu, "Free-riders in Federated Learning: Attacks and Defenses", arXiv:1911.12560, 2019. ShapFed (IJCAI 2024,
section 4.3) names both kinds: clients that return the model unchanged, and clients that send random updates without
computing anything. ShapleyFL's failing hospitals (KDD 2023, section 6.1) send random gradients, too.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.uploads.base import UploadContext


class FreeRider(Attack):
    """Attack that sends back the received model, or adds noise to it.

    Args:
        mode: ``"zero"`` sends an update of zeros. ``"noise"`` sends an update in a uniformly random direction.
        scale: norm of the noise, above 0, in units of the norm of the update that training would have given. (A real
            free-rider would have to guess that norm from the steps of the global model.) Only for ``"noise"``.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of the choice of clients and of the noise.

    Raises:
        ConfigurationError: the mode is unknown, or the scale is not positive and finite.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> FreeRider().attack(torch.ones(4), None, generator)
        tensor([0., 0., 0., 0.])
        >>> round(float(FreeRider("noise", scale=0.5).attack(torch.ones(4), None, generator).norm()), 4)
        1.0
    """

    trains = False

    def __init__(
        self,
        mode: Literal["zero", "noise"] = "zero",
        scale: Annotated[float, Gt(0), "For an update of zeros set mode='zero'."] = 1.0,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.mode = mode
        self.scale = scale

    def attack(
        self,
        update: Tensor,
        context: UploadContext,
        generator: torch.Generator,
    ) -> Tensor:
        if self.mode == "zero":
            return torch.zeros_like(update)
        noise = torch.randn(len(update), generator=generator).to(update)
        factor = self.scale * update.norm() / noise.norm()
        return noise * factor
