"""A server that sends what it likes cannot strip the noise from a site's private updates."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from flsv import ClassifierClient
from flsv.aggregation import FedAvg
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.sites import Packet, Site, SitePolicy, federation
from flsv.sites.site import LEDGER_FILE
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

NOISE = 0.5
CLIP = 1.0
#: The run's number of rounds, as the server says it.
FEW_ROUNDS = 2
MANY_ROUNDS = 1000
RATES = {FEW_ROUNDS: 0.5, MANY_ROUNDS: 0.01}


class ModuleWithRateByNumberOfRounds(ClassifierClient):
    def configure_optimizers(self):
        rate = RATES[self.trainer.max_epochs]
        return torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)


def make_module():
    torch.manual_seed(7)
    return ModuleWithRateByNumberOfRounds("mlp", num_classes=10, input_shape=(1, 8, 8))


def make_private_loop(noise=NOISE, compressed=False, **options):
    uploads = [GaussianPrivacy(CLIP, noise)]
    if compressed:
        uploads.append(TopK(0.3))
    return make_shapfed_loop(
        uploads=uploads, aggregator=FedAvg(), metrics={}, optimizer_state="persist", **options
    )


def make_noised_site(folder, **options):
    return Site(make_module, partial(SiteData, 0), make_private_loop, folder, **options)


class TrainedSite(NamedTuple):
    """A site's folder after two rounds, and the message of the second one with the reply."""

    folder: Path
    message: Packet
    reply: Packet


@pytest.fixture(scope="module")
def boston(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    exchanges = []

    def record_exchange(address, packet, reply):
        if packet.kind == "train" and address == BOSTON_ADDRESS:
            exchanges.append((packet, reply))
        return reply

    remote = SitesInProcess(folder, make_private_loop, make_module)
    remote.transport.on_reply = record_exchange
    remote.fit(rounds=FEW_ROUNDS)
    return TrainedSite(folder / "sites" / NAMES[0], *exchanges[-1])


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


#: Of a state. Sites name their states themselves.
NAME_BY_THE_SERVER = "v"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_site_continues_from_no_state_that_only_the_server_has_named(boston, tmp_path):
    first_message = as_first_round(boston.message)
    next_message = with_plain(first_message, continue_from=NAME_BY_THE_SERVER, round=1)
    site = make_noised_site(tmp_path)

    site.respond(with_plain(first_message, rounds=FEW_ROUNDS, state=NAME_BY_THE_SERVER))
    step_after_few = step_of_site(site, next_message)
    site.respond(with_plain(first_message, rounds=MANY_ROUNDS, state=NAME_BY_THE_SERVER))
    step_after_many = step_of_site(site, next_message)

    assert torch.equal(step_after_few, step_after_many)


def change_value(value):
    """Return another value of the same type."""
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
        variants[name] = with_plain(packet, **{name: change_value(value)})

    for name, tensor in packet.tensors.items():
        bits = tensor.view(torch.int32).clone()
        bits[0] ^= 1
        last_bit_flipped = bits.view(tensor.dtype)
        variants[f"bit of {name}"] = with_tensor(packet, name, last_bit_flipped)
        variants[f"shape of {name}"] = with_tensor(packet, name, tensor[None])
        variants[f"type of {name}"] = with_tensor(packet, name, tensor.view(torch.int32))
        variants[f"{name} twice"] = with_tensor(packet, f"{name}0", tensor)
    return variants


def test_every_field_of_a_message_enters_the_noise_key(boston):
    secret = "0" * 64
    variants = variants_of(boston.message)

    keys = {noise_key(secret, variant, {}) for variant in [boston.message, *variants.values()]}

    fields_of_a_server = {"run", "rounds", "round", "client", "classes", "seed", "continue_from"}
    assert fields_of_a_server <= variants.keys()
    assert len(keys) == 1 + len(variants)


def test_state_and_secret_of_a_site_enter_the_noise_key(boston):
    secret = "0" * 64
    another_secret = "1" * 64

    keys = {
        noise_key(secret, boston.message, None),
        noise_key(secret, boston.message, {}),
        noise_key(secret, boston.message, {"store": torch.zeros(1)}),
        noise_key(another_secret, boston.message, {}),
    }

    assert len(keys) == 4


def test_repeated_message_to_train_gets_the_stored_update_and_spends_nothing(boston, tmp_path):
    folder = shutil.copytree(boston.folder, tmp_path / "site")
    ledger_before = (folder / LEDGER_FILE).read_text()
    spent_policy = SitePolicy(max_epsilon=json.loads(ledger_before)["epsilon"])

    reply = make_noised_site(folder, policy=spent_policy).respond(boston.message)

    assert reply.digest == boston.reply.digest
    assert (folder / LEDGER_FILE).read_text() == ledger_before


def test_private_site_trains_again_for_the_same_message_to_the_same_update(boston, tmp_path):
    """Otherwise the mean of many responses would have little noise."""
    folder = shutil.copytree(boston.folder, tmp_path / "site")
    replies = []
    for _ in range(2):
        (stored_update,) = folder.glob("runs/*/0/update-*.pt")
        stored_update.unlink()
        replies.append(make_noised_site(folder).respond(boston.message))

    assert replies[0].digest == replies[1].digest
    assert replies[0].plain["state"] == boston.message.digest.hex()
    assert json.loads((folder / LEDGER_FILE).read_text())["updates"] == FEW_ROUNDS + 2


make_compressed_loop = partial(make_private_loop, compressed=True, sampler=UniformSampler(2))


def make_sites_with_fixed_secrets(folder):
    remote = SitesInProcess(folder, make_compressed_loop, make_module)
    for client, address in enumerate(ADDRESSES):
        site_folder = folder / "private" / NAMES[client]
        site_folder.mkdir(parents=True)
        (site_folder / "secret").write_text(f"{client:064x}")
        site = Site(make_module, partial(SiteData, client), make_compressed_loop, site_folder)
        remote.transport.sites[address] = site
    return remote


class ServerKilled(Exception):
    pass


def kill_in_round_1(address, packet, reply):
    if packet.plain.get("round") == 1:
        raise ServerKilled
    return reply


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_resumed_server_receives_the_same_noise_as_an_uninterrupted_one(tmp_path, monkeypatch):
    same_run_id = SimpleNamespace(token_hex=lambda _: "0" * 16)
    monkeypatch.setattr(federation, "secrets", same_run_id)
    uninterrupted_run = make_sites_with_fixed_secrets(tmp_path / "whole").fit(rounds=FEW_ROUNDS)

    remote = make_sites_with_fixed_secrets(tmp_path / "killed")
    pass_reply_on = remote.transport.on_reply
    remote.transport.on_reply = kill_in_round_1
    with pytest.raises(ServerKilled):
        remote.go_on_until(FEW_ROUNDS)

    remote.transport.on_reply = pass_reply_on
    resumed_run = remote.go_on_until(FEW_ROUNDS)

    assert_same_runs(resumed_run, uninterrupted_run)
