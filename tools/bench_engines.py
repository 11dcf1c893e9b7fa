"""One federation by every engine: are the numbers the same, and what do a round and a process cost?

    python tools/bench_engines.py [--case softmax mlp lenet resnet18] [--rounds 5] [--repeats 3]
                                  [--engines plain sequential vmap ranks]
    python tools/bench_engines.py --trouble [--sites 10] [--rounds 10]

Engines run turn by turn in processes of their own with one torch thread. ``plain`` is the leanest PyTorch loop, which
gathers each shuffled batch; ``ranks`` are two processes. Prints the least seconds of a round, by the clock and of the
busiest processor, with ratios, the largest memory, and how far weights and class-specific Shapley values are from the
sequential ones. ``--trouble`` runs Flower's SuperLink and SuperNodes with TLS and authentication on this machine. site1
is late once, site2 and site3 are killed and come back, and the last site is killed and does not: which sites each round
had, and how far weights and values are from those of one process with the same cohorts. What rounds cost on Flower and
NVFlare is measured by ``bench_networks.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from studies.common import RoundTimer, be_quiet, grid, plain_rounds, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.data import GroupPartitioner, Splits
from flsv.engines.vmap import VmapProcess
from flsv.metrics import ClassSpecificShapley
from flsv.models import LeNet5
from flsv.sampling import UniformSampler

BATCH = 32
#: Clients, images of each, their shape.
CASES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "softmax": (100, 600, (1, 28, 28)),
    "mlp": (50, 600, (1, 28, 28)),
    "lenet": (10, 600, (1, 28, 28)),
    "resnet18": (4, 64, (3, 32, 32)),
}
ENGINES = ("plain", "sequential", "vmap", "ranks")


def images(case: str) -> tuple[Tensor, Tensor]:
    """x ``[clients * images, *shape]`` and y, client after client."""
    clients, size, shape = CASES[case]
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(10, (clients * size,), generator=draw)
    centers = torch.randn(10, *shape, generator=draw)
    return centers[y] + torch.randn(len(y), *shape, generator=draw), y


def network(case: str) -> nn.Module:
    """Of 10 classes, always the same weights."""
    torch.manual_seed(0)
    if case == "lenet":
        return LeNet5(num_classes=10, input_shape=(1, 28, 28), channels=(10, 20), hidden=(50,))
    if case == "resnet18":
        from torchvision.models import resnet18

        return resnet18(num_classes=10)
    hidden = [nn.Linear(784, 64), nn.ReLU()] if case == "mlp" else []
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64 if hidden else 784, 10))


def run(engine: str, case: str, rounds: int, out: Path) -> None:
    """One federation, in this process (or these, of ranks)."""
    be_quiet()
    clients, size, _ = CASES[case]
    found: dict[str, Any] = {}
    if engine == "plain":
        own = torch.arange(clients * size).split(size)
        found["rounds"] = plain_rounds(network(case), *images(case), own, rounds, 0.05, BATCH)
    else:
        sgd = partial(torch.optim.SGD, lr=0.05)
        module = ClassifierClient(
            network(case), num_classes=10, input_shape=CASES[case][2], optimizer=sgd
        )
        data = FederatedDataModule(
            TensorDataset(*images(case)),
            GroupPartitioner(),
            groups=[i // size for i in range(clients * size)],
            batch_size=BATCH,
            splits=Splits(server_val=0.0),
        )
        loop = FederatedLoop(
            ShapFedWA("cssv"),
            metrics={"cssv": ClassSpecificShapley()},
            seed=0,
            reporting=Reporting(table=False),
            engine=partial(VmapProcess, chunk=clients) if engine == "vmap" else "sequential",
        )
        timer, ranks = (
            RoundTimer(),
            {"strategy": "federated", "devices": 2} if engine == "ranks" else {},
        )
        quiet_trainer(str(out.parent), rounds, [loop, timer], **ranks).fit(module, data)
        found |= {"rounds": list(zip(timer.wall, timer.processor))}
        found |= {
            "vector": loop.state.model(),
            "cssv": loop.contribution_metrics.contributions["cssv"],
        }
    if os.environ.get("LOCAL_RANK", "0") == "0":
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        torch.save({**found, "memory": memory}, out)


def compared(case: str, engines: list[str], rounds: int, repeats: int) -> str:
    """A case's table."""
    least: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
    last: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for engine in engines:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.pt"
                command = [
                    sys.executable,
                    __file__,
                    "--rounds",
                    str(rounds),
                    "--one",
                    engine,
                    case,
                    str(out),
                ]
                subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                last[engine] = torch.load(out, weights_only=True)
            least[engine] += last[engine]["rounds"][1:]  # the first round warms up
    seconds = {engine: [min(column) for column in zip(*each)] for engine, each in least.items()}
    rows = [
        [
            "engine",
            "s a round",
            "CPU s",
            "to plain",
            "to sequential",
            "CPU to plain",
            "memory",
            "weights",
            "CSSV",
        ]
    ]
    for engine in engines:
        wall, processor = seconds[engine]
        row = [engine, f"{wall:.3f}", f"{processor:.3f}"]
        row += [
            f"{wall / seconds[base][0]:.2f}" if base in seconds else "-" for base in ENGINES[:2]
        ]
        row.append(f"{processor / seconds['plain'][1]:.2f}" if "plain" in seconds else "-")
        row.append(f"{last[engine]['memory']:.2f} GiB")
        for key in ("vector", "cssv"):
            known = key in last[engine] and key in last.get("sequential", {})
            apart = (
                (last[engine][key] - last["sequential"][key]).abs().max().item() if known else 0.0
            )
            row.append(f"{apart:.1e}" if known else "-")
        rows.append(row)
    clients, size, _ = CASES[case]
    return f"{case}, {clients} clients x {size} images, {rounds} rounds, {repeats} turns:\n\n{grid(rows)}\n"


# ---- Flower


#: What the project's file is given: site1 is late in round 2, and the last rounds wait for those that come back.
TROUBLE = """
import os, time
from pathlib import Path
from flsv.engines.flower import from_record
from flwr.clientapp import ClientApp
os.chdir({folder!r})

def late(message, context, call_next):
    packet = from_record(message.content)
    if packet.kind == "train" and (context.node_config["site"], packet.plain.get("round")) == ("site1", 1):
        time.sleep({timeout} + 60)
    return call_next(message, context)

class Diary(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        until = time.monotonic() + 400
        while trainer.current_epoch == {rounds} - 3 and not Path("back").exists() and time.monotonic() < until:
            time.sleep(0.2)

    def on_train_epoch_end(self, trainer, pl_module):
        Path("diary.txt").write_text(str(trainer.current_epoch))

right = client_app(make_module, SiteData, make_loop)
client = ClientApp(mods=[late])
for register in (client.train(), client.query(), client.evaluate()):
    register(lambda message, context: right(message, context))
server = server_app(make_module, make_loop, SITES, rounds={rounds}, num_classes=10, folder={folder!r} + "/runs",
                    timeout={timeout}, trainer={{"callbacks": [Diary()]}})
"""


class Recorded(UniformSampler):
    """The cohorts that a run has had."""

    def __init__(self, cohorts: list[list[int]]) -> None:
        super().__init__(len(cohorts[0]))
        self.cohorts = cohorts

    def sample(
        self, num_clients: int, contributions: Any, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return torch.tensor(self.cohorts[round_index])


def trouble(rounds: int, sites: int, timeout: float = 60.0) -> str:
    """Sites that are late, killed, and back: the run beside one process."""
    import pandas

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from flsv.cli import main as flsv
    from helpers.sites import ACCEPTED, SECONDS, start_deployment

    names = [f"site{i}" for i in range(sites)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "app"
        flsv(["init", "--flower", str(folder)])
        project, book = folder / "fedapp/federation.py", folder / "diary.txt"
        written = re.sub(
            r"^SITES = .*$", f"SITES = {names}", project.read_text(), flags=re.MULTILINE
        )
        written = written.replace("1437, 3)", f"1437, {sites})").split("client = client_app")[0]
        project.write_text(
            written + TROUBLE.format(folder=str(folder), rounds=rounds, timeout=timeout)
        )
        with start_deployment(folder, "questions = []\n", names) as processes:
            processes.supervise("rounds")

            def after(index: int) -> None:
                processes.wait_for(
                    "rounds",
                    lambda _: book.is_file() and int(book.read_text() or -1) >= index,
                    2 * SECONDS,
                )

            after(2)
            for name in ("site2", "site3", names[-1]):
                processes.kill(name)
            after(4)
            for name in ("site2", "site3"):
                processes.start_site(name, until_accepted=True)
            for name in ("site2", "site3"):
                processes.wait_for(name, lambda log: ACCEPTED in log, SECONDS)
            (folder / "back").touch()
            processes.wait_for("rounds", lambda log: "the run has finished" in log, 2 * SECONDS)
        rows = pandas.read_csv(folder / "runs/contributions.csv")
        weighed = rows[rows.metric == "weight"].groupby("round").client.unique()
        cohorts = [sorted(map(int, weighed[index])) for index in range(rounds)]
        deployed = torch.load(folder / "runs/checkpoints/last.ckpt", weights_only=False)[
            "state_dict"
        ]
        sys.path.insert(0, str(folder))
        from fedapp.federation import make_loop, make_module  # type: ignore[import-not-found]

        loop, module = make_loop().replace(sampler=Recorded(cohorts)), make_module()
        groups = [i % sites for i in range(1437)]
        data = FederatedDataModule(
            "digits",
            GroupPartitioner(),
            groups=groups,
            batch_size=16,
            splits=Splits(server_val=0.0),
        )
        be_quiet()
        quiet_trainer(place, rounds, [loop]).fit(module, data)
        apart = max(
            (deployed[name] - value).abs().max().item()
            for name, value in module.state_dict().items()
        )
        last = rows[(rows["round"] == rounds - 1) & (rows.metric == "cssv") & rows["class"].notna()]
        mine = loop.contributions["cssv"].by_class
        values = max(
            abs(row.value - mine[int(row.client), int(row["class"])].item())
            for _, row in last.iterrows()
        )
    had = [
        ", ".join(names[client] for client in range(sites) if client not in cohort)
        for cohort in cohorts
    ]
    lines = grid(
        [
            ["round", "sites without an answer"],
            *([str(i + 1), each or "-"] for i, each in enumerate(had)),
        ]
    )
    return f"{lines}\n\nlargest difference from one process: weights {apart:.1e}, CSSV {values:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cases = list(CASES)
    engines = list(ENGINES)
    add("--case", nargs="+", choices=cases, default=cases)
    add("--engines", nargs="+", choices=engines, default=engines)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--trouble", action="store_true", help="SuperNodes that are late, killed, and back"
    )
    parser.add_argument("--sites", type=int, default=10, help="SuperNodes")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, engine, path = options.one
        run(case, engine, options.rounds, Path(path))
    elif options.trouble:
        print(trouble(options.rounds, options.sites))
    else:
        for case in options.case:
            table = compared(case, options.engines, options.rounds, options.repeats)
            print(table, flush=True)


if __name__ == "__main__":
    main()
