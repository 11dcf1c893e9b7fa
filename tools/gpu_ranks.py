"""One of two ranks of ``tools/gpu_report.py``: python tools/gpu_ranks.py cpu|cuda 0,0 OUT"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from gpu_checks import Place, ran, tf32

from flsv.engines.ranks import FederatedStrategy


def main(name: str, devices: str, out: Path) -> None:
    places = [torch.device("cpu") if name == "cpu" else torch.device("cuda", int(each)) for each in devices.split(",")]

    def options() -> dict[str, object]:
        strategy = FederatedStrategy(parallel_devices=places)
        ranks.append(strategy)
        return {"accelerator": name, "devices": len(places) if name == "cpu" else "auto", "strategy": strategy}

    ranks: list[FederatedStrategy] = []
    with tempfile.TemporaryDirectory() as folder, tf32(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ran(Place(name, places[0], options), "convolution", folder)
    if ranks[0].global_rank == 0:
        torch.save(found.vector, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
