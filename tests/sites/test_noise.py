"""A server that sends what it likes cannot strip the noise from a site's private updates."""

import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flsv import ClassifierClient
from flsv.aggregation import FedAvg
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.sites import Packet, Site, federation
from flsv.sites.site_memory import noise_key
from flsv.uploads import TopK
from helpers.sites import (
    ADDRESSES,
    BOSTON_ADDRESS,
    NAMES,
    SiteData,
    SitesInProcess,
    assert_same_runs,
    make_shapfed_loop,
)

#: Far more noise than update: two updates with one noise have a correlation of nearly 1.
NOISE = 0.5
CLIP = 1.0


#: Numbers of rounds that the server names, by which a module of :class:`ByLength` trains at two rates.
FEW_ROUNDS = 2
MANY_ROUNDS = 1000


class ByLength(ClassifierClient):
    """A rate that follows from the run's number of rounds, which the server names."""

    def configure_optimizers(self):
        if self.trainer.max_epochs == FEW_ROUNDS:
            rate = 0.5
        else:
            rate = 0.01
        return torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)


def make_module_by_length():
    torch.manual_seed(7)
    return ByLength("mlp", num_classes=10, input_shape=(1, 8, 8))


def make_private_loop(noise=NOISE, compressed=False, **options):
    uploads = [GaussianPrivacy(CLIP, noise)]
    if compressed:
        uploads.append(TopK(0.3))
    return make_shapfed_loop(
        uploads=uploads, aggregator=FedAvg(), metrics={}, optimizer_state="persist", **options
    )


def make_noised_site(folder, noise=NOISE):
    return Site(
        make_module_by_length, partial(SiteData, 0), partial(make_private_loop, noise), folder
    )


def record_training_message(folder):
    """A message of a training as a server sends it: all that it says, by whatever names."""
    sent = []

    def record_messages_to_boston(address, packet, reply):
        if packet.kind == "train" and address == BOSTON_ADDRESS:
            sent.append(packet)
        return reply

    remote = SitesInProcess(folder, make_private_loop, make_module_by_length)
    remote.transport.on_reply = record_messages_to_boston
    remote.fit(rounds=FEW_ROUNDS)
    return sent[-1]


@pytest.fixture(scope="module")
def message_and_folder(tmp_path_factory):
    """The message of a second round, and the folder of a site that has had the first."""
    folder = tmp_path_factory.mktemp("message_and_folder")
    return record_training_message(folder), folder / "sites" / NAMES[0]


def step_of_site(site, packet):
    """Return what a site's response adds to the model that it was sent."""
    reply = site.respond(packet)
    assert reply.kind == "update", reply
    return reply.tensors["vector"] - packet.tensors["start"]


def with_plain(packet, **plain):
    return replace(packet, plain={**packet.plain, **plain})


def as_first_round(packet):
    """The message of a first round, which goes on from nothing; sites of other noise take it, too."""
    plain = {name: value for name, value in packet.plain.items() if name != "agreement"}
    return replace(packet, plain={**plain, "continue_from": None, "round": 0})


SERVERS_NAME = "v"  # of a visit, which a site names itself


@pytest.mark.filterwarnings("ignore")
def test_site_begins_anew_after_a_visit_that_only_the_server_names(message_and_folder, tmp_path):
    message, _ = message_and_folder
    packet = as_first_round(message)
    site = make_noised_site(tmp_path)

    steps = []
    for rounds in (FEW_ROUNDS, MANY_ROUNDS):
        site.respond(with_plain(packet, rounds=rounds, state=SERVERS_NAME))
        # The server counts the visit by its own name, which the site does not know.
        next_packet = with_plain(packet, continue_from=SERVERS_NAME, round=1)
        steps.append(step_of_site(site, next_packet))

    step_after_few, step_after_many = steps
    assert torch.equal(step_after_few, step_after_many)


def changed(value):
    """Another value of the same type."""
    if isinstance(value, Mapping):
        return {**value, "more": 1}
    if isinstance(value, str):
        return value + "0"
    if value is None:
        return "0" * 64
    return value + 1


def with_tensor(packet, name, tensor):
    return replace(packet, tensors={**packet.tensors, name: tensor})


def variants_of(packet):
    """The message with one of its parts changed, each in turn, and with one more; by what has changed."""
    field_names = {field.name for field in fields(Packet)}
    assert field_names == {"kind", "plain", "tensors"}, "say here how a new field is changed"

    variants = {"kind": replace(packet, kind="other"), "one more": with_plain(packet, more=1)}
    for name, value in packet.plain.items():
        variants[name] = with_plain(packet, **{name: changed(value)})

    for name, tensor in packet.tensors.items():
        bits = tensor.view(torch.int32).clone()
        bits[0] ^= 1
        last_bit_flipped = bits.view(tensor.dtype)
        variants[f"bit of {name}"] = with_tensor(packet, name, last_bit_flipped)
        variants[f"shape of {name}"] = with_tensor(packet, name, tensor[None])
        variants[f"type of {name}"] = with_tensor(packet, name, tensor.view(torch.int32))
        variants[f"{name} twice"] = with_tensor(packet, f"{name}0", tensor)
    return variants


def test_every_field_of_a_message_enters_the_noise_key(message_and_folder):
    """All fields that messages have, and all that a server writes into them."""
    secret = "0" * 64
    packet, _ = message_and_folder
    variants = variants_of(packet)

    keys = {noise_key(secret, variant, {}) for variant in [packet, *variants.values()]}

    fields_of_a_server = {"run", "rounds", "round", "client", "classes", "seed", "continue_from"}
    assert fields_of_a_server <= variants.keys()
    assert len(keys) == 1 + len(variants)


def test_state_and_secret_of_a_site_enter_the_noise_key(message_and_folder):
    packet, _ = message_and_folder
    secret = "0" * 64
    other_secret = "1" * 64

    keys = {
        noise_key(secret, packet, None),
        noise_key(secret, packet, {}),
        noise_key(secret, packet, {"store": torch.zeros(1)}),
        noise_key(other_secret, packet, {}),
    }

    assert len(keys) == 4


def test_private_site_answers_a_repeated_message_with_the_same_update(message_and_folder, tmp_path):
    """So that averaging the responses tells nothing; also in another process of the site."""
    packet, folder = message_and_folder
    shutil.copytree(folder, tmp_path / "site")

    replies = [make_noised_site(tmp_path / "site").respond(packet) for _ in range(2)]

    assert replies[0].digest == replies[1].digest
    assert replies[0].plain["state"] == packet.digest.hex()


class Killed(Exception):
    pass


@pytest.mark.filterwarnings("ignore")
def test_resumed_server_receives_the_same_noise_as_an_uninterrupted_one(tmp_path, monkeypatch):
    """It asks for a round again that sites have trained, from the state before it; compression keeps its errors."""
    # One run's name.
    one_name = SimpleNamespace(token_hex=lambda _: "0" * 16)
    monkeypatch.setattr(federation, "secrets", one_name)
    make = partial(make_private_loop, compressed=True, sampler=UniformSampler(2))

    def make_remote(folder):
        remote = SitesInProcess(folder, make, make_module_by_length)
        for client, address in enumerate(ADDRESSES):
            site_folder = folder / "private" / NAMES[client]
            site_folder.mkdir(parents=True)
            (site_folder / "secret").write_text(f"{client:064x}")
            data = partial(SiteData, client)
            remote.transport.sites[address] = Site(make_module_by_length, data, make, site_folder)

        return remote

    def kill_in_round_2(address, packet, reply):
        if packet.plain.get("round") == 2:
            raise Killed
        return reply

    whole = make_remote(tmp_path / "whole")
    killed = make_remote(tmp_path / "killed")
    expected = whole.fit(rounds=4)

    pass_on = killed.transport.on_reply
    killed.transport.on_reply = kill_in_round_2
    with pytest.raises(Killed):
        killed.go_on_until(4)

    killed.transport.on_reply = pass_on
    resumed = killed.go_on_until(4)

    assert_same_runs(resumed, expected)
