"""What is measured for tables that are of no paper: what an update shows of its data (figure 11 of pFedSV), and what
noise for privacy leaves of contributions."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from cells import Cell, Measured, built, federated_loop
from scipy.stats import spearmanr
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.utilities.seeding import generator_for

# ---- what an update shows of its data

LEARNING_RATE = 0.1
CLIP = 0.3  # below the updates' norms, 0.36 and more on 8x8 digits, 2 and more on MNIST
SMOOTHING = (0.001, 0.01, 0.1)


def inversion(cell: Cell, root: str) -> Measured:
    """How like an attacker's image is to the digit on which a client took one step of SGD; the seed is the digit.

    Zhu, Liu and Han, "Deep Leakage from Gradients" (DLG), NeurIPS 2019: search for the image whose gradient is the one
    observed. The label is read off the gradient (iDLG, arXiv 2001.02610), gradients are compared by their angle, and
    images preferred that are smooth (Geiping et al., NeurIPS 2020, equation 4). Where there is noise, the best of
    several amounts of smoothing is taken, which an attacker could only guess.
    """
    image, label = digit(cell.seed, cell.column, root)
    net, noise = dlg_network(image.shape[-1], seed=cell.seed), cell.overrides["noise"]
    update = one_step(net, image, label)
    if noise is not None:
        update = GaussianPrivacy(CLIP, noise).protect(update, generator_for(cell.seed, "noise"))
    attempts = [invert(net, -update, image.shape, amount) for amount in (SMOOTHING if noise else (0.0,))]
    best, guess = max(attempts, key=lambda each: likeness(each[0].clamp(0, 1), image))
    error = float((best.clamp(0, 1) - image).square().mean())
    found = {"squared error": error, "PSNR (dB)": -10 * math.log10(error), "label found": guess == int(label)}
    epsilon = math.inf if not noise else gaussian_epsilon(noise, 1)
    return {**found, "correlation": likeness(best.clamp(0, 1), image), "epsilon of one release": epsilon}


def digit(which: int, source: str, root: str) -> tuple[Tensor, Tensor]:
    """The first image ``[1, H, W]`` in [0, 1] of a class, and its label."""
    if source == "digits":
        from sklearn.datasets import load_digits

        data = load_digits()
        images, labels = torch.tensor(data.images).float() / 16, torch.tensor(data.target)
    else:
        from torchvision.datasets import MNIST

        mnist = MNIST(root, train=False)
        images, labels = mnist.data.float() / 255, mnist.targets
    first = int((labels == which).nonzero()[0])
    return images[first][None], labels[first]


def dlg_network(size: int, seed: int) -> nn.Sequential:
    """DLG's LeNet: three 5x5 convolutions of 12 channels with sigmoids, and a classifier."""
    width = math.ceil(math.ceil(size / 2) / 2)
    layers = [nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, stride=2, padding=2)]
    layers += [nn.Sigmoid(), nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * width**2, 10))
    generator = generator_for(seed, "network")
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return net


def one_step(net: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    """A client's update ``[P]`` after one step of SGD on one image."""
    loss = nn.functional.cross_entropy(net(image[None]), label[None])
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    names = [name for name, _ in net.named_parameters()]
    return -LEARNING_RATE * ParameterSpace(net).flatten(dict(zip(names, gradients)))


def invert(net: nn.Module, gradient: Tensor, shape: Sequence[int], smoothness: float = 0.0) -> tuple[Tensor, int]:
    """The one image ``[C, H, W]`` behind a gradient ``[P]`` times any positive number, and its label."""
    head = ParameterSpace(net).head
    assert head is not None
    observed = gradient.double()
    # Of one image's logits only the true class's has a negative gradient; a row is that times positive features.
    label = int(head.rows(gradient).sum(-1).argmin())
    network = copy.deepcopy(net).double().eval()
    parameters = list(network.parameters())
    image = observed.new_zeros(1, *shape).requires_grad_()

    def objective() -> float:
        image.grad = None
        loss = nn.functional.cross_entropy(network(image), torch.tensor([label]))
        mine = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
        value = 1 - torch.dot(mine, observed) / (mine.norm() * observed.norm())
        if smoothness:  # times the mean total variation
            value = value + smoothness * (image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean())
        value.backward(inputs=[image])
        return value.item()

    search = {"max_iter": 150, "max_eval": 300, "history_size": 50, "line_search_fn": "strong_wolfe"}
    torch.optim.LBFGS([image], tolerance_grad=1e-12, tolerance_change=1e-14, **search).step(objective)
    return image.detach()[0].to(gradient.dtype), label


def likeness(found: Tensor, image: Tensor) -> float:
    """Pearson's correlation over the pixels, 0 for an empty image."""
    return torch.corrcoef(torch.stack([found.flatten(), image.flatten()]))[0, 1].nan_to_num().item()


# ---- what noise for privacy leaves of contributions

FREE = "no privacy"
NAMES = {"cssv": "CSSV", "cgsv": "CGSV", "ssv": "SSV", "fedsv": "FedSV"}


def watched(cell: Cell, root: str) -> Measured:
    """Every metric's values and the clients' samples, ``n`` numbers each; the global model's accuracy on the server's
    validation set, in %."""
    with built(cell, root) as cli:
        cli.trainer.fit(cli.model, cli.datamodule)
        loop = federated_loop(cli.trainer)
        module = cli.model.eval()
        with torch.no_grad():
            hits = torch.cat([module(x).argmax(1) == y for x, y in cli.datamodule.val_dataloader()])
    known = loop.contribution_metrics.contributions
    values = {name: loop.metrics[name].per_client(known[name]).tolist() for name in NAMES}  # type: ignore[operator]
    samples = cli.datamodule.num_samples.tolist()
    return {"values": values, "samples": samples, "accuracy": 100 * hits.float().mean().item()}


def rank_likeness(values: Tensor, others: Tensor) -> float:
    """Spearman's correlation; 0 where one side does not tell the clients apart, or not all are finite."""
    if not bool((values.isfinite() & others.isfinite()).all()) or min(len(values.unique()), len(others.unique())) < 2:
        return 0.0
    return float(spearmanr(values.double().numpy(), others.double().numpy()).statistic)


def alike(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> dict[str, dict[str, float]]:
    """By row and metric: the correlation with the values without noise; of the run without, of the samples' numbers."""
    if FREE not in beside:
        return {}
    name, free = ("numbers of samples, no values" if row == FREE else row), beside[FREE]["values"]
    own = dict.fromkeys(free, run["samples"]) if row == FREE else run["values"]
    return {name: {NAMES[m]: rank_likeness(torch.tensor(own[m]), torch.tensor(free[m])) for m in NAMES}}


def epsilon(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> float | None:
    """Of one client after ten rounds, delta = 1e-5."""
    sigma = row.removeprefix("sigma = ")
    return gaussian_epsilon(float(sigma), 10) if sigma not in (row, "0") else None
