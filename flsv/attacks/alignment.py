"""Alignment: updates turned towards the server's last step.

Sending that step again is the "delta weights" attack of free-riders (Lin, Du, Liu, arXiv:1911.12560, section 4.3).
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.attacks.base import Attack
from flsv.uploads.base import UploadContext


class Alignment(Attack):
    """Attack that turns the update towards the server's last step and keeps its length.

    The update d becomes a vector of length |d| in the direction of (1 - mix) d / |d| + mix g / |g|, where g is the
    model from which the client starts minus the one from which it started in its last round. In its first round, or if
    g is zero, the client sends d. This model is stored between rounds: P numbers per client.

    Args:
        mix: weight of the server's step, in (0, 1]. With 1 the direction is that of the server's step only.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: their share, instead of ``clients``.
        seed: seed of their choice.

    Raises:
        ConfigurationError: ``mix`` is out of range.

    Example:
        >>> known = {"attack.0.start": torch.tensor([0.0, 0.0])}
        >>> now = UploadContext(0, 2, num_parameters=2, round_index=1, state=known, start=torch.tensor([0.0, 5.0]))
        >>> Alignment(mix=1.0).apply(torch.tensor([2.0, 0.0]), now)
        tensor([0., 2.])
    """

    def __init__(
        self,
        mix: Annotated[float, Gt(0), Le(1)] = 0.5,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.mix = mix

    def attack(
        self,
        update: Tensor,
        context: UploadContext,
        generator: torch.Generator,
    ) -> Tensor:
        if context.start is None:
            return update
        # The client remembers the model that it got, to know the server's last step the next time.
        name = f"attack.{context.position}.start"
        model = context.start[: context.num_parameters].detach().clone()
        previous_model = context.state.get(name)
        context.state[name] = model
        if previous_model is None:
            return update

        step = model - previous_model.to(model)
        length = update.norm()
        step_length = step.norm()
        if length == 0 or step_length == 0:
            return update
        honest_part = (1 - self.mix) * update / length
        direction = honest_part + self.mix * step / step_length
        norm = direction.norm()
        if norm == 0:
            return update
        return direction * (length / norm)
