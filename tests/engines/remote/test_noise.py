"""A server that sends what it likes cannot strip the noise from a site's private updates."""

import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from flsv import ClassifierClient, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.engines.remote import Packet, Site, federation
from flsv.engines.remote.site_memory import SiteMemory, visit_secret
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.uploads import TopK
from helpers.sites import NAMES, Remotely, SiteData, assert_same, shapfed

#: Far more noise than update: two updates with one noise have a correlation of nearly 1.
NOISE, CLIP = 0.5, 1.0


class ByLength(ClassifierClient):
    """A rate that follows from the run's number of rounds, which the server names."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.parameters(), lr=0.5 if self.trainer.max_epochs == 2 else 0.01, momentum=0.9
        )


def by_length() -> ClassifierClient:
    torch.manual_seed(7)
    return ByLength("mlp", num_classes=10, input_shape=(1, 8, 8))


def private(noise: float = NOISE, compressed: bool = False, **options: Any) -> FederatedLoop:
    uploads = [GaussianPrivacy(CLIP, noise), *([TopK(0.3)] if compressed else [])]
    return shapfed(
        uploads=uploads, aggregator=FedAvg(), metrics={}, optimizer_state="persist", **options
    )


def site_in(folder: Path, noise: float = NOISE) -> Site:
    return Site(by_length, partial(SiteData, 0), partial(private, noise), folder)


def message(folder: Path) -> Packet:
    """A message of a training as a server sends it: all that it says, by whatever names."""
    sent: list[Packet] = []

    def note(address: int, packet: Packet, reply: Packet) -> Packet:
        if packet.kind == "train" and address == 100:
            sent.append(packet)
        return reply

    remote = Remotely(folder, private, by_length)
    remote.transport.spoil = note
    remote.fit(2)
    return sent[-1]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Packet, Path]:
    """The message of a second round, and the folder of a site that has had the first."""
    folder = tmp_path_factory.mktemp("told")
    return message(folder), folder / "sites" / NAMES[0]


def step(site: Site, packet: Packet) -> Tensor:
    """What a site's answer adds to the model that it was sent."""
    reply = site.answer(packet)
    assert reply.kind == "update", reply
    return reply.tensors["vector"] - packet.tensors["start"]


def cosine(vector: Tensor, other_vector: Tensor) -> float:
    similarity = torch.cosine_similarity(
        vector.flatten().double(),
        other_vector.flatten().double(),
        dim=0,
    )
    return float(similarity)


def with_plain(packet: Packet, **plain: Any) -> Packet:
    return replace(packet, plain={**packet.plain, **plain})


def attack(folder: Path, packets: Any) -> float:
    """The cosine of the difference of two noised updates with the difference of the clean ones."""
    found = []
    for noise in (NOISE, 0.0):
        one, other = packets(site_in(folder / f"{noise}", noise))
        found.append(one - other)
    assert found[1].norm() > 0.2  # the two clean updates differ
    return cosine(*found)


def first(packet: Packet) -> Packet:
    """The message of a first round, which goes on from nothing; sites of other noise take it, too."""
    plain = {name: value for name, value in packet.plain.items() if name != "agreement"}
    return replace(packet, plain={**plain, "counted": None, "round": 0})


@pytest.mark.filterwarnings("ignore")
def test_messages_differing_in_rounds_only_have_different_noise(
    told: tuple[Packet, Path], tmp_path: Path
) -> None:
    packet = first(told[0])

    def packets(site: Site) -> tuple[Tensor, Tensor]:
        return tuple(step(site, with_plain(packet, rounds=rounds)) for rounds in (2, 1000))  # type: ignore[return-value]

    assert abs(attack(tmp_path, packets)) < 0.2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("server", ["by names of its own", "by the site's names"])
def test_site_noise_differs_if_a_training_is_repeated_from_another_kept_state(
    told: tuple[Packet, Path], tmp_path: Path, server: str
) -> None:
    """A visit's momentum is another one at the second time, and the message that goes on from it is the same."""
    packet = first(told[0])

    def packets(site: Site) -> tuple[Tensor, Tensor]:
        found = []
        for rounds in (2, 1000):
            visit = site.answer(with_plain(packet, rounds=rounds, visit="v")).plain.get(
                "visit", "v"
            )
            before = "v" if server == "by names of its own" else visit
            found.append(step(site, with_plain(packet, counted=before, round=1)))
        return found[0], found[1]

    if (
        server == "by names of its own"
    ):  # of which the site knows none: it begins anew, with the same answer
        one, other = packets(site_in(tmp_path))
        assert torch.equal(one, other)
    else:
        assert abs(attack(tmp_path, packets)) < 0.2


@pytest.mark.filterwarnings("ignore")
def test_noise_differs_for_other_samples_or_another_kept_state(
    told: tuple[Packet, Path], tmp_path: Path
) -> None:
    """The message is the same; what the site keeps of the same visit, or its samples, are not."""
    packet = first(told[0])

    def states(site: Site) -> tuple[Tensor, Tensor]:
        visit = site.answer(packet).plain["visit"]
        after, memory = (
            with_plain(packet, counted=visit, round=1),
            SiteMemory(site._folder, packet.plain["run"]),
        )
        one, kept = step(site, after), memory.after(visit)
        assert kept
        memory.keep(visit, doubled(kept), [])
        return one, step(site, after)

    assert abs(attack(tmp_path / "states", states)) < 0.2

    def data(site: Site) -> tuple[Tensor, Tensor]:
        make = partial(private, site._config.uploads[0].noise_multiplier)  # type: ignore[attr-defined]
        return step(site, packet), step(
            Site(by_length, partial(SiteData, 1), make, site._folder), packet
        )

    assert abs(attack(tmp_path / "data", data)) < 0.2


def doubled(kept: Any) -> Any:
    """Twice each tensor of fractions, at any depth."""
    if isinstance(kept, Mapping):
        return {name: doubled(part) for name, part in kept.items()}
    if isinstance(kept, list | tuple):
        return type(kept)(map(doubled, kept))
    return 2 * kept if isinstance(kept, Tensor) and kept.is_floating_point() else kept


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, Tensor):
        value = value.clone()
        flat = value.view(-1).view(torch.uint8)
        flat[0] ^= 1  # the last bit of the first number
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {str: lambda: value + "0", type(None): lambda: "0" * 64}[type(value)]()


def variants(packet: Packet) -> dict[str, Packet]:
    """The message with one of its parts changed, each in turn, and with one more; by what has changed."""
    assert {each.name for each in fields(Packet)} == {"kind", "plain", "tensors"}, (
        "say here how a new field is changed"
    )
    found = {
        "kind": replace(packet, kind=packet.kind + "0"),
        "one more": with_plain(packet, more=1),
    }
    for name, value in packet.plain.items():
        if isinstance(value, Mapping):
            for inner in value:
                found[f"{name}.{inner}"] = with_plain(
                    packet, **{name: {**value, inner: changed(value[inner])}}
                )
        else:
            found[name] = with_plain(packet, **{name: changed(value)})
        found[f"without {name}"] = replace(
            packet, plain={n: v for n, v in packet.plain.items() if n != name}
        )
    for name, tensor in packet.tensors.items():
        one = {"last bit": changed(tensor), "shape": tensor[None], "type": tensor.view(torch.int32)}
        found |= {
            f"{name}, {what}": replace(packet, tensors={**packet.tensors, name: t})
            for what, t in one.items()
        }
    found["tensor's name"] = replace(
        packet, tensors={f"{name}0": t for name, t in packet.tensors.items()}
    )
    return found


def test_every_field_of_a_message_enters_the_noise_key(told: tuple[Packet, Path]) -> None:
    """All fields that messages have, and all that a server writes into them."""
    packet, _ = told
    found = variants(packet)
    assert {
        "run",
        "rounds",
        "round",
        "client",
        "clients",
        "classes",
        "seed",
        "counted",
        "start, shape",
    } <= found.keys()
    keys = {
        what: visit_secret("0" * 64, each, {}) for what, each in {**found, "it": packet}.items()
    }
    assert len({*keys.values()}) == len(keys)
    assert (
        len(
            {visit_secret("0" * 64, packet, kept) for kept in (None, {}, {"store": torch.zeros(1)})}
        )
        == 3
    )
    assert visit_secret("0" * 64, packet, {}) != visit_secret("1" * 64, packet, {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_any_change_of_a_message_changes_the_noise(
    told: tuple[Packet, Path], tmp_path: Path
) -> None:
    """In the answers of a site, which refuses some of these messages."""
    packet, folder = told
    shutil.copytree(folder, tmp_path / "site")
    site = site_in(tmp_path / "site")
    base, refused = step(site, packet), []
    for what, each in variants(packet).items():
        reply = site.answer(each)
        if reply.kind != "update":
            refused.append(what)
            continue
        noised = reply.tensors["vector"] - each.tensors["start"].view(torch.float32)
        assert abs(cosine(base, noised)) < 0.05, what
    assert {"one more", "seed", "rounds", "counted", "start, last bit"}.isdisjoint(refused)


def test_private_site_answers_a_repeated_message_with_the_same_update(
    told: tuple[Packet, Path], tmp_path: Path
) -> None:
    """So that averaging the answers tells nothing; also in another process of the site."""
    packet, folder = told
    shutil.copytree(folder, tmp_path / "site")
    replies = [site_in(tmp_path / "site").answer(packet) for _ in range(2)]
    assert replies[0].digest == replies[1].digest
    assert replies[0].plain["visit"] == packet.digest.hex()


class Killed(Exception):
    pass


@pytest.mark.filterwarnings("ignore")
def test_resumed_server_receives_the_same_noise_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a round again that sites have trained, from the state before it; compression keeps its errors."""
    monkeypatch.setattr(
        federation, "secrets", SimpleNamespace(token_hex=lambda _: "0" * 16)
    )  # one run's name
    make = partial(private, compressed=True, sampler=UniformSampler(2))

    def begun(folder: Path) -> Remotely:
        remote = Remotely(folder, make, by_length)
        for client in range(len(NAMES)):
            own = folder / "private" / NAMES[client]
            own.mkdir(parents=True)
            (own / "secret").write_text(f"{client:064x}")
            remote.transport.sites[100 + client] = Site(
                by_length, partial(SiteData, client), make, own
            )
        return remote

    def die(address: int, packet: Packet, reply: Packet) -> Packet:
        if packet.plain.get("round") == 2:
            raise Killed
        return reply

    whole, killed = begun(tmp_path / "whole"), begun(tmp_path / "killed")
    expected = whole.fit(4)
    usual, killed.transport.spoil = killed.transport.spoil, die
    saving = ModelCheckpoint(tmp_path, save_last=True)
    with pytest.raises(Killed):
        killed.fit(4, enable_checkpointing=True, callbacks=[saving])
    killed.transport.spoil = usual
    assert_same(killed.fit(4, ckpt_path=tmp_path / "last.ckpt"), expected)
