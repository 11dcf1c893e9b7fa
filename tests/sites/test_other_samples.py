"""A site goes on with the samples with which it began, and tells nobody else what they are."""

import json
import shutil
from functools import partial

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flsv.aggregation import FedAvg
from flsv.configuration.identity import sample_hashes
from flsv.metrics import ShadowShapley
from flsv.sites import Packet, Site
from helpers import refused, warns
from helpers.sites import (
    BOSTON_ADDRESS,
    LYON_ADDRESS,
    OSAKA_ADDRESS,
    SEED,
    ServerData,
    SiteData,
    SitesInProcess,
    make_mlp_module,
    make_shapfed_loop,
)

OTHER_SAMPLES = "its samples or labels differ from those at the start of this run"


class DataWithShiftedLabels(L.LightningDataModule):
    """Lyon's samples, with each label ``label_shift`` classes on."""

    def __init__(self, label_shift=0):
        super().__init__()
        self.label_shift = label_shift

    def train_dataloader(self):
        images, labels = zip(*SiteData(client=1).train_dataloader().dataset)
        shifted_labels = (torch.tensor(labels) + self.label_shift) % 10
        samples = TensorDataset(torch.stack(images), shifted_labels)
        return DataLoader(samples, batch_size=48, shuffle=True)


def make_loop():
    metrics = {"shadow": ShadowShapley(performance="negative_loss")}
    return make_shapfed_loop(aggregator=FedAvg(), metrics=metrics)


def make_lyon(folder, **changes):
    make_data = partial(DataWithShiftedLabels, **changes)
    return Site(make_mlp_module, make_data, make_loop, folder / "sites" / "Lyon", upload_seed=SEED)


class RestartableFederation(SitesInProcess):
    def __init__(self, folder):
        super().__init__(folder, make_loop)
        self.transport.sites[LYON_ADDRESS] = make_lyon(folder)

    def go_on_until(self, rounds):
        return super().go_on_until(rounds, server_data=ServerData())


@pytest.mark.slow
def test_site_with_other_samples_at_the_second_start_is_refused(tmp_path):
    federation = RestartableFederation(tmp_path)
    federation.go_on_until(1)
    federation.transport.sites[LYON_ADDRESS] = make_lyon(tmp_path, label_shift=1)

    with refused(f"'Lyon' cannot take part: {OTHER_SAMPLES}"):
        federation.go_on_until(2)


@pytest.mark.slow
def test_site_whose_samples_change_within_a_run_refuses_to_train(tmp_path):
    federation = RestartableFederation(tmp_path)

    def change_lyon_after_round_0(address, packet, reply):
        is_last_site = address == OSAKA_ADDRESS
        if packet.plain.get("round") == 0 and is_last_site:
            federation.transport.sites[LYON_ADDRESS] = make_lyon(tmp_path, label_shift=1)
        return reply

    federation.transport.on_reply = change_lyon_after_round_0
    with warns(rf"'Lyon' \(client 1\).*2: {OTHER_SAMPLES}"):
        loop = federation.go_on_until(2)

    assert loop.participations.tolist() == [2, 1, 2]
    record = json.loads((tmp_path / "run.json").read_text())
    refusals = [event["client"] for event in record["events"] if OTHER_SAMPLES in event["what"]]
    excluded_from_run = 1
    excluded_from_coalitions = 1
    assert refusals == [excluded_from_run, excluded_from_coalitions]


@pytest.mark.slow
def test_site_that_has_lost_its_folder_cannot_be_compared(tmp_path):
    federation = RestartableFederation(tmp_path)
    federation.go_on_until(1)
    shutil.rmtree(tmp_path / "sites" / "Lyon")
    federation.transport.sites[LYON_ADDRESS] = make_lyon(tmp_path, label_shift=1)

    with warns("site 'Lyon'.*samples cannot be compared"):
        loop = federation.go_on_until(2)

    assert loop.participations.tolist() == [2, 2, 2]


def contents_in_greeting(site):
    """Return what a site says of its samples: a name of its secret, and a hash of secret and samples."""
    plain = {"client": 1, "agreement": site._agreement, "clients": 3}
    reply = site.respond(Packet("handshake", plain))
    return reply.plain["contents"]


def test_hash_that_a_site_sends_of_its_samples_depends_on_its_secret(tmp_path):
    lyon = make_lyon(tmp_path / "one")
    lyon_with_another_secret = make_lyon(tmp_path / "two")

    contents = contents_in_greeting(lyon)
    other_contents = contents_in_greeting(lyon_with_another_secret)

    assert contents_in_greeting(lyon) == contents
    assert sample_hashes(lyon._data)["0"] not in contents
    secret_name, sample_hash = contents.split()
    assert secret_name not in other_contents
    assert sample_hash not in other_contents


@pytest.mark.fast_rows
@pytest.mark.parametrize("contents", [None, "0123456789abcdef"])
def test_site_that_sends_no_hash_of_its_samples_is_not_accepted(tmp_path, contents):
    federation = RestartableFederation(tmp_path)

    def replace_contents(reply):
        return Packet("handshake", {**reply.plain, "contents": contents})

    federation.transport.change_replies("handshake", replace_contents, [BOSTON_ADDRESS])
    with (
        warns("site 'Boston' has not announced"),
        pytest.raises(RuntimeError, match="are connected, but have not announced"),
    ):
        federation.go_on_until(1)
