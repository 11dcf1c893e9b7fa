"""Several runs on the same sites: each gives what it gives alone, and nothing of one is read by another."""

import json
import secrets
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
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
    SitesInProcess,
    assert_same_runs,
    make_mlp_module,
    make_shapfed_loop,
    make_site,
)


class ServerOfSharedSites(SitesInProcess):
    """One of several servers whose sites have their folders in ``shared``."""

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
    """A round of each in turn, with and without compression."""
    make_compressed_loop = partial(make_scaffold_loop, uploads=[TopK(0.1)])
    alone = SitesInProcess(tmp_path / "alone", make_scaffold_loop).fit(rounds=2)
    compressed_alone = SitesInProcess(tmp_path / "compressed", make_compressed_loop).fit(rounds=2)

    shared = tmp_path / "shared"
    server = ServerOfSharedSites(tmp_path / "first", make_scaffold_loop, shared)
    compressed_server = ServerOfSharedSites(tmp_path / "second", make_compressed_loop, shared)
    server.go_on_until(1)
    compressed_server.go_on_until(1)

    assert_same_runs(server.go_on_until(2), alone)
    assert_same_runs(compressed_server.go_on_until(2), compressed_alone)


def make_module_that_fails_at_its_start():
    def fail():
        raise OSError("the disk is gone")

    module = make_mlp_module()
    module.on_train_start = fail
    return module


LOST_STATE = "has lost its state of earlier rounds, and continues without it"
FAILED = "it failed with an error; the site's own log"


def read_record(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
def test_lost_state_and_failure_of_sites_are_warned_about_and_recorded(tmp_path, caplog):
    make = partial(make_scaffold_loop, reporting=Reporting(table=True))
    server = ServerOfSharedSites(tmp_path / "server", make, tmp_path)
    server.go_on_until(1)
    run_id = read_record(tmp_path / "server")["run"]
    assert read_record(tmp_path / "server")["events"] == []

    shutil.rmtree(tmp_path / "sites" / "Boston" / "runs" / run_id)
    failing_site = make_site(tmp_path, 1, make, make_module_that_fails_at_its_start)
    server.transport.sites[LYON_ADDRESS] = failing_site
    with (
        warns(LOST_STATE) as caught_warnings,
        caplog.at_level("INFO", "lightning.pytorch"),
    ):
        server.go_on_until(3)

    messages = " ".join(str(warning.message) for warning in caught_warnings)
    assert "flsv: round 2: 2 of 3 sites in " in caplog.text
    assert f"site 'Boston' (client 0) {LOST_STATE} in round 2." in messages
    assert f"site 'Lyon' (client 1) is excluded in round 2: {FAILED}" in messages

    failure, loss = read_record(tmp_path / "server")["events"]
    rounds_of_failure = {"first": 1, "last": 2, "times": 2}
    round_of_loss = {"first": 1, "last": 1, "times": 1}
    assert failure.items() >= {"client": 1, **rounds_of_failure}.items()
    assert loss.items() >= {"client": 0, **round_of_loss}.items()
    assert FAILED in failure["what"]
    assert LOST_STATE in loss["what"]

    # The site's own log has the error's text, and nothing that leaves the site.
    assert "the disk is gone" in caplog.text
    assert "the disk is gone" not in messages + failure["what"]


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


def test_processes_that_save_states_at_the_same_time_lose_none(tmp_path, monkeypatch):
    load_all = SiteMemory.load_all

    def load_slowly(memory):
        states = load_all(memory)
        time.sleep(0.3)
        return states

    monkeypatch.setattr(SiteMemory, "load_all", load_slowly)

    def save(name):
        SiteMemory(tmp_path, "0123456789abcdef", client=0).save(name, {"model": name})

    in_threads(save, ["first", "second"])

    states = load_all(SiteMemory(tmp_path, "0123456789abcdef", client=0))
    assert states.keys() == {"first", "second"}


def test_processes_that_start_at_the_same_time_have_one_secret(tmp_path, monkeypatch):
    token_hex = secrets.token_hex

    def draw_slowly(num_bytes):
        time.sleep(0.3)
        return token_hex(num_bytes)

    monkeypatch.setattr(secrets, "token_hex", draw_slowly)

    first_secret, second_secret = in_threads(own_secret, [tmp_path, tmp_path])

    assert first_secret == second_secret


def in_threads(function, arguments):
    """Return ``[function(argument) for argument in arguments]``, called at the same time."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


def test_files_of_models_and_secret_are_readable_by_their_owner_only(tmp_path):
    memory = SiteMemory(tmp_path, "0123456789abcdef", client=0)
    memory.save("first", {"model": 1}, [])
    memory.save("second", {"model": 2}, ["first"])
    own_secret(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in files}

    assert modes == {"state.pt": 0o600, "secret": 0o600}
