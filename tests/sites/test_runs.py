"""Several runs on the same sites: each gives what it gives alone, and nothing of one is read by another."""

import json
import shutil
from functools import partial

import pytest

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.sites.site_memory import SiteMemory, own_secret
from flsv.training.algorithms import SCAFFOLD
from flsv.uploads import TopK
from helpers import refused, warns
from helpers.sites import (
    ADDRESSES,
    LYON_ADDRESS,
    NAMES,
    ROUNDS,
    SitesInProcess,
    assert_same_runs,
    make_mlp_module,
    make_shapfed_loop,
    make_site,
)


class Server(SitesInProcess):
    """One of several on the same sites, in ``shared``; it is killed after every round, and goes on from its
    checkpoint."""

    def __init__(self, folder, make, shared):
        super().__init__(folder, make)
        for client, address in enumerate(ADDRESSES):
            self.transport.sites[address] = make_site(shared, client, make)


def make_scaffold_loop(**options):
    return make_shapfed_loop(
        **{
            "aggregator": FedAvg("uniform"),
            "metrics": {},
            "client_algorithm": SCAFFOLD(),
            **options,
        }
    )


@pytest.mark.slow
def test_two_interleaved_runs_on_the_same_sites_equal_each_run_alone(tmp_path):
    """SCAFFOLD beside SCAFFOLD with top-k, a round of each in turn."""
    make_compressed_loop = partial(make_scaffold_loop, uploads=[TopK(0.1)])
    alone = SitesInProcess(tmp_path / "alone", make_scaffold_loop).fit()
    compressed_alone = SitesInProcess(tmp_path / "compressed_alone", make_compressed_loop).fit()

    server = Server(tmp_path / "server", make_scaffold_loop, shared=tmp_path)
    compressed_server = Server(
        tmp_path / "compressed_server", make_compressed_loop, shared=tmp_path
    )
    for rounds in range(1, ROUNDS + 1):
        last_loop = server.go_on_until(rounds)
        last_compressed_loop = compressed_server.go_on_until(rounds)

    assert_same_runs(last_loop, alone)
    assert_same_runs(last_compressed_loop, compressed_alone)


def make_broken_module():
    def fail():
        raise OSError("the disk is gone")

    client_module = make_mlp_module()
    client_module.on_train_start = fail
    return client_module


@pytest.mark.slow
def test_faults_of_sites_are_recorded_in_run_json(tmp_path, caplog):
    """A site that has lost its folder, and one whose training fails."""
    make = partial(make_scaffold_loop, reporting=Reporting(table=True))
    record = tmp_path / "server" / "run.json"
    server = Server(tmp_path / "server", make, tmp_path)
    server.go_on_until(1)
    run = json.loads(record.read_text())

    assert run["events"] == []
    assert run["validation"] is None

    shutil.rmtree(tmp_path / "sites" / NAMES[0] / "runs" / run["run"])
    server.transport.sites[LYON_ADDRESS] = make_site(tmp_path, 1, make, make_broken_module)
    with (
        warns("has lost its state") as warned,
        caplog.at_level("INFO", "lightning.pytorch"),
    ):
        server.go_on_until(3)

    assert "flsv: round 2: 2 of 3 sites in " in caplog.text

    words = " ".join(str(warning.message) for warning in warned)
    lost = "has lost its state of earlier rounds, and continues without it"
    failed = "it failed with OSError at"

    assert f"site 'Boston' (client 0) {lost} in round 2." in words
    assert f"site 'Lyon' (client 1) is excluded in round 2: {failed}" in words

    events = json.loads(record.read_text())["events"]
    failure, loss = events

    for event, client, rounds in ((failure, 1, (1, 2)), (loss, 0, (1, 1))):
        assert event["client"] == client
        assert (event["first"], event["last"]) == rounds
    assert failure["times"] == 2
    assert loss["times"] == 1
    assert failed in failure["what"]
    assert lost in loss["what"]
    assert "the disk is gone" in caplog.text  # at the site
    assert "the disk is gone" not in words + str(events)


@pytest.mark.parametrize("run", ["../../elsewhere", 7, "0123456789abcdef\n"])
def test_run_id_with_a_path_outside_the_sites_folder_is_refused(tmp_path, run):
    with refused("the run's name is"):
        SiteMemory(tmp_path / "site", run, client=0)
    assert not list(tmp_path.iterdir())


def test_two_sites_in_one_folder_keep_their_own_states(tmp_path):
    memories = [SiteMemory(tmp_path, "0123456789abcdef", client) for client in (0, 1)]
    for client, memory in enumerate(memories):
        memory.save("first", {"model": client}, [])

    assert [memory.load("first") for memory in memories] == [{"model": 0}, {"model": 1}]


def test_only_the_sites_own_user_reads_its_models_and_its_secret(tmp_path):
    memory = SiteMemory(tmp_path, "0123456789abcdef", client=0)
    memory.save("first", {"model": 1}, [])
    memory.save("second", {"model": 2}, ["first"])
    own_secret(tmp_path)
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()
    }

    assert modes == {"state.pt": 0o600, "secret": 0o600}
