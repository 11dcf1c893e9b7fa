"""leave_self_out: a function that the server runs at a client, to score the aggregate without the client's model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flsv.core import Client, LocalData, NoAnswer, map_clients
from flsv.functional.fedce import without_own
from flsv.games.performance import ModelScore


def leave_self_out(
    local: LocalData, aggregate: Tensor, weight: float, performance: str | ModelScore = "accuracy"
) -> Tensor:
    """Score, at a client, the average of all others' models, or its initial model if they have no weight."""
    assert local.start is not None
    assert local.sent is not None
    others = without_own(aggregate, local.sent, weight)
    model = local.start if others is None else others
    return local.told("score", local.utility(model[None], performance)[0])


def scores_without_own(
    clients: Sequence[Client], aggregate: Tensor, weights: Tensor, performance: str | ModelScore
) -> tuple[Tensor, Tensor]:
    """Ask k clients for these scores. Return those ``[r]`` of who answered, and bool ``[k]``."""
    own = dict(zip([client.id for client in clients], weights.tolist()))
    question = partial(leave_self_out, performance=performance)

    def ask(client: Client) -> Tensor | None:
        try:
            answer = client.ask(question, aggregate, own[client.id])
            if not isinstance(answer, Tensor) or answer.numel() != 1:
                raise NoAnswer(f"client {client.id} was asked for a number and answered {answer!r:.80}.")
        except NoAnswer as why:
            warnings.warn(f"{why} Its score of the others is missing in this round.", stacklevel=2)
            return None
        return answer.double().reshape(())

    replies = map_clients(clients, ask)
    answered = torch.tensor([answer is not None for answer in replies], dtype=torch.bool)
    nothing = torch.zeros((), dtype=torch.float64)
    scores = torch.stack([*(each.cpu() for each in replies if each is not None), nothing])[:-1]
    broken = [client.id for client, answer in zip(clients, replies) if answer is not None and not answer.isfinite()]
    if broken:
        raise ValueError(
            f"the others' model has a score that is not finite on the validation samples of clients {broken}: a value "
            "cannot be made of it. Measure by a bounded score (performance='accuracy'), or lower the learning rate."
        )
    return scores, answered
