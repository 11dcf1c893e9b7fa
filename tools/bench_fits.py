"""What training coalitions costs, in fits: all of them, and those of ShadowShapley.

    python tools/bench_fits.py [--clients 5 6 8] [--networks mlp lenet batch_norm fast_text] [--repeats 3]

FedAvg on scikit-learn's digits (8x8; for LeNet in 28x28; for fastText 64 words of 1 to 17), batches of 16, SGD, one
thread. In fits of all clients without metrics, the least of some repetitions: all 2^n coalitions of two seeds, one
after the other (15 rounds); and, of the MLP, ``ShadowShapley`` by its coalitions and parts (20 rounds, values in every
round). How near the values of few coalitions come: docs/results/shadow.md.

    python tools/bench_fits.py --whole --clients 3 5 7 --networks mlp lenet gru

``ShadowShapley(coalitions="all")`` of 3 rounds in its ways: as rows beside the federation, where the network can be
rows, and by fits of their own after it, which a callback around batches asks for: by forks of the fit's beginning, one
and two at once, and by copies of its objects. ``flsv.retrain(..., "all")``, with the same callback, by forks. All ways
train what proves them, too. Seconds are the processor's, of all processes; then come the elapsed seconds, and the
largest memory of all processes together, after that of the plain fit. With ``--jobs`` and no number fits are trained as
by default, so that another version can be measured: ``PYTHONPATH=OTHER python tools/bench_fits.py --whole --jobs``.

    python tools/bench_fits.py --compiled --networks softmax mlp lenet

What ``torch.compile`` makes of a step of 16 rows, and of a fit with rows if a step is kept for all visits: processor
time, launches (operators but views; compiled kernels and the operators beside them), and how far the models of 30 steps
are apart, in ways of training.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch._inductor.metrics as compiler
from studies.common import be_quiet, grid, quiet_trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting, retrain
from flsv.core.parameter_space import ParameterSpace
from flsv.data import DirichletPartitioner, Loader, SizePartitioner, Splits
from flsv.functional import exact_shapley
from flsv.games import RetrainedUtility  # its home in 1.1, which is measured, too
from flsv.metrics import ShadowShapley
from flsv.models import FastText, LeNet5
from flsv.training.rows.kernel import states_of
from flsv.training.rows.row_step import RowStep

SILENT = Reporting(table=False, figures=0, files=False)
SHADOWS: dict[str, dict[str, Any]] = {
    "shadows of singles": {"coalitions": "singles"},
    "shadows of pairs": {"coalitions": "pairs"},
    "shadows of all": {"coalitions": "all"},
    "shadows by default": {"coalitions": "auto"},
}


class Words(nn.Module):
    """A pixel's place and shade as a hashed word."""

    def forward(self, images: Tensor) -> Tensor:
        return (16 * images.flatten(1)).long() + 17 * torch.arange(64, device=images.device) + 1


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.gru(images.reshape(-1, 8, 8))[0][:, -1])


def mlp(norm: bool = False) -> nn.Module:
    layers = [nn.BatchNorm1d(64)] if norm else []
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64, bias=not norm), *layers, nn.ReLU(), nn.Linear(64, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "batch_norm": partial(mlp, True),
    "fast_text": lambda: nn.Sequential(Words(), FastText(10, (64,), buckets=64 * 17, width=16)),
    "gru": Recurrent,
    "lenet": lambda: nn.Sequential(nn.Upsample(28), LeNet5(num_classes=10, input_shape=(1, 28, 28))),
}


def game(network: str, clients: int, seed: int, folder: str) -> RetrainedUtility:
    """Of clients of one to two parts, by retraining."""
    torch.manual_seed(seed)
    sizes = SizePartitioner([1 + i / clients for i in range(clients)], seed=0)
    more: dict[str, Any] = {"splits": Splits(server_val=0.2, seed=0), "loader": Loader(drop_last=True)}
    data = FederatedDataModule("digits", sizes, batch_size=16, **more)
    module = ClassifierClient(NETWORKS[network](), optimizer=partial(torch.optim.SGD, lr=0.1))

    def trainer(cohort: Any) -> Any:
        return quiet_trainer(folder, 15, [FederatedLoop(sampler=cohort, seed=seed, reporting=SILENT)])

    return RetrainedUtility(trainer, module, data, max_clients=20)


def whole_fit(network: str, clients: int, folder: str) -> None:
    game(network, clients, 0, folder)(torch.ones(1, clients, dtype=torch.bool))


def all_coalitions(network: str, clients: int, folder: str) -> None:
    for seed in range(2):
        exact_shapley(game(network, clients, seed, folder), clients)


def shadowed(options: dict[str, Any] | None, clients: int, folder: str) -> None:
    """A fit with shadow models; None: without."""
    data = FederatedDataModule("digits", DirichletPartitioner(clients, 0.5, seed=1, min_samples=40), batch_size=16)
    module = ClassifierClient("mlp", network_args={"hidden": [64]}, optimizer=partial(torch.optim.SGD, lr=0.1))
    metrics: dict[str, Any] = {} if options is None else {"shadow": ShadowShapley(**options)}
    quiet_trainer(folder, 20, [FederatedLoop(metrics=metrics, seed=0, reporting=SILENT)]).fit(module, data)


class Looks(L.Callback):
    """Rows would not be seen by it."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def valued(network: str, clients: int, folder: str, callbacks: Sequence[L.Callback], metrics: dict[str, Any]) -> None:
    """A fit of some rounds, with and without true values."""
    trainer, module, data = federated(network, clients, folder, callbacks, metrics)
    trainer.fit(module, data)


def retrained(network: str, clients: int, folder: str, callbacks: Sequence[L.Callback], jobs: dict[str, int]) -> None:
    """The values of one seed, by retraining."""
    trainer, module, data = federated(network, clients, folder, callbacks, {})
    retrain(trainer, module, data, "all", seeds=1, **jobs)


def federated(network: str, clients: int, folder: str, callbacks: Sequence[L.Callback], metrics: dict[str, Any]) -> Any:
    """A trainer, a module and data."""
    torch.manual_seed(0)
    sizes = SizePartitioner([1 + i / clients for i in range(clients)], seed=0)
    data = FederatedDataModule("digits", sizes, batch_size=16, splits=Splits(server_val=0.2, seed=0))
    module = ClassifierClient(NETWORKS[network](), optimizer=partial(torch.optim.SGD, lr=0.1))
    loop = FederatedLoop(metrics=metrics, seed=0, reporting=SILENT)
    return quiet_trainer(folder, 3, [loop, *callbacks]), module, data


def with_jobs(jobs: int, work: Callable[[], None]) -> None:
    with patch("flsv.retraining.forked_fits.cores", lambda: jobs):
        work()


def with_copies(work: Callable[[], None]) -> None:
    with patch("flsv.retraining.kept_beginning.why_not_by_forks", lambda trainer: "copies are measured"):
        work()


def both_ways(
    networks: Sequence[str], clients: Sequence[int], repeats: int, folder: str, jobs: Sequence[int]
) -> list[list[str]]:
    rows = []
    for network in networks:
        for n in clients:
            value, looks = {"shadow": ShadowShapley(coalitions="all")}, [] if network == "gru" else [Looks()]
            by_fits = partial(valued, network, n, folder, looks, value)
            again = partial(retrained, network, n, folder, looks)
            ways = {"as rows": partial(valued, network, n, folder, [], value)} if network != "gru" else {}
            for count in jobs:
                ways[f"by {count} forks at once"] = partial(with_jobs, count, by_fits)
                ways[f"flsv.retrain, {count} at once"] = partial(again, {"jobs": count})
            if jobs:
                ways["by copies"] = partial(with_copies, by_fits)
            else:
                ways |= {"by fits": by_fits, "flsv.retrain": partial(again, {})}
            rows += row(f"{network} | {n}", partial(valued, network, n, folder, [], {}), ways, repeats)
            print(grid(rows[-len(ways) :]), flush=True)
    return rows


def memory() -> float:
    """MiB of this process and its descendants together; what they share counts once."""
    waiting, total = [os.getpid()], 0.0
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        with suppress(OSError):  # it has ended
            waiting += map(int, (process / "task" / process.name / "children").read_text().split())
            total += int((process / "smaps_rollup").read_text().split("Pss:")[1].split()[0]) / 1024
    return total


def measured(work: Callable[[], None]) -> tuple[float, float, float]:
    """The processor's seconds, the elapsed ones and the largest memory of some work, in a process of its own."""
    start, most = time.monotonic(), 0.0
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        most = max(most, memory())
        time.sleep(0.1)
    if ended[1]:
        raise SystemExit("the work has failed")
    return ended[2].ru_utime + ended[2].ru_stime, time.monotonic() - start, most


def row(name: str, plain: Callable[[], None], ways: dict[str, Callable[[], None]], repeats: int) -> list[list[str]]:
    """The least processor seconds of each way, in those of a plain fit, the least elapsed ones and memory; in turns."""
    every = {"": plain, **ways}
    least = dict.fromkeys(every, (math.inf, math.inf, math.inf))
    plain()  # what is made once
    for _ in range(repeats):
        for way, work in every.items():
            least[way] = tuple(map(min, least[way], measured(work)))
    first = least[""]
    return [
        [
            name,
            way,
            *(f"{x:.2f}" for x in (first[0], s, s / first[0])),
            f"{elapsed:.1f}",
            f"{first[2]:.0f}",
            f"{most:.0f}",
        ]
        for way, (s, elapsed, most) in least.items()
        if way
    ]


#: What compiled code calls beside its own kernels.
BESIDE = ("aten::bmm", "aten::mm", "aten::addmm", "aten::mkldnn_convolution", "aten::convolution_backward")


class Launches(TorchDispatchMode):
    """Counts the operators that compute."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "view" in func.name() or "empty" in func.name())
        return func(*args, **(kwargs or {}))


class Stepped(nn.Module):
    """A module with a training step, without a Trainer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def compiled(network: str, rows: int = 16, steps: int = 30) -> list[str]:
    """A step of rows, as it is and compiled."""
    torch.manual_seed(0)
    module = Stepped(NETWORKS[network]())
    space, own = ParameterSpace(module), dict(module.named_parameters())
    batches = [(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))) for _ in range(steps)]
    as_it_is, other = RowStep(module, own, shared=True), RowStep(module, own, shared=True)
    other.__dict__["_of_many"] = torch.compile(other._of_many)
    states = states_of(space, module, space.read(module).expand(rows, -1))
    compiler.reset()
    start = time.process_time()
    other(states, batches[0])
    took, kernels = time.process_time() - start, compiler.generated_kernel_count
    with Launches() as launched:
        as_it_is(states, batches[0])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        other(states, batches[0])
    beside = sum(event.count for event in profiled.key_averages() if event.key in BESIDE)
    found: list[tuple[float, Tensor]] = []
    for step in (as_it_is, other):
        now, seconds = {name: tensor.clone() for name, tensor in states.items()}, []
        for batch in batches:
            start = time.process_time()
            gradients, _ = step(now, batch)
            seconds.append(time.process_time() - start)
            for name, gradient in gradients.items():
                now[name] -= 0.1 * gradient
        found.append((1e3 * sorted(seconds)[steps // 2], torch.cat([now[name][0].flatten() for name in own])))
    (slow, model), (fast, again) = found
    apart = (again - model).norm() / (model - torch.cat([own[name].detach().flatten() for name in own])).norm()
    numbers = f"{took:.1f}", f"{slow:.2f}", f"{fast:.2f}", f"{launched.count}", f"{kernels} + {beside}", f"{apart:.0e}"
    return [network, *numbers]


def compiled_fit(folder: str) -> None:
    """A fit whose rows take compiled steps, kept for all visits."""
    kept: dict[Any, Any] = {}
    make = vars(RowStep)["_of_many"].func

    def of_many(self: RowStep) -> Any:
        return kept.setdefault((id(self._module), *self._trained), torch.compile(make(self)))

    with patch.object(RowStep, "_of_many", property(of_many)), patch("torch._dynamo.config.recompile_limit", 64):
        shadowed({"coalitions": "all"}, 5, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 6, 8])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["mlp", "batch_norm", "fast_text", "lenet"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="ShadowShapley in its two ways, and flsv.retrain")
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 2], help="fits that are trained at once")
    parser.add_argument("--compiled", action="store_true", help="rows by torch.compile")
    options = parser.parse_args()
    be_quiet()
    if options.compiled:
        with tempfile.TemporaryDirectory() as folder:  # by forks, so before any backward pass here
            ways = {"compiled": partial(compiled_fit, folder)}
            print(*row("mlp | 5", partial(shadowed, {"coalitions": "all"}, 5, folder), ways, 1), flush=True)
        columns = ["network", "compiled in, s", "step, ms", "compiled, ms", "launches", "compiled", "apart"]
        print(grid([columns, *(compiled(network) for network in options.networks)]))
        return
    rows = [["network", "clients", "what", "a fit, s", "s", "fits", "elapsed, s", "a fit, MiB", "MiB"]]
    with tempfile.TemporaryDirectory() as folder:
        if options.whole:
            print(grid(rows + both_ways(options.networks, options.clients, options.repeats, folder, options.jobs)))
            return
        for network in options.networks:
            for n in options.clients:
                ways = {f"2^{n} coalitions x 2 seeds": partial(all_coalitions, network, n, folder)}
                rows += row(f"{network} | {n}", partial(whole_fit, network, n, folder), ways, options.repeats)
        for n in options.clients if "mlp" in options.networks else ():
            shadows = {name: partial(shadowed, kind, n, folder) for name, kind in SHADOWS.items()}
            rows += row(f"mlp | {n}", partial(shadowed, None, n, folder), shadows, options.repeats)
    print(grid(rows))


if __name__ == "__main__":
    main()
