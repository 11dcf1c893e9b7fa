"""Federations of three sites: in this process, their packets through JSON and copies; and as processes of Flower with
TLS and authentication, started by the template's own scripts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting, read_run
from flsv.aggregation import ShapFedWA
from flsv.core import FederationState
from flsv.data import GroupPartitioner, OneClient, Splits, load_image_data
from flsv.metrics import ClassSpecificShapley
from flsv.sites import (
    Directory,
    Packet,
    RemoteData,
    RemoteFederation,
    Site,
    SitePolicy,
    agreement,
)
from flsv.sites.federation import RemoteSites
from flsv.sites.requests import SCORES_OF_CLASSES
from helpers import make_generator
from helpers.data import group_options
from helpers.fits import trainer_for
from helpers.ports import free_ports

NAMES = ["Boston", "Lyon", "Osaka"]
#: Where a transport reaches them.
BOSTON_ADDRESS = 100
LYON_ADDRESS = 101
OSAKA_ADDRESS = 102
ADDRESSES = [BOSTON_ADDRESS + client for client in range(len(NAMES))]
SEED = 7
ROUNDS = 2
NUM_DIGITS = 1437
#: Validation and test samples of the sites' own.
SPLITS = {"client_val": 0.3, "client_test": 0.2}
MakeLoop = Callable[..., FederatedLoop]


def site_of_each_digit() -> list[int]:
    """The site of each of the digits."""
    generator = make_generator(3)
    num_sites = len(NAMES)
    sites = torch.randint(num_sites, (NUM_DIGITS,), generator=generator)
    return sites.tolist()


def make_undivided_data(**options) -> FederatedDataModule:
    """Return what one process would train on: a third of the digits."""
    third_of_digits = {"max_samples": 480, **options}
    return FederatedDataModule(
        "digits",
        GroupPartitioner(),
        groups=site_of_each_digit(),
        batch_size=48,
        **group_options(third_of_digits),
    )


class ServerData(L.LightningDataModule):
    """The validation samples that the server of :func:`make_undivided_data` has."""

    def val_dataloader(self):
        data = make_undivided_data()
        data.setup("fit")
        return data.val_dataloader()


class SiteData(L.LightningDataModule):
    """One client's training samples of :func:`make_undivided_data`, as a project of its own would have them."""

    def __init__(self, client: int):
        super().__init__()
        self.client = client

    def train_dataloader(self):
        data = make_undivided_data()
        data.setup("fit")
        digits = load_image_data("digits").train
        indices = data.client_indices(self.client)
        samples = Subset(digits, indices.tolist())
        return DataLoader(samples, batch_size=48, shuffle=True)


def make_mlp_module(**options) -> ClassifierClient:
    torch.manual_seed(SEED)
    defaults = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), **{**defaults, **options})


def make_momentum_module() -> ClassifierClient:
    return make_mlp_module(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def make_shapfed_loop(**options) -> FederatedLoop:
    defaults = {
        "aggregator": ShapFedWA("cssv"),
        "metrics": {"cssv": ClassSpecificShapley()},
        "seed": SEED,
        "reporting": Reporting(table=False),
    }
    return FederatedLoop(**{**defaults, **options})


def fit_in_one_process(
    tmp: Path,
    make_loop: MakeLoop,
    make_module=make_mlp_module,
    rounds: int = ROUNDS,
    **data_options,
) -> FederatedLoop:
    loop = make_loop()
    trainer_for(loop, tmp, rounds).fit(make_module(), make_undivided_data(**data_options))
    return loop


def make_site_data(client: int, **options) -> L.LightningDataModule:
    """Return a project's own data module; with options of a FederatedDataModule in one that divides its samples."""
    if not options:
        return SiteData(client)
    grouped_options = group_options({"server_val": 0.0, **options})
    return FederatedDataModule(SiteData(client), OneClient(), **grouped_options)


def make_site(
    tmp: Path,
    client: int,
    make_loop: MakeLoop,
    make_module=make_mlp_module,
    policy: SitePolicy | None = None,
    **data_options,
) -> Site:
    make_data = partial(make_site_data, client, **data_options)
    folder = tmp / "sites" / NAMES[client]
    return Site(make_module, make_data, make_loop, folder, upload_seed=SEED, policy=policy)


def announcement(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return what a site without a table says of itself in its greeting."""
    return {"sizes": dict(sizes), "contents": "0123456789abcdef fedcba9876543210"}


#: The name of a run.
RUN = "0" * 16


def training_packet(classes: int) -> Packet:
    """A message that asks the first site for its first training."""
    plain = {
        "run": RUN,
        "clients": 3,
        "client": 0,
        "classes": classes,
        "rounds": 1,
        "round": 0,
        "seed": 0,
        "continue_from": None,
    }
    return Packet("train", plain, {"start": torch.zeros(1)})


def named(packet: Packet, reply: Any) -> Any:
    """Return a reply that says to which message it is one, if it is a packet that does not."""
    if not isinstance(reply, Packet) or "message" in reply.plain:
        return reply
    plain = {**reply.plain, "message": packet.plain["message"]}
    return Packet(reply.kind, plain, reply.tensors)


class Replay:
    """Sites that send what they are given here, by the kind of what they are asked."""

    def __init__(self):
        self.says: dict[str, dict[int, Any]] = {}

    def present(self) -> dict[int, str]:
        return dict(enumerate(NAMES, start=BOSTON_ADDRESS))

    def exchange(self, packets: Mapping[int, Packet], seconds: float) -> Iterator[tuple[int, Any]]:
        for address, packet in packets.items():
            yield address, named(packet, self.says[packet.kind][address])


def make_directory(
    folder: Path, transport: Any, facts: dict[str, Any], names: Sequence[str] = NAMES
) -> Directory:
    """Return the list of sites of a server that says these facts. Sites are in this process, so they need no wait."""
    return Directory(transport, names, facts, folder / "book.json", timeout=60, wait=0.2)


def one_step_per_sample(site: int, num_samples: int) -> int:
    return num_samples


def sites_that_reply(folder: Path, transport: Replay, **options) -> RemoteSites:
    """What a server of one round holds of sites that send what they are given."""
    directory = make_directory(folder, transport, facts={})
    state = FederationState(run=RUN, num_clients=len(NAMES))
    return RemoteSites(directory, state, rounds=1, max_steps=one_step_per_sample, **options)


class SiteTransport:
    """Sites behind a wire, by address; ``on_reply`` is what becomes of their replies there."""

    def __init__(self, sites: Mapping[int, Any], names: Sequence[str] = NAMES):
        self.sites = dict(sites)
        self.names = dict(enumerate(names, start=BOSTON_ADDRESS))
        self.on_reply: Callable[[int, Packet, Packet], Any] = lambda address, packet, reply: reply

    def change_replies(
        self,
        kind: str,
        change: Callable[[Packet], Any],
        sites: Sequence[int] = ADDRESSES,
        rounds: Sequence[int] | None = None,
    ):
        """Let ``change`` make what becomes of replies of a kind, of these sites, in these rounds or all."""

        def on_reply(address: int, packet: Packet, reply: Packet):
            if packet.kind != kind or address not in sites:
                return reply
            if rounds and packet.plain.get("round") not in rounds:
                return reply
            return change(reply)

        self.on_reply = on_reply

    def present(self) -> dict[int, str]:
        return {address: self.names[address] for address in self.sites}

    def exchange(self, packets: Mapping[int, Packet], seconds: float) -> Iterator[tuple[int, Any]]:
        for address, packet in packets.items():
            if address not in self.sites:
                continue
            received_packet = send_through_wire(packet)
            reply = self.sites[address].respond(received_packet)
            received_reply = send_through_wire(reply)
            changed_reply = self.on_reply(address, packet, received_reply)
            if changed_reply is not None:
                yield address, named(packet, changed_reply)


def send_through_wire(packet: Packet) -> Packet:
    """Return what arrives of a packet: its values through JSON, copies of its tensors."""
    tensors = {}
    for name, tensor in packet.tensors.items():
        tensors[name] = tensor.clone()
    plain = json.loads(json.dumps(packet.plain))
    return Packet(packet.kind, plain, tensors)


def gather_sites(
    folder: Path, transport: SiteTransport, facts: dict[str, Any], names: Sequence[str] = NAMES
) -> Directory:
    """Greet all sites, of which the server says these facts."""
    directory = make_directory(folder, transport, facts, names)
    directory.gather()
    return directory


def data_at_sites(directory: Directory, names: Sequence[str] = NAMES, **options) -> RemoteData:
    sites = range(len(names))
    return RemoteData(
        names,
        sizes=[directory.sizes[site] for site in sites],
        contents=[directory.contents[site] for site in sites],
        dictionary_hash=directory.dictionary_hash,
        class_names_hash=directory.class_names_hash,
        **options,
    )


class SitesInProcess:
    """The same federation with a wire in it."""

    num_classes = 10

    def __init__(self, tmp: Path, make_loop: MakeLoop, make_module=make_mlp_module, **data_options):
        self.tmp = tmp
        self.make_loop = make_loop
        self.make_module = make_module
        sites_by_address = {}
        for client, address in enumerate(ADDRESSES):
            sites_by_address[address] = self.make_site(client, **data_options)
        self.transport = SiteTransport(sites_by_address)

    def make_site(self, client: int, **data_options) -> Site:
        return make_site(self.tmp, client, self.make_loop, self.make_module, **data_options)

    def directory(self) -> Directory:
        facts = agreement(self.make_module(), self.make_loop())
        return gather_sites(self.tmp, self.transport, facts)

    def fit(self, rounds: int = ROUNDS, server_data=None, **options) -> FederatedLoop:
        directory = self.directory()
        data = data_at_sites(directory, num_classes=self.num_classes, server_data=server_data)
        self.loop = self.make_loop().replace(engine=partial(RemoteFederation, directory))
        ckpt_path = options.pop("ckpt_path", None)
        trainer = trainer_for(self.loop, self.tmp, rounds, **options)
        trainer.fit(self.make_module(), data, ckpt_path=ckpt_path)
        return self.loop

    def go_on_until(self, rounds: int, **options) -> FederatedLoop:
        """Fit with a checkpoint after each round, from the last one on if there is one."""
        checkpoint = self.tmp / "checkpoints" / "last.ckpt"
        if checkpoint.is_file():
            options["ckpt_path"] = checkpoint
        saving = ModelCheckpoint(checkpoint.parent, save_last=True)
        return self.fit(rounds, callbacks=[saving], enable_checkpointing=True, **options)


def load_site_states(tmp: Path, name: str) -> list[dict[str, Any]]:
    """Return what a site keeps of the only run, the newest last."""
    (path,) = (tmp / "sites" / name).rglob("state.pt")
    return list(torch.load(path, weights_only=True).values())


def assert_same_runs(remote: FederatedLoop, local: FederatedLoop):
    """Assert that the model, the clients' scores and their contributions are the same to the bit."""
    assert_same_bits(remote.state.model(), local.state.model())

    assert remote.client_scores.keys() == local.client_scores.keys()
    for name, scores in remote.client_scores.items():
        expected_scores = local.client_scores[name]
        if name in SCORES_OF_CLASSES:
            # Sites withhold, as NaN, the scores of a class of which they have fewer than five samples.
            expected_scores = expected_scores.where(scores.isfinite(), torch.nan)
        assert_same_bits(scores, expected_scores)

    assert remote.contributions.keys() == local.contributions.keys()
    contributions = remote.contribution_metrics.contributions
    for name, expected in local.contribution_metrics.contributions.items():
        assert_same_bits(contributions[name], expected)


def assert_same_bits(values: torch.Tensor, expected: torch.Tensor):
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def assert_template_equals_one_process(project: Path, runs: Path, folder: Path):
    """The run of the template's ``project``, three rounds in the folder ``runs``, is that of one process."""
    code = run_path(str(project))
    loop = code["make_loop"]()
    module = code["make_module"]()
    data = FederatedDataModule(
        "digits",
        GroupPartitioner(),
        groups=[sample % 3 for sample in range(NUM_DIGITS)],
        batch_size=16,
        splits=Splits(server_val=0.0),
    )
    trainer_for(loop, folder, rounds=3).fit(module, data)

    path = runs / "checkpoints" / "last.ckpt"
    deployed_state = torch.load(path, weights_only=False)["state_dict"]
    for name, value in module.state_dict().items():
        assert_same_bits(deployed_state[name], value)

    rows = read_run(runs).query("metric == 'cssv' and round == 2")
    classes = [str(number) for number in range(10)]
    table = rows.pivot(index="client", columns="class", values="value")
    values = torch.tensor(table[classes].to_numpy())
    expected = loop.values["cssv"].by_class
    assert_same_bits(values, expected.double())


BIN = Path(sys.executable).parent
PAGES = Path(__file__).parents[2] / "docs"


def first_commands(page: str) -> str:
    """The first commands of a guide, but for those that install what is installed here."""
    text = (PAGES / page).read_text()
    (block,) = re.findall(r"## Try it on one machine\n.*?```bash\n(.*?)```", text, flags=re.DOTALL)
    installation, commands = block.split("flsv init", 1)
    assert len(installation.splitlines()) == 2  # and nothing else is left out
    return f"flsv init{commands}"


#: A busy machine of two cores takes twenty times as long as an idle one.
SECONDS = 900
#: What a SuperNode says when its SuperLink has let it in.
ACCEPTED = "SuperNode ID:"


def run_script(folder: Path, commands: str, at_end: str, **variables: str):
    """Run commands until one fails, and in any case ``at_end``. Whatever they have started ends with them."""
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        ["bash", "-c", f"set -e; trap '{at_end}' EXIT\n{commands}"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, stdout + stderr
    return stdout, stderr


class Deployment:
    """Everything that runs but the server's rounds, in a project of ``flsv init --flower``."""

    def __init__(self, folder: Path, policy: str):
        self.folder = folder
        self._policy = policy
        port, *ports = free_ports(1 + len(NAMES))
        self._ports = dict(zip(NAMES, ports))
        self.env = {
            **os.environ,
            "FLWR_HOME": str(folder / ".flwr"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "SUPERLINK": f"127.0.0.1:{port}",
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def begin(self):
        sites = list(self._ports)
        self._do("sh", "keys.sh", *sites)
        (self.folder / "flsv-site.toml").write_text(self._policy)
        self.start_link()
        self._do(sys.executable, "deploy/run.py", "register")

        for site in sites:
            self.start_site(site)

    def start_link(self):
        self._start("link", "sh", "deploy/superlink.sh")
        self.wait_for("link", lambda log: "Uvicorn running" in log)

    def start_site(self, site: str, until_accepted=False):
        """Start a SuperNode; again and again, as a supervisor does it, where the SuperLink thinks that it is there."""
        command = ["sh", "deploy/supernode.sh"]
        if until_accepted:
            command = ["sh", "-c", 'until "$@"; do sleep 2; done', "sh", *command]
        self._start(site, *command, SITE=site, PORT=str(self._ports[site]))

    def supervise(self, name: str):
        """Let ``run.py`` start the server's rounds, and start them again until they are done. ``name``.log has what
        they print."""
        self._start(
            name, sys.executable, "deploy/run.py", STATUS=str(self.folder / "runs" / "status.json")
        )

    def kill(self, name: str):
        """SIGKILL, to a process started here and to all that it started."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    def wait_for(self, name: str, is_shown: Callable[[str], bool]):
        """Until a log shows it."""
        log = self.folder / f"{name}.log"
        deadline = time.monotonic() + SECONDS
        while not is_shown(log.read_text()):
            assert time.monotonic() < deadline, log.read_text()
            has_ended = self.processes[name].poll() is not None
            assert not has_ended or is_shown(log.read_text()), log.read_text()
            time.sleep(0.2)

    def end(self):
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def _do(self, *command: str):
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _start(self, name: str, *command: str, **variables: str):
        log = (self.folder / f"{name}.log").open("w")
        self.processes[name] = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.env, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def start_deployment(folder: Path, policy: str) -> Iterator[Deployment]:
    """One that ends all its processes."""
    deployed = Deployment(folder, policy)
    try:
        deployed.begin()
        yield deployed
    finally:
        deployed.end()


def processes_of_sites(folder: Path) -> set[int]:
    """The processes that live on for sites below this folder."""
    ids = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            command = path.read_text(errors="replace")
            if "flower_resident import _live" in command and str(folder) in command:
                ids.add(int(path.parent.name))

    return ids
