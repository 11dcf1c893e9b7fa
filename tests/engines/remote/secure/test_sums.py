"""A federation whose server sees sums only, against the same one that sees all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from lightning.pytorch.callbacks import ModelCheckpoint
from remote_federation import Remotely, shapfed
from remote_sites import NAMES

from flsv import FederatedLoop
from flsv.aggregation import FedAdam, FedAvg
from flsv.clients.algorithms import FedProx
from flsv.engines.remote import Packet, SecureSums
from flsv.metrics import CommunicationCost, EverybodyElse

SPLITS = {"client_val": 0.3, "client_test": 0.2}
FIVE = [*NAMES, "Quito", "Perth"]


def loop(**options: Any) -> FederatedLoop:
    metrics = {"score": EverybodyElse(), "loss": EverybodyElse(performance="negative_loss")}
    return shapfed(**{"aggregator": FedAvg(), "metrics": metrics, **options})


def remotely(folder: Path, secure: Any = True, make: Any = loop, **options: Any) -> Remotely:
    return Remotely(folder, make, secure=secure, **SPLITS, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="FedAvg"),
        pytest.param({"aggregator": FedAvg("uniform")}, id="uniform"),
        pytest.param({"aggregator": FedAdam(lr=0.03)}, id="FedAdam", marks=pytest.mark.slow),
        pytest.param(
            {"client_algorithm": FedProx(0.1), "local_epochs": 2, "client_optimizer": "keep"},
            id="FedProx",
            marks=pytest.mark.slow,
        ),
        pytest.param({"share": ["!head"], "metrics": {"cost": CommunicationCost()}}, id="heads stay"),
    ],
)
def test_it_is_the_unmasked_run_to_rounding(tmp_path: Path, options: dict[str, Any]) -> None:
    make = partial(loop, **options)
    plain, masked = (remotely(tmp_path / name, secure, make).fit(4) for name, secure in (("a", False), ("b", True)))
    # Adam divides by a root near tau: it enlarges a rounding up to lr / tau = 30 times in a round.
    atol = 1e-4 if "FedAdam" in repr(plain.aggregator) else 5e-6
    torch.testing.assert_close(masked.state.model(), plain.state.model(), rtol=0, atol=atol)
    for name in {"score", "loss"} & set(plain.contributions):
        torch.testing.assert_close(masked.contributions[name], plain.contributions[name], rtol=0, atol=20 * atol)
    assert masked.participations.tolist() == [4, 4, 4]
    by_samples = getattr(plain.aggregator, "weighting", "") == "samples"
    assert masked.weights is not None
    assert masked.weights.isnan().all() == by_samples  # a site's share of the samples is its secret


class Wire:
    """Keeps all that crosses.

    Args:
        remote: the federation.
        lost: address and kind of message that its site does not answer any more, from a round on.
    """

    def __init__(self, remote: Remotely, lost: Callable[[int, Packet], bool] = lambda address, packet: False) -> None:
        self.sent: list[tuple[int, Packet, Packet]] = []
        self._lost = lost
        remote.transport.spoil = self._keep

    def _keep(self, address: int, packet: Packet, reply: Packet) -> Packet | None:
        if self._lost(address, packet):
            return None
        self.sent.append((address, packet, reply))
        return reply

    def replies(self, kind: str) -> list[tuple[int, Packet]]:
        return [(address, reply) for address, packet, reply in self.sent if packet.kind == kind]


def trained_at(remote: Remotely) -> list[torch.Tensor]:
    """Every site's models of a run, as it kept them."""
    models = []
    for name in remote.names:
        (path,) = (remote.tmp / "sites" / name).rglob("state.pt")
        for kept in torch.load(path, weights_only=True).values():
            models.append(kept["trained"])
    return models


def alike(vector: torch.Tensor, other: torch.Tensor) -> float:
    """The cosine of a vector with another of its length."""
    return float(torch.nn.functional.cosine_similarity(vector.double(), other.double(), dim=0).abs())


@pytest.mark.parametrize("secure", [False, True])
def test_no_update_of_a_site_is_on_the_wire(tmp_path: Path, secure: bool) -> None:
    """The sites' steps from the start point are looked for in all that they send, as the last numbers of each tensor;
    without secure sums they are there, or this test would find nothing."""
    remote = remotely(tmp_path, secure, make=partial(loop, metrics={}))
    wire = Wire(remote)
    start = torch.cat([p.detach().flatten() for p in remote.make_module().parameters()])
    remote.fit(1)
    sent = [t for _, _, reply in wire.sent for t in reply.tensors.values() if t.ndim == 1 and len(t) >= len(start)]
    assert len(sent) == 3
    steps = [model - start for model in trained_at(remote)]
    assert len(steps) == 3
    found = [alike(step, t[-len(start) :] - (start if t.is_floating_point() else 0)) for step in steps for t in sent]
    if secure:
        assert max(found) < 0.03  # of random numbers 1 / sqrt(55,210) = 0.004
    else:
        assert max(found) > 0.9999


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="reads the memory of its process as Linux shows it")
@pytest.mark.parametrize("grouped", [False, True], ids=["sites", "groups"])
@pytest.mark.parametrize("secure", [False, True])
def test_no_update_of_a_site_is_in_the_servers_memory(tmp_path: Path, secure: bool, grouped: bool) -> None:
    """Sites are another process. All that this one can write to is dumped when it has the round's average, and what the
    sites have kept of their own models is looked for in it, and their steps."""
    command = [sys.executable, str(Path(__file__).with_name("sites_process.py")), str(tmp_path)]
    command += [str(int(secure)), str(int(grouped))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["average"] > 0  # the server's own model is there
    assert (found["models"] == 0) == secure, found
    assert found["steps"] == 0 or not secure


def test_no_loss_norm_or_count_of_a_site_is_on_the_wire(tmp_path: Path) -> None:
    remote = remotely(tmp_path)
    wire = Wire(remote)
    remote.fit(2)
    counts = {len(site._data.client_indices(0, "train")) for site in remote.sites.values()}
    kinds = {packet.kind for _, packet, _ in wire.sent}
    assert kinds == {"hello", "keys", "shares", "train", "unmask", "ask"}
    for _, packet, reply in wire.sent:
        said = json.dumps(dict(reply.plain))
        if packet.kind == "hello":
            assert reply.plain["sizes"] == {"train": 1, "val": 1, "test": 1}
        elif packet.kind == "train":
            assert reply.plain == {"lost": False}
            assert list(reply.tensors) == ["masked"]
        elif packet.kind == "ask":
            assert [tensor.shape for tensor in reply.tensors.values()] == [()]
        else:
            assert not reply.tensors
            assert not any(f" {count}," in said or f" {count}}}" in said for count in counts)


def test_a_site_that_goes_away_after_sharing_its_keys_is_taken_out(tmp_path: Path) -> None:
    """Osaka does not send its masked model in round 1; the sum is that of the other four, as without masks."""

    def lost(address: int, packet: Packet) -> bool:
        return address == 102 and packet.kind == "train" and packet.plain["round"] == 1

    models, values = [], []
    for secure in (False, True):
        remote = remotely(tmp_path / str(secure), secure, names=FIVE)
        Wire(remote, lost)
        with pytest.warns(UserWarning, match="site 'Osaka' .*is left out of round 1: no reply within"):
            found = remote.fit(3)
        assert found.participations.tolist() == [3, 3, 2, 3, 3]
        models.append(found.state.model())
        values.append(found.contributions["loss"])
    torch.testing.assert_close(models[1], models[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("keys", r"of the sites, \['Boston', 'Lyon'\] have drawn keys: secure sums of 2 sites: expected 3"),
        ("shares", r"2 of the sites \['Boston', 'Lyon', 'Osaka'\] have shared them, and a sum of fewer than 3"),
        ("train", r"2 of the sites .* have sent their masked models, .*Nothing was unmasked"),
        ("unmask", r"there is no sum of sites \['Boston', 'Lyon', 'Osaka'\]: 2 shares of 3"),
    ],
)
def test_two_sites_are_no_sum(tmp_path: Path, kind: str, match: str) -> None:
    """Of three sites one goes away, at each message: the run stops, and nobody has told a share."""
    remote = remotely(tmp_path)
    wire = Wire(remote, lambda address, packet: address == 102 and packet.kind == kind)
    with pytest.warns(UserWarning, match="'Osaka'"), pytest.raises(RuntimeError, match=match):
        remote.fit(1)
    assert not [reply for _, reply in wire.replies("unmask") if kind != "unmask"]


def test_a_run_that_was_killed_goes_on_to_the_bit(tmp_path: Path) -> None:
    """The masks are others; the sums are not."""

    class Killed(RuntimeError):
        pass

    whole = remotely(tmp_path / "a").fit(4)
    remote = remotely(tmp_path / "b")
    saving = ModelCheckpoint(tmp_path / "b" / "checkpoints", save_last=True)

    def killed(address: int, packet: Packet) -> bool:
        if packet.kind == "unmask" and packet.plain["round"] == 2 and address == 102:
            raise Killed
        return False

    Wire(remote, killed)
    with pytest.raises(Killed):
        remote.fit(4, enable_checkpointing=True, callbacks=[saving])
    wire = Wire(remote)
    saving = ModelCheckpoint(tmp_path / "b" / "checkpoints", save_last=True)
    last = tmp_path / "b" / "checkpoints" / "last.ckpt"
    resumed = remote.fit(4, enable_checkpointing=True, callbacks=[saving], ckpt_path=last)
    assert min(packet.plain["round"] for _, packet, _ in wire.sent if packet.kind == "train") == 2
    assert torch.equal(resumed.state.model(), whole.state.model())
    for name, value in whole.contributions.items():
        assert torch.equal(resumed.contributions[name], value)


def test_a_round_that_is_repeated_without_a_site_is_refused(tmp_path: Path) -> None:
    """Of five sites all have summed round 1, then the server is killed, and Perth is gone: what the four others would
    sum now, taken from the sum before, would be Perth's update."""
    remote = remotely(tmp_path, names=FIVE)
    saving = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)

    class Killed(RuntimeError):
        pass

    def killed(address: int, packet: Packet) -> bool:
        if packet.kind == "ask" and packet.plain["round"] == 1:
            raise Killed
        return False

    Wire(remote, killed)
    with pytest.raises(Killed):
        remote.fit(3, enable_checkpointing=True, callbacks=[saving])
    wire = Wire(remote, lambda address, packet: address == 104)
    again = {"enable_checkpointing": True, "ckpt_path": tmp_path / "checkpoints" / "last.ckpt"}
    with (
        pytest.warns(UserWarning, match=r"told before; the difference would tell of \['client 4'\]. Start them"),
        pytest.raises(RuntimeError, match="there is no sum of sites"),
    ):
        remote.fit(3, **again)
    assert {reply.kind for _, reply in wire.replies("unmask")} == {"failed"}
    Wire(remote)
    assert remote.fit(3, **again).participations.tolist() == [3] * 5


def test_what_is_clipped_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"round 0: \d+ of 165630 entries were beyond clip=0.001"):
        remotely(tmp_path, SecureSums(clip=0.001)).fit(1)


def test_a_site_that_sends_something_else_is_no_sum(tmp_path: Path) -> None:
    remote = remotely(tmp_path)

    def spoiled(address: int, packet: Packet, reply: Packet) -> Packet:
        if reply.kind == "masked" and address == 101:
            return Packet("masked", reply.plain, {"masked": reply.tensors["masked"] + 2**60})
        return reply

    remote.transport.spoil = spoiled
    with pytest.raises(RuntimeError, match="beyond what they can have sent: one of them has sent something else"):
        remote.fit(1)


def test_half_the_bytes(tmp_path: Path) -> None:
    """With 16 bits a masked model is as large as a plain one, and the average is off by up to a step of rounding."""
    plain = remotely(tmp_path / "a", False).fit(1).state.model()
    remote = remotely(tmp_path / "b", SecureSums(clip=0.5, bits=16))
    wire = Wire(remote)
    masked = remote.fit(1).state.model()
    sent = [reply.tensors["masked"] for _, reply in wire.replies("train")]
    assert {(tensor.dtype, len(tensor)) for tensor in sent} == {(torch.int32, 3 + len(plain))}
    assert 0 < (masked - plain).abs().max() < 0.5 / (2**15 - 1)


def test_the_vector_is_numpys(tmp_path: Path) -> None:
    """The sum by hand: of each site's kept model, by its samples, in float64."""
    remote = remotely(tmp_path, make=partial(loop, metrics={}))
    got = remote.fit(1).state.model().double().numpy()
    samples = [len(site._data.client_indices(0, "train")) for site in remote.sites.values()]
    exact = np.average([model.double().numpy() for model in trained_at(remote)], axis=0, weights=samples)
    assert np.abs(got - exact).max() < 1e-7
