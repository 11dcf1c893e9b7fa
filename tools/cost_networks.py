"""Federations on Flower and NVIDIA FLARE, whose server and sites are processes of this machine.

Each is made by ``flsv init`` and run by the commands of its guide, with certificates: ShapFed with CSSV of an MLP,
scikit-learn's digits divided evenly among the sites, which share this machine's cores. The Python that runs this needs
both networks (``make networks`` makes .venv-ci).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BIN = Path(sys.executable).parent
ROUNDS = 4
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
cd job/app/custom
python - <<END
import federation
from lightning import Trainer
from flsv import FederatedDataModule
from flsv.data import GroupPartitioner, Splits

num_sites = len(federation.SITES)
groups = [sample % num_sites for sample in range(1437)]
data = FederatedDataModule(
    "digits", GroupPartitioner(), groups=groups, batch_size=16, splits=Splits(server_val=0.0)
)
loop = federation.make_loop()
trainer = Trainer(max_epochs=federation.ROUNDS, callbacks=[loop], accelerator="cpu")
trainer.fit(federation.make_module(), data)
END
"""


class Network(NamedTuple):
    """A network's template, an option of ``flsv init``, its commands, and the file that server and sites share."""

    template: str
    script: str
    federation: str


NETWORKS = {
    "one process": Network("--nvflare", ONE_PROCESS, "job/app/custom/federation.py"),
    "flower": Network("--flower", FLOWER, "fedapp/federation.py"),
    "nvflare": Network("--nvflare", NVFLARE, "job/app/custom/federation.py"),
}


def run(network: Network, num_sites: int) -> dict[str, float]:
    """Run a federation to its end in a new folder, end all that it has started, and return a round's seconds."""
    folder = Path("federation")
    subprocess.run([BIN / "flsv", "init", network.template, folder], check=True)
    sites = [f"site-{number}" for number in range(1, num_sites + 1)]
    federation = folder / network.federation
    changes = {
        'SITES = ["Boston", "Lyon", "Osaka"]': f"SITES = {sites}",
        "range(self.part, 1437, 3)": "range(self.part, 1437, len(SITES))",
        "ROUNDS = 3": f"ROUNDS = {ROUNDS}",
    }
    text = federation.read_text()
    for template_text, changed_text in changes.items():
        assert template_text in text, f"{federation} has no {template_text!r}"
        text = text.replace(template_text, changed_text)
    federation.write_text(text)

    path = f"{BIN}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-ec", network.script],
        cwd=folder,
        env={**os.environ, "PATH": path, "SITES": " ".join(sites)},
        start_new_session=True,
    )
    try:
        status = process.wait(LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, f"the commands ended with status {status}"

    times = round_times(folder)
    return {"round_s": (times[-1] - times[0]) / (len(times) - 1)}


def round_times(folder: Path) -> list[float]:
    """Return the times at which TensorBoard got the values of each round."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    times: dict[int, float] = {}
    for path in folder.rglob("events.out.tfevents*"):
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                times[event.step] = max(event.wall_time, times.get(event.step, 0.0))
    return [times[step] for step in sorted(times)]
