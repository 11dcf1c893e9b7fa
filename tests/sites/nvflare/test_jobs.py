"""Jobs of NVFlare without processes: how they end and continue, and what a site's owner decides."""

import json
import sys
import time
from types import ModuleType

import lightning as L
import pytest
import torch

pytest.importorskip("nvflare", reason="needs nvflare: make nvflare")

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.fuel.utils import fobs
from nvflare.job_config.api import FedJob
from sites.nvflare.jobs import Job

from flsv.sites import Packet, RemoteServer, agreement
from flsv.sites.nvflare import (
    FlsvController,
    FlsvExecutor,
    NvflareTransport,
    from_shareable,
    to_shareable,
)
from flsv.sites.run_status import Stopped
from helpers import refused
from helpers.sites import NAMES, ServerData, fit_in_one_process, make_mlp_module, make_shapfed_loop

pytestmark = pytest.mark.nvflare


@pytest.fixture
def job(tmp_path, monkeypatch):
    code = ModuleType("code_of_job")
    monkeypatch.setitem(sys.modules, code.__name__, code)
    return Job(tmp_path, code)


def server_of(
    rounds,
    *callbacks,
    timeout=60.0,
):
    return RemoteServer(
        make_mlp_module,
        make_shapfed_loop,
        NAMES,
        rounds=rounds,
        num_classes=10,
        datamodule=ServerData,
        timeout=timeout,
        trainer={
            "accelerator": "cpu",
            "callbacks": callbacks,
            "enable_progress_bar": False,
        },
    )


class CallbackThatAbortsTheJob(L.Callback):
    """Aborts the job after a round."""

    def __init__(self, round_index, abort_signal):
        self._round_index = round_index
        self._abort_signal = abort_signal

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self._round_index:
            self._abort_signal.trigger(True)


def status_of(run_folder):
    text = (run_folder / "status.json").read_text()
    return str(json.loads(text)["status"])


def requested_rounds(job):
    """Return the rounds of all messages that request training."""
    packets = [from_shareable(task.data) for task in job.tasks]
    return [packet.plain["round"] for packet in packets if packet.kind == "train"]


def test_aborted_job_ends_and_the_next_job_continues_to_the_same_bits(job, tmp_path):
    run_folder = tmp_path / "server" / "flsv-runs"
    job.run(server_of(3, CallbackThatAbortsTheJob(1, job.abort_signal)))

    assert status_of(run_folder) == "stopped"
    assert requested_rounds(job) == [0, 0, 0, 1, 1, 1]

    job.tasks.clear()
    job.abort_signal = Signal()
    job.run(server_of(3))

    assert status_of(run_folder) == "finished"
    assert requested_rounds(job) == [2, 2, 2]

    checkpoint = torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=False)
    loop = fit_in_one_process(tmp_path / "one_process", make_shapfed_loop, rounds=3)
    weights = []
    for name, _ in make_mlp_module().named_parameters():
        weights.append(checkpoint["state_dict"][name].flatten())

    assert torch.equal(torch.cat(weights), loop.state.model())


def test_site_that_is_late_sends_no_reply_and_its_task_is_cancelled(job):
    transport = NvflareTransport(job.controller(), job.context("server"), job.abort_signal)
    job.responses = lambda site, task: site != "Lyon"

    packet = Packet("handshake", {"client": 1})
    replies = dict(transport.exchange(dict.fromkeys(NAMES, packet), 0.5))

    assert replies.keys() == {"Boston", "Osaka"}
    _, task_of_lyon, _ = job.tasks
    assert task_of_lyon in job.cancelled
    assert "Lyon" in transport.present()


def test_site_without_a_process_is_not_waited_for(job):
    transport = NvflareTransport(job.controller(), job.context("server"), job.abort_signal)

    def die_without_a_response(site, task):
        job.present.remove(site)
        return False

    job.responses = die_without_a_response
    replies = dict(transport.exchange({"Lyon": Packet("train", {"round": 0})}, 600.0))

    assert replies["Lyon"].kind == "failed"
    assert replies["Lyon"].plain["error"] == "its process or its connection has ended"
    assert "Lyon" not in transport.present()


def test_reply_in_time_is_read_although_the_server_itself_is_late(job):
    transport = NvflareTransport(job.controller(), job.context("server"), job.abort_signal)

    def keep_the_server_busy(site, task):
        time.sleep(0.3)
        return True

    job.responses = keep_the_server_busy
    replies = dict(transport.exchange({"Lyon": Packet("handshake", {"client": 1})}, 0.2))

    assert list(replies) == ["Lyon"]


def test_abort_cancels_the_task_of_a_site(job):
    transport = NvflareTransport(job.controller(), job.context("server"), job.abort_signal)

    def abort_without_a_response(site, task):
        job.abort_signal.trigger(True)
        return False

    job.responses = abort_without_a_response
    with pytest.raises(Stopped, match="the job was aborted"):
        list(transport.exchange({"Lyon": Packet("train", {"round": 0})}, 600.0))

    (task,) = job.tasks
    assert job.cancelled == [task]


def greet_lyon(job, context=None):
    """Return what Lyon replies to a greeting."""
    facts = agreement(make_mlp_module(), make_shapfed_loop())
    greeting = Packet("handshake", {"client": 1, "agreement": facts, "clients": 3})
    reply = job.execute("Lyon", to_shareable(greeting), context)
    return dict(from_shareable(reply).plain)


def test_owners_policy_and_node_file_are_read_at_every_message(job, tmp_path):
    local = job.folder_of("Lyon") / "local"
    policy = local / "flsv-site.toml"
    assert greet_lyon(job)["sizes"]["train"] > 0

    policy.write_text("max_epsilon = 3\n")
    assert "its policy sets max_epsilon=3" in greet_lyon(job)["error"]

    policy.unlink()
    (local / "flsv-node.toml").write_text('policy = "/nowhere.toml"\n')
    assert "its policy cannot be read" in greet_lyon(job)["error"]


@pytest.mark.parametrize("name", ["flsv_site.toml", "fslv-site.tml", "policy.toml"])
def test_misspelt_policy_file_is_refused(job, name):
    policy_file = job.folder_of("Lyon") / "local" / name
    policy_file.write_text("max_epsilon = 3\n")

    reply = greet_lyon(job)

    assert f"flsv does not read the file {name} in the site's folder local" in reply["error"]
    assert reply["permanent"] is True


def test_files_of_nvflare_and_of_an_editor_beside_the_policy_are_accepted(job):
    for name in ["resources.json", "privacy.json.sample", ".flsv-site.toml.swp"]:
        (job.folder_of("Lyon") / "local" / name).touch()
    assert "sizes" in greet_lyon(job)


def test_filters_of_nvflare_which_would_change_nothing_are_refused(job):
    context = job.context("Lyon")
    runner = context.get_prop(FLContextKey.RUNNER)
    runner.task_result_filters["train/out"] = [PercentilePrivacy()]

    reply = greet_lyon(job, context)

    assert "filters ['PercentilePrivacy'] would not change flsv's messages" in reply["error"]


def test_job_whose_server_is_no_remote_server_is_refused(job):
    with refused("is a str, expected a flsv.sites.RemoteServer"):
        job.run("a server")


def test_executor_whose_client_is_no_site_client_fails(job):
    job.executors["Lyon"] = FlsvExecutor("os:path")

    reply = greet_lyon(job)

    assert reply["error"].startswith("it failed with an error; the site's own log")


def test_exported_job_polls_often_and_carries_nothing_of_flsv(tmp_path):
    job = FedJob("digits")
    job.to_server(FlsvController("federation:server"))
    job.to_clients(FlsvExecutor("federation:client"))
    job.export_job(str(tmp_path))

    (server_file,) = tmp_path.rglob("config_fed_server.json")
    server = json.loads(server_file.read_text())

    assert server["workflows"][0]["args"] == {"server": "federation:server"}
    assert server["server"]["task_request_interval"] <= 0.5

    (client_file,) = tmp_path.rglob("config_fed_client.json")
    client = json.loads(client_file.read_text())

    assert client["executors"][0]["executor"]["args"] == {"client": "federation:client"}
    assert not list(tmp_path.rglob("*.py"))


def test_packet_converted_to_a_shareable_and_back_is_equal():
    tensors = {
        "transposed": torch.randn(3, 2).T,
        "scalar": torch.tensor(2.0),
    }
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        tensors[str(dtype)] = torch.arange(4).to(dtype)

    packet = Packet("train", {"a": [1, None, "x"]}, tensors)

    message = fobs.loads(fobs.dumps(to_shareable(packet)))
    packet_read = from_shareable(message)

    assert packet_read.kind == packet.kind
    assert packet_read.plain == packet.plain
    for name, tensor in packet.tensors.items():
        assert packet_read.tensors[name].dtype == tensor.dtype
        assert torch.equal(packet_read.tensors[name], tensor)


def test_shareable_of_something_else_is_no_packet():
    with pytest.raises(ValueError, match="not a packet of flsv"):
        from_shareable(Shareable())
