"""A server whose sites are another process, and what of them is in its memory when it averages.

``python sites_process.py FOLDER SECURE GROUPED`` prints how many of the sites' numbers it has found. ``GROUPED``: six
sites, which also train the models of two groups; in the first round each site's part of these is its own model.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import sys
import warnings
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
from remote_federation import Remotely, ServerData, shapfed, site  # noqa: E402
from remote_sites import NAMES, module  # noqa: E402

from flsv import FederatedLoop  # noqa: E402
from flsv.aggregation import FedAvg  # noqa: E402
from flsv.engines.remote import Packet  # noqa: E402
from flsv.metrics import ShadowShapley  # noqa: E402

SIX = [*NAMES, "Quito", "Perth", "Turin"]


def loop(grouped: bool) -> FederatedLoop:
    shadow = ShadowShapley(coalitions="all", groups=[[0, 1, 2], [3, 4, 5]])
    return shapfed(aggregator=FedAvg(), metrics={"shadow": shadow} if grouped else {})


def plainly(packet: Packet) -> Any:
    return packet.kind, dict(packet.plain), {name: tensor.numpy() for name, tensor in packet.tensors.items()}


def answering(pipe: Connection, folder: Path, secure: bool, grouped: bool) -> None:
    """The process of the sites."""
    names, make = SIX if grouped else NAMES, partial(loop, grouped)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sites = {100 + i: site(folder, i, make, secure=secure, names=names) for i in range(len(names))}
    while (asked := pipe.recv()) is not None:
        address, (kind, plain, tensors) = asked
        packet = Packet(kind, plain, {name: torch.from_numpy(array) for name, array in tensors.items()})
        pipe.send(plainly(sites[address].answer(packet)))


class Elsewhere:
    """In the place of a site: sends what it is asked to the other process."""

    def __init__(self, pipe: Connection, address: int) -> None:
        self._pipe, self._address = pipe, address

    def answer(self, packet: Packet) -> Packet:
        self._pipe.send((self._address, plainly(packet)))
        kind, plain, tensors = self._pipe.recv()
        return Packet(kind, plain, {name: torch.from_numpy(array) for name, array in tensors.items()})


def dump(path: Path) -> None:
    """All memory that this process can write to."""
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", 0) as memory, path.open("wb") as out:
        for line in maps.read().splitlines():
            where, rights, *_ = line.split()
            if not rights.startswith("rw") or line.endswith(("[vvar]", "[vsyscall]")):
                continue
            begin, end = (int(place, 16) for place in where.split("-"))
            memory.seek(begin)
            try:
                out.write(memory.read(end - begin))
            except OSError:
                continue


def times(needles: list[bytes], path: Path) -> int:
    """How many of these are in a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return sum(data.find(needle) >= 0 for needle in needles)


def pieces(vector: torch.Tensor, step: torch.Tensor) -> list[bytes]:
    """Sixteen numbers each, from a few places that training has changed: elsewhere they are the start point's."""
    rows, moved = (each[: len(each) // 16 * 16].reshape(-1, 16) for each in (vector, step))
    rows = rows[(moved != 0).all(1)]
    return [row.numpy().tobytes() for row in rows[:: max(1, len(rows) // 2)]]


def main(folder: Path, secure: bool, grouped: bool) -> None:
    names, make = SIX if grouped else NAMES, partial(loop, grouped)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=answering, args=(there, folder / "there", secure, grouped), daemon=True)
    process.start()
    remote = Remotely.__new__(Remotely)
    remote.tmp, remote.make, remote.make_module, remote.secure, remote.names = folder, make, module, secure, names
    remote.connect({100 + i: Elsewhere(here, 100 + i) for i in range(len(names))})
    aggregate, core = FedAvg.aggregate, folder / "memory"

    def dumping(self: Any, round: Any, contributions: Any) -> Any:
        found = aggregate(self, round, contributions)
        dump(core)
        return found

    FedAvg.aggregate = dumping  # type: ignore[method-assign]
    average = remote.fit(1, own=ServerData() if grouped else None).state.model()
    here.send(None)
    process.join(20)
    paths = [next((folder / "there" / "sites" / name).rglob("state.pt")) for name in names]
    kept = [next(iter(torch.load(path, weights_only=True).values())) for path in paths]
    moved = [each["trained"] - each["start"] for each in kept]
    models = [piece for each, step in zip(kept, moved) for piece in pieces(each["trained"], step)]
    steps = [piece for step in moved for piece in pieces(step, step)]
    found = {"average": pieces(average, moved[0]), "models": models, "steps": steps}
    print(json.dumps({name: times(needles, core) for name, needles in found.items()}))
    core.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1")
