"""What FedBary's protocol gives away: a client's samples, worked out from what crosses, by the number of points S.

    python tools/fedbary_reconstruction.py [--root DATA] [--out FILE.md]

The attacker is a server that keeps to the protocol and remembers: it has sent gamma ``[S, d]`` and received the
interpolant eta ``[S, d]``. Each row of eta is (1 - t) times a mean of the client's samples plus t times a row of gamma,
so that the server takes its own part off again and holds the mean. Of how many samples it is, S decides: one where S is
at least the client's m, m/S where it is less. Three numbers for each S and number of iterations K:

- samples found to 1e-3 in every pixel (pixels are in [0, 1]),
- samples of which a copy is found within 10 % of the image's norm,
- samples that follow from all means together by linear algebra, *if* the server knew which samples each is made of.
  This attacker does not; it is what a cleverer one, or one with a second source, could get.

Data are embedded as ``flsv value`` does by default: pixels, with the labels' term. scikit-learn's digits, and Fashion-
MNIST where its files are below --root ($FLSV_DATA_ROOT).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from common import grid
from torch import Tensor

from flsv.data import load_image_data
from flsv.functional.transport import TransportClient, TransportServer
from flsv.functional.transport.federated import matching
from flsv.seeding import generator_for
from flsv.valuation.questions import Labels, embedded

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.75, 0.9, 1.0, 1.25, 5 / 3, 2.0)
ITERATIONS = (1, 2, 10, 20)
SIZES = (60, 200)
SERVER_SAMPLES = 150
EXACT, NEAR = 1e-3, 0.1
T = 0.5

#: What the server has sent and received in one iteration, ``[S, d']`` each.
Exchange = tuple[Tensor, Tensor]


def transcript(x: Tensor, x2: Tensor, support: int, iterations: int, seed: int) -> list[Exchange]:
    """The protocol, as the server sees it."""
    client, server = TransportClient(x, t=T, allow_reconstruction=True), TransportServer(x2, t=T)
    gamma = server.start(support, generator=generator_for(seed, "gamma"))
    seen = []
    for _ in range(iterations):
        eta, distance = client.answer(gamma)
        seen.append((gamma, eta))
        gamma = server.step(eta, distance)
    return seen


def means(seen: Sequence[Exchange], samples: int) -> Tensor:
    """All that eta holds of the client, ``[S * K, d']``: the server's own part taken off."""
    found = []
    for gamma, eta in seen:
        # With S = m the rows are in the order of the samples, and the server does not know which of its points each is
        # mixed with. At first it need not: they are all one point but for 1e-4.
        mine = seen[0][0].mean(0) if len(gamma) == samples else gamma
        found.append((eta - T * mine) / (1 - T))
        if len(gamma) == samples:
            break
    return torch.cat(found)


def recovered(found: Tensor, x: Tensor) -> tuple[float, float]:
    """Shares of the samples ``x [m, d]`` found to 1e-3 in every pixel, and within 10 % of their norm."""
    pixels = found[:, : x.shape[1]].double()
    exact = torch.cdist(pixels, x.double(), p=math.inf).amin(0) < EXACT
    near = torch.cdist(pixels, x.double()).amin(0) < NEAR * x.double().norm(dim=1)
    return exact.double().mean().item(), (near | exact).double().mean().item()


def determined(seen: Sequence[Exchange], points: Tensor) -> float:
    """The share of samples that the means determine for somebody who knows what each of them is a mean of."""
    rows = []
    for gamma, _ in seen:
        plan = matching(points, gamma, 2)[0].double()
        rows.append(len(points) * plan if len(gamma) == len(points) else len(gamma) * plan.T)
    _, strength, directions = torch.linalg.svd(torch.cat(rows), full_matrices=False)
    # A sample follows from the equations if its unit vector lies in the space of their rows.
    known = directions[strength > 1e-6 * strength[0]].square().sum(0) > 1 - 1e-6
    return known.double().mean().item()


def attack(x: Tensor, y: Tensor, samples: int, support: int, seed: int) -> dict[int, tuple[float, float, float]]:
    """The three shares by number of iterations, for a client with so many of the samples ``x [N, d]``, ``y [N]``."""
    chosen = torch.randperm(len(x), generator=generator_for(seed, "samples"))
    mine, theirs = chosen[:samples], chosen[samples : samples + SERVER_SAMPLES]
    labels = Labels("diag", 1.0)
    points, others = embedded(x[mine], y[mine], labels)[0], embedded(x[theirs], y[theirs], labels)[0]
    seen = transcript(points, others, support, max(ITERATIONS), seed)
    result = {}
    for iterations in ITERATIONS:
        until = seen[:iterations]
        result[iterations] = (*recovered(means(until, samples), x[mine]), determined(until, points))
    return result


def run(source: str, root: str, sizes: Sequence[int], ratios: Sequence[float], seeds: int) -> str:
    """The table of one data set: means over the seeds, in per cent of the samples, by K."""
    data = load_image_data(source, root).train
    x, y = data.tensors  # type: ignore[attr-defined]
    x = x.flatten(1).float()
    names = ("found to 1e-3", "found within 10 %", "if it were known who is in which mean")
    rows = [["m", "S / m", "S", *names]]
    for samples in sizes:
        for ratio in ratios:
            support = max(1, round(ratio * samples))
            found = [attack(x, y, samples, support, seed) for seed in range(seeds)]
            shares = [[100 * sum(each[k][part] for each in found) / seeds for k in ITERATIONS] for part in range(3)]
            cells = ["/".join(f"{share:.0f}" for share in part) for part in shares]
            rows.append([str(samples), f"{ratio:.2f}", str(support), *cells])
    return f"## {source}\n\n{grid(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="samples of the client")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), help="S, in parts of m")
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sources = ["digits"] + ["fashion_mnist"] * Path(arguments.root, "FashionMNIST").is_dir()
    start = time.perf_counter()
    parts = [run(source, arguments.root, arguments.sizes, arguments.ratios, arguments.seeds) for source in sources]
    parts.append(
        f"Per cent of the samples after K = {' / '.join(map(str, ITERATIONS))} iterations, means of {arguments.seeds} "
        f"clients. {time.perf_counter() - start:.0f} s on one of {os.cpu_count()} CPU cores, "
        f"torch {torch.__version__}."
    )
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
