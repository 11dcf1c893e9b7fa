"""Uploads in a row, and compression beyond tests/replay: what is kept, chance, what it costs, buffers."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from flsv.attacks import Scaling
from flsv.core import Traffic
from flsv.federation import FederatedLoop
from flsv.personalization import FedAMP, Standalone
from flsv.uploads import TopK, Upload, UploadContext, upload
from flsv.utilities.errors import ConfigurationError
from helpers.fits import client_tensors, fit
from helpers.models import Diverges, network, sgd

VECTOR, START, GLOBAL = torch.tensor([5.0, 7.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0])

WHO = UploadContext(client=1, num_clients=3, num_parameters=2, round_index=4, seed=9)


class Recorded(Upload):
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


def test_each_upload_in_a_chain_refers_to_its_own_reference() -> None:
    chain = [Recorded("start"), Recorded("global"), Recorded("start")]
    sent, _ = upload(chain, VECTOR, START, GLOBAL, WHO)
    # 5, 7 -> 1, 2 + half of 4, 5 = 3, 4.5 -> 0, 3 + half of 3, 1.5 = 1.5, 3.75 -> 1, 2 + half of 0.5, 1.75
    assert [each.given[0].tolist() for each in chain] == [[4, 5], [3, 1.5], [0.5, 1.75]]
    assert sent.tolist() == [1.25, 2.875]
    assert [each.positions for each in chain] == [[0], [1], [2]]


def test_update_that_no_upload_concerns_is_sent_unchanged_and_counted_whole() -> None:
    vector = torch.rand(1000)
    sent, traffic = upload([Scaling(3.0, clients=[0])], vector, torch.rand(1000), vector, WHO)
    assert sent is vector
    assert traffic == Traffic(1000, 4000.0)
    assert upload([], vector.double(), vector, vector, WHO)[1] == Traffic(1000, 8000.0)


def test_upload_context_has_the_client_and_round_and_traffic_is_counted(tmp_path: Path) -> None:
    seen: list[UploadContext] = []

    class Seen(Recorded):
        def apply(self, update: Tensor, context: UploadContext) -> Tensor:
            seen.append(context)
            context.state["visits"] = context.state.get("visits", torch.tensor(0)) + 1
            return super().apply(update, context)

    loop = FederatedLoop(uploads=[Seen(numbers=7)], seed=9)
    fit(loop, tmp_path, rounds=2)
    assert [(d.client, d.round_index, d.seed, d.num_clients) for d in seen[3:]] == [
        (c, 1, 9, 3) for c in range(3)
    ]
    assert all(d.start_sent and d.num_parameters == loop.space.num_parameters for d in seen)
    assert loop.channel.numbers([0], "up").item() == loop.space.size + 7
    assert [state["visits"].item() for state in client_tensors(loop).values()] == [2, 2, 2]


def test_global_model_is_also_sent_to_clients_with_own_starts_if_uploads_refer_to_it(
    tmp_path: Path,
) -> None:
    loop = FederatedLoop(personalizer=FedAMP(), uploads=[Recorded("global")], seed=0)
    seen: list[list[int]] = []
    look = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: seen.append(
            loop.channel.numbers(range(3), "down").tolist()
        )
    )
    fit(loop, tmp_path, rounds=2, callbacks=[look])
    size = loop.state.model().numel()
    assert seen == [[size] * 3, [2 * size] * 3]


# ---- Compression beyond tests/replay: what is kept, chance, what it costs, buffers


SEED = 4


# ---- error feedback


def context(client: int = 0, entries: int = 40, state: Any = None, **kwargs: Any) -> UploadContext:
    kwargs = {"round_index": 0, **kwargs}
    return UploadContext(client, 3, entries, state={} if state is None else state, **kwargs)


UPDATES = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))


def test_compressed_updates_plus_the_kept_error_sum_to_all_updates() -> None:
    state: dict[str, Tensor] = {}
    sent = torch.zeros(40)
    for r, update in enumerate(UPDATES):
        before = update.clone()
        given = TopK(0.1).apply(torch.cat([update, update]), context(state=state, round_index=r))
        assert torch.equal(update, before)
        assert torch.equal(given[40:], before)  # buffers
        sent += given[:40]
    torch.testing.assert_close(sent + state["upload.0.error"], UPDATES.sum(0), rtol=1e-5, atol=1e-5)


def test_two_compressions_keep_their_errors_apart() -> None:
    state: dict[str, Tensor] = {}
    once = TopK(0.5).apply(UPDATES[0], context(state=state))
    TopK(0.1).apply(once, context(state=state, position=1))
    assert set(state) == {"upload.0.error", "upload.1.error"}


def test_client_left_out_of_a_round_keeps_its_compression_error(tmp_path: Path) -> None:
    before = FederatedLoop(uploads=[TopK(0.05)], seed=SEED)
    fit(before, tmp_path, rounds=2)
    after = FederatedLoop(uploads=[TopK(0.05)], seed=SEED)
    with pytest.warns(UserWarning, match="client 1 returned a model with NaN"):
        module = fit(after, tmp_path, Diverges(network(), sgd, {(2, 1)}), rounds=3)
    mine, theirs = (client_tensors(loop) for loop in (after, before))
    assert torch.equal(mine[1]["upload.0.error"], theirs[1]["upload.0.error"])
    assert not torch.equal(mine[0]["upload.0.error"], theirs[0]["upload.0.error"])
    assert all(value.isfinite().all() for value in module.state_dict().values())


# ---- what crosses


def test_compressed_traffic_counts_indices_and_values() -> None:
    whole, sent = Traffic(110, 440.0), torch.zeros(110)
    who = context(entries=100)
    assert TopK(0.05).traffic(whole, sent, who) == Traffic(2 * 5 + 10, 5 * 8 + 40.0)
    assert TopK(0.05).traffic(whole, sent.double(), who) == Traffic(2 * 5 + 10, 5 * 12 + 80.0)


# ---- what cannot be done


def test_compression_with_clients_own_start_models_is_refused(tmp_path: Path) -> None:
    loop = FederatedLoop(personalizer=Standalone(), uploads=[TopK()], seed=SEED)
    with (
        pytest.warns(UserWarning, match="discarded"),
        pytest.raises(ConfigurationError, match="did not send"),
    ):
        fit(loop, tmp_path)
