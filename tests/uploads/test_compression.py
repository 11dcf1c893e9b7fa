"""Compression against plain loops written from the papers, and what it costs."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_client import cohort, train
from resuming import assert_resumes
from torch import Tensor, nn
from toys import Plain, fit, flat, network, toy_data

from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.participants import Traffic
from flsv.personalization import Standalone
from flsv.sampling import UniformSampler
from flsv.seeding import generator_for
from flsv.uploads import Compression, Quantized, TopK, UploadContext

SEED, ROUNDS = 4, 6


def largest(p: np.ndarray, share: float, **_: Any) -> np.ndarray:
    """The entries of the largest magnitude, by sorting."""
    sent = np.zeros_like(p)
    kept = np.argsort(-np.abs(p))[: math.ceil(share * len(p))]
    sent[kept] = p[kept]
    return sent


def rounded(p: np.ndarray, bits: int, bucket: int, u: np.ndarray | float) -> np.ndarray:
    """Bucket by bucket."""
    sent, levels = np.zeros_like(p), 2 ** (bits - 1) - 1
    for begin in range(0, len(p), bucket):
        part = p[begin : begin + bucket]
        noise = u if isinstance(u, float) else u.reshape(-1, bucket)[begin // bucket, : len(part)]
        scale = np.abs(part).max() / p.dtype.type(levels)
        sent[begin : begin + bucket] = np.clip(np.floor(part / scale + noise), -levels, levels) * scale
    return sent


def by_hand(net: nn.Module, compress: Any, feedback: bool = True) -> Tensor:
    """FedAvg over p = d + e, C(p), e = p - C(p), in vectors of NumPy."""
    data = toy_data()
    data.setup("fit")
    names = [name for name, _ in net.named_parameters()]
    cut, dtype = sum(p.numel() for p in net.parameters()), next(net.parameters()).dtype
    server, errors = copy.deepcopy(net), dict.fromkeys(range(3), 0)
    for r in range(ROUNDS):
        clients = cohort(SEED, r)
        x = flat(server.state_dict(), names).to(dtype).numpy()
        sent, states = [], []
        for client in clients:
            states.append(train(server, data, client, SEED, r).state_dict())
            d = flat(states[-1], names).to(dtype).numpy() - x
            p = d[:cut] + errors[client]
            c = compress(p, r, client)
            if feedback:
                errors[client] = p - c
            sent.append(x + np.concatenate([c, d[cut:]]))
        weights = data.num_samples[clients].double().numpy()
        average = torch.tensor((weights / weights.sum()) @ np.stack(sent).astype(np.float64))
        state = dict(states[0])
        for name in [*names, *(n for n, v in state.items() if n not in names and v.is_floating_point())]:
            state[name] = average[: state[name].numel()].view(state[name].shape)
            average = average[state[name].numel() :]
        server.load_state_dict(state)
    return flat(server.state_dict(), names)


def noise(bucket: int) -> Any:
    """The uniform numbers that a fit draws for its first upload."""

    def draw(p: np.ndarray, r: int, client: int) -> np.ndarray:
        shape, stream = (-(-len(p) // bucket), bucket), generator_for(SEED, "compression", 0, r, client)
        return torch.rand(shape, generator=stream, dtype=torch.from_numpy(p).dtype).numpy()

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("compression", "compress", "feedback"),
    [
        (TopK(0.1), lambda p, r, c: largest(p, 0.1), True),
        (TopK(0.1, error_feedback=False), lambda p, r, c: largest(p, 0.1), False),
        (Quantized(4, 16, stochastic=False), lambda p, r, c: rounded(p, 4, 16, 0.5), True),
        (Quantized(8, 16), lambda p, r, c: rounded(p, 8, 16, noise(16)(p, r, c)), True),
    ],
    ids=["topk", "topk-no-feedback", "nearest", "stochastic"],
)
def test_same_global_model_as_by_hand(
    tmp_path: Path, compression: Compression, compress: Any, feedback: bool, batch_norm: bool
) -> None:
    # Which entries are the largest hangs on their last bit, and BatchNorm blows that up: in float64 then.
    net, tolerance = (network().double(), 1e-10) if batch_norm else (network(batch_norm=False), 1e-6)
    expected = by_hand(net, compress, feedback)
    loop = FederatedLoop(uploads=[compression], sampler=UniformSampler(2), seed=SEED)
    precision = "64-true" if batch_norm else "32-true"
    module = fit(loop, tmp_path, Plain(copy.deepcopy(net)), rounds=ROUNDS, precision=precision)
    names = [name for name, _ in net.named_parameters()]
    torch.testing.assert_close(flat(module.net.state_dict(), names), expected, rtol=tolerance, atol=tolerance)
    assert bool(loop.state_dict()["clients"]) == feedback


@pytest.mark.slow
@pytest.mark.parametrize("compression", [TopK(0.05), Quantized(3)], ids=["topk", "quantized"])
def test_resumes_to_the_bit(tmp_path: Path, compression: Compression) -> None:
    loop = assert_resumes(lambda: FederatedLoop(uploads=[compression], sampler=UniformSampler(2), seed=SEED), tmp_path)
    errors = [state["upload.0.error"] for state in loop.state_dict()["clients"].values()]
    assert len(errors) == 3
    assert all(error.norm() > 0 for error in errors)


# ---- error feedback


def context(client: int = 0, entries: int = 40, state: Any = None, **kwargs: Any) -> UploadContext:
    kwargs = {"round_index": 0, **kwargs}
    return UploadContext(client, 3, entries, state={} if state is None else state, **kwargs)


UPDATES = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("compression", [TopK(0.1), Quantized(2)], ids=["topk", "quantized"])
def test_what_was_sent_and_what_is_kept_make_up_what_was_learnt(compression: Compression) -> None:
    state: dict[str, Tensor] = {}
    sent = torch.zeros(40)
    for r, update in enumerate(UPDATES):
        before = update.clone()
        sent += compression.apply(update, context(state=state, round_index=r))
        assert torch.equal(update, before)
    torch.testing.assert_close(sent + state["upload.0.error"], UPDATES.sum(0), rtol=1e-5, atol=1e-5)


def test_two_compressions_keep_their_errors_apart() -> None:
    state: dict[str, Tensor] = {}
    once = TopK(0.5).apply(UPDATES[0], context(state=state))
    Quantized(2).apply(once, context(state=state, position=1))
    assert set(state) == {"upload.0.error", "upload.1.error"}


class Diverges(Plain):
    """Client 1's loss is NaN in round 2."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loop = next(c for c in self.trainer.callbacks if isinstance(c, FederatedLoop))
        broken = loop.round_index == 2 and loop.current_client == 1
        return super().training_step(batch, batch_idx) * (float("nan") if broken else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [TopK(0.05), Quantized(3)], ids=["topk", "quantized"])
def test_a_client_that_is_left_out_keeps_its_error_as_it_was(tmp_path: Path, compression: Compression) -> None:
    before = FederatedLoop(uploads=[compression], seed=SEED)
    fit(before, tmp_path, rounds=2)
    after = FederatedLoop(uploads=[compression], seed=SEED)
    with pytest.warns(UserWarning, match="client 1 returned a model with NaN"):
        module = fit(after, tmp_path, Diverges(), rounds=3)
    mine, theirs = (loop.state_dict()["clients"] for loop in (after, before))
    assert torch.equal(mine[1]["upload.0.error"], theirs[1]["upload.0.error"])
    assert not torch.equal(mine[0]["upload.0.error"], theirs[0]["upload.0.error"])
    assert all(value.isfinite().all() for value in module.state_dict().values())


# ---- rounding


def test_stochastic_rounding_is_right_on_average_and_the_nearest_is_nearest() -> None:
    update = UPDATES[0]
    draws = torch.stack([Quantized(3, 8).compress(update, torch.Generator().manual_seed(s)) for s in range(4000)])
    scale = (update.view(-1, 8).abs().amax(1, keepdim=True) / 3).expand(-1, 8).flatten()
    assert ((draws - update).abs() <= scale * 1.0001).all()
    # The standard deviation of one draw is at most scale / 2; of the mean of 4,000 of them 63 times less.
    assert ((draws.mean(0) - update).abs() < 5 * scale / 2 / 4000**0.5).all()
    nearest = Quantized(3, 8, stochastic=False).compress(update, torch.Generator())
    assert ((nearest - update).abs() <= scale / 2 * 1.0001).all()


def test_chance_follows_from_seed_round_client_and_position() -> None:
    def send(**kwargs: Any) -> Tensor:
        return Quantized(2).apply(UPDATES[0], context(**kwargs))

    assert torch.equal(send(), send())
    for other in ({"seed": 1}, {"round_index": 1}, {"client": 1}, {"position": 1}):
        assert not torch.equal(send(), send(**other))


# ---- what crosses


def test_traffic() -> None:
    whole, sent = Traffic(110, 440.0), torch.zeros(110)
    who = context(entries=100)
    assert TopK(0.05).traffic(whole, sent, who) == Traffic(2 * 5 + 10, 5 * 8 + 40.0)
    assert TopK(0.05).traffic(whole, sent.double(), who) == Traffic(2 * 5 + 10, 5 * 12 + 80.0)
    assert Quantized(8, 32).traffic(whole, sent, who) == Traffic(100 + 4 + 10, 100 + 16 + 40.0)
    assert Quantized(3, 100).traffic(whole, sent, who) == Traffic(100 + 1 + 10, 38 + 4 + 40.0)


# ---- what cannot be done


def test_who_starts_from_a_model_of_its_own_cannot_compress(tmp_path: Path) -> None:
    loop = FederatedLoop(personalizer=Standalone(), uploads=[TopK()], seed=SEED)
    with pytest.warns(UserWarning, match="discarded"), pytest.raises(ConfigurationError, match="did not send"):
        fit(loop, tmp_path)
