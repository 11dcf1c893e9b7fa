"""What a round costs on Flower and on NVIDIA FLARE, whose server and sites are processes of this machine.

    python tools/bench_networks.py [--networks flower nvflare] [--sites 2 3 5 10] [--rounds 8] [--csv FILE]

Each federation is made by `flsv init` and run by the commands of its guide, with certificates: ShapFed with CSSV of an
MLP, scikit-learn's digits divided evenly among the sites. Run it with the Python of an environment that has both
networks (`make networks` makes .venv-networks). Beside them stands the same federation in one process.

Columns: seconds from the start of the server's run to the end of round 1, seconds a round after it, the peak memory
of the process with the server's run, and how far its weights are from those of one process. All sites share this
machine's cores, so that rounds of many sites take longer than on machines of their own.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
HEADER = (
    "network",
    "sites",
    "seconds to the end of round 1",
    "seconds a round",
    "server, GB",
    "weights off by",
)
#: A federation takes longer only if something hangs.
LIMIT_S = 900

FLOWER = """
sh keys.sh $SITES
sh deploy/superlink.sh &> superlink.log &
python deploy/run.py register
port=9101
for site in $SITES; do
  SITE=$site PORT=$port sh deploy/supernode.sh &> $site.log &
  port=$((port + 1))
done
python deploy/run.py
"""
NVFLARE = """
export NVFLARE_POC_WORKSPACE=$PWD/poc
trap 'nvflare poc stop' EXIT
nvflare poc prepare -c $SITES
workspaces=poc/example_project/prod_00
for site in $SITES; do
  cp flsv-site.toml $workspaces/$site/local/
done
nvflare poc start --no-wait
STATUS=$PWD/$workspaces/server/runs/status.json sh run.sh $SITES
"""
ONE_PROCESS = """
import sys
import federation
from lightning import Trainer
from flsv import FederatedDataModule
from flsv.data import GroupPartitioner, Splits

num_sites = len(federation.SITES)
groups = [sample % num_sites for sample in range(1437)]
data = FederatedDataModule(
    "digits", GroupPartitioner(), groups=groups, batch_size=16, splits=Splits(server_val=0.0)
)
trainer = Trainer(
    max_epochs=int(sys.argv[1]),
    callbacks=[federation.make_loop()],
    accelerator="cpu",
    default_root_dir="runs",
)
trainer.fit(federation.make_module(), data)
trainer.save_checkpoint("runs/last.ckpt")
"""


@dataclass(frozen=True)
class Network:
    """A network's template and commands."""

    # The option of `flsv init`.
    template: str
    script: str
    # The file with the parts that server and sites share.
    federation: str
    # The run's folder.
    runs: str
    # Part of the command line of the process with the server's run.
    server: str


#: What networks are compared with.
ONE = "one process"
NETWORKS = {
    ONE: Network(
        template="--nvflare",
        script="cd job/app/custom; python one_process.py $ROUNDS",
        federation="job/app/custom/federation.py",
        runs="job/app/custom/runs",
        server="one_process.py",
    ),
    "flower": Network(
        template="--flower",
        script=FLOWER,
        federation="fedapp/federation.py",
        runs="runs",
        server="flwr-serverapp",
    ),
    "nvflare": Network(
        template="--nvflare",
        script=NVFLARE,
        federation="job/app/custom/federation.py",
        runs="poc/example_project/prod_00/server/runs",
        server="server.runner_process",
    ),
}


class PeakMemory(threading.Thread):
    """The peak memory of processes whose command line has a text, seen once a second."""

    def __init__(self, text: str) -> None:
        super().__init__(daemon=True)
        self._text = text
        self._is_over = threading.Event()
        self.gigabytes = 0.0

    def run(self) -> None:
        while not self._is_over.wait(1):
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    self._look_at(folder)

    def _look_at(self, folder: Path) -> None:
        command_line = (folder / "cmdline").read_bytes().decode(errors="replace")
        if self._text not in command_line:
            return
        for line in (folder / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                kilobytes = int(line.split()[1])
                self.gigabytes = max(self.gigabytes, kilobytes / 1e6)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def change_text(path: Path, changes: Mapping[str, str]) -> None:
    """Replace texts in a file, each of which it must have."""
    text = path.read_text()
    for old_text, new_text in changes.items():
        if old_text not in text:
            raise SystemExit(f"{path} has no {old_text!r} any more")
        text = text.replace(old_text, new_text)
    path.write_text(text)


def make_federation(network: Network, folder: Path, sites: Sequence[str], rounds: int) -> None:
    """Make a federation of these sites from the network's template."""
    command = [BIN / "flsv", "init", network.template, folder]
    subprocess.run(command, check=True, capture_output=True)
    federation_path = folder / network.federation
    changes = {
        'SITES = ["Boston", "Lyon", "Osaka"]': f"SITES = {list(sites)}",
        "range(self.part, 1437, 3)": "range(self.part, 1437, len(SITES))",
        "ROUNDS = 3": f"ROUNDS = {rounds}",
    }
    change_text(federation_path, changes)
    (federation_path.parent / "one_process.py").write_text(ONE_PROCESS)


def run_script(network: Network, folder: Path, sites: Sequence[str], rounds: int) -> None:
    """Run a federation to its end, and end all that it has started."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SITES": " ".join(sites),
        "ROUNDS": str(rounds),
    }
    log_path = folder / "log.txt"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            ["bash", "-ec", network.script],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if status != 0:
        raise SystemExit(f"{folder.name} ended with status {status}:\n{log_path.read_text()}")


def round_times(folder: Path) -> list[float]:
    """The times at which TensorBoard got the values of each round."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    times: dict[int, float] = {}
    for path in folder.rglob("events.out.tfevents*"):
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                times[event.step] = max(event.wall_time, times.get(event.step, 0.0))
    return [times[step] for step in sorted(times)]


def trained_weights(folder: Path) -> dict[str, Any]:
    """The weights of a run's last checkpoint."""
    import torch

    (path,) = folder.rglob("last.ckpt")
    weights: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
    return weights


def distance(weights: Mapping[str, Any], other_weights: Mapping[str, Any]) -> float:
    """The largest difference of two entries."""
    differences = []
    for name, tensor in weights.items():
        difference = tensor - other_weights[name]
        differences.append(float(difference.abs().max()))
    return max(differences)


@dataclass(frozen=True)
class Measurement:
    """What a federation has cost, and its weights."""

    seconds_to_first: float
    seconds_of_round: float
    gigabytes: float
    weights: Mapping[str, Any]


def measured(name: str, num_sites: int, rounds: int) -> Measurement:
    """Run a federation."""
    network = NETWORKS[name]
    sites = [f"site-{number}" for number in range(1, num_sites + 1)]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, name.replace(" ", "-"))
        make_federation(network, folder, sites, rounds)
        memory = PeakMemory(network.server)
        memory.start()
        run_script(network, folder, sites, rounds)
        memory.stop()

        times = round_times(folder / network.runs)
        event_files = (folder / network.runs).rglob("events.out.tfevents*")
        start_time = min(float(path.name.split(".")[3]) for path in event_files)
        weights = trained_weights(folder / network.runs)
    return Measurement(
        seconds_to_first=times[0] - start_time,
        seconds_of_round=(times[-1] - times[0]) / (len(times) - 1),
        gigabytes=memory.gigabytes,
        weights=weights,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    networks = [name for name in NETWORKS if name != ONE]
    parser.add_argument("--networks", nargs="+", default=networks, choices=networks)
    parser.add_argument("--sites", nargs="+", type=int, default=[2, 3, 5, 10])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()

    rows = []
    print(*HEADER, sep=",")
    for num_sites in options.sites:
        one_process = measured(ONE, num_sites, options.rounds)
        measurements = {ONE: one_process}
        for name in options.networks:
            measurements[name] = measured(name, num_sites, options.rounds)
        for name, measurement in measurements.items():
            row = [
                name,
                str(num_sites),
                f"{measurement.seconds_to_first:.1f}",
                f"{measurement.seconds_of_round:.2f}",
                f"{measurement.gigabytes:.2f}",
                f"{distance(measurement.weights, one_process.weights):.1e}",
            ]
            print(*row, sep=",", flush=True)
            rows.append(row)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
