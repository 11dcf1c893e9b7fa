"""Uploads in a row: their order, what each is applied to, and how large the result is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from toys import fit

from flsv.attacks import Scaling
from flsv.loop import FederatedLoop
from flsv.participants import Traffic
from flsv.personalization import FedAMP
from flsv.uploads import Upload, UploadContext, upload

VECTOR, START, GLOBAL = torch.tensor([5.0, 7.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0])

WHO = UploadContext(client=1, num_clients=3, num_parameters=2, round_index=4, seed=9)


class Recorded(Upload):
    """Remembers what it was given, and halves it."""

    def __init__(self, reference: Literal["start", "global"] = "start", numbers: int = 0) -> None:
        self.reference, self.numbers = reference, numbers
        self.given: list[Tensor] = []
        self.positions: list[int] = []

    def apply(self, update: Tensor, context: UploadContext) -> Tensor:
        self.given.append(update.clone())
        self.positions.append(context.position)
        return update / 2

    def traffic(self, before: Traffic, sent: Tensor, context: UploadContext) -> Traffic:
        assert torch.equal(sent, self.given[-1] / 2)
        return before + Traffic(self.numbers, 0.5)


def test_each_has_its_own_reference() -> None:
    chain = [Recorded("start"), Recorded("global"), Recorded("start")]
    sent, _ = upload(chain, VECTOR, START, GLOBAL, WHO)
    # 5, 7 -> 1, 2 + half of 4, 5 = 3, 4.5 -> 0, 3 + half of 3, 1.5 = 1.5, 3.75 -> 1, 2 + half of 0.5, 1.75
    assert [each.given[0].tolist() for each in chain] == [[4, 5], [3, 1.5], [0.5, 1.75]]
    assert sent.tolist() == [1.25, 2.875]
    assert [each.positions for each in chain] == [[0], [1], [2]]


def test_whom_nothing_concerns_is_sent_to_the_bit_and_whole() -> None:
    vector = torch.rand(1000)
    sent, traffic = upload([Scaling(3.0, clients=[0])], vector, torch.rand(1000), vector, WHO)
    assert sent is vector
    assert traffic == Traffic(1000, 4000.0)
    assert upload([], vector.double(), vector, vector, WHO)[1] == Traffic(1000, 8000.0)


def test_the_loop_says_who_sends_what_and_counts_it(tmp_path: Path) -> None:
    seen: list[UploadContext] = []

    class Seen(Recorded):
        def apply(self, update: Tensor, context: UploadContext) -> Tensor:
            seen.append(context)
            context.state["visits"] = context.state.get("visits", torch.tensor(0)) + 1
            return super().apply(update, context)

    loop = FederatedLoop(uploads=[Seen(numbers=7)], seed=9)
    fit(loop, tmp_path, rounds=2)
    assert [(d.client, d.round_index, d.seed, d.num_clients) for d in seen[3:]] == [(c, 1, 9, 3) for c in range(3)]
    assert all(d.start_sent and d.num_parameters == loop.space.num_parameters for d in seen)
    assert loop.channel.numbers([0], "up").item() == loop.space.size + 7
    assert [state["visits"].item() for state in loop.state_dict()["clients"].values()] == [2, 2, 2]


def test_a_client_with_a_start_of_its_own_is_sent_the_global_model_where_uploads_refer_to_it(tmp_path: Path) -> None:
    loop = FederatedLoop(personalizer=FedAMP(), uploads=[Recorded("global")], seed=0)
    seen: list[list[int]] = []
    look = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: seen.append(loop.channel.numbers(range(3), "down").tolist())
    )
    fit(loop, tmp_path, rounds=2, callbacks=[look])
    size = loop.state.model().numel()
    assert seen == [[size] * 3, [2 * size] * 3]
