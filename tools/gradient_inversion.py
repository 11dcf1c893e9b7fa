"""What a client's update shows of its data, and what clipping and noise leave of that.

    python tools/gradient_inversion.py [--root DATA] [--digits 4] [--out docs/images/gradient_inversion.png]

Every client holds one digit and takes one step of SGD. The attacker sees the update and the model before it, and looks
for the digit. Without --root the digits are scikit-learn's, 8x8.

Zhu, Liu and Han, "Deep Leakage from Gradients" (DLG), NeurIPS 2019: search for the image whose gradient is the one
observed, by L-BFGS. The label is not searched for but read off the gradient: Zhao, Mopuri and Bilen, "iDLG: Improved
Deep Leakage from Gradients", arXiv 2001.02610, 2020. Gradients are compared by their angle, and images preferred that
are smooth: Geiping, Bauermeister, Dröge and Moeller, "Inverting Gradients: How easy is it to break privacy in federated
learning?", NeurIPS 2020, equation 4. Clipping, which is a change of length, therefore hides nothing from it. The search
starts from an empty image, where the papers start from noise: it finds the same image in fewer steps.

The protected updates went through :class:`flsv.privacy.GaussianPrivacy`; epsilon is that of the one release. Where
there is noise, the attack is run with several amounts of smoothing and the image that is most like the true digit is
shown, which an attacker could only guess. Network and weights are as in DLG: sigmoids,
strides instead of pooling, weights from U[-0.5, 0.5]. ReLU, pooling and more images a step are harder to invert.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from flsv.parameters import ParameterSpace
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.seeding import generator_for

LEARNING_RATE = 0.1
CLIP = 0.3  # below the updates' norms, 0.36 and more on 8x8 digits, 2 and more on MNIST
NOISE = (0.0, 0.001, 0.01, 0.1, 1.0)
SMOOTHING = (0.001, 0.01, 0.1)


def digits(count: int, root: str | None) -> tuple[Tensor, Tensor]:
    """The first image ``[1, H, W]`` in [0, 1] of each of the classes 0 to ``count`` - 1, and their labels."""
    if root is None:
        from sklearn.datasets import load_digits

        data = load_digits()
        images, labels = torch.tensor(data.images).float() / 16, torch.tensor(data.target)
    else:
        from torchvision.datasets import MNIST

        mnist = MNIST(root, train=False)
        images, labels = mnist.data.float() / 255, mnist.targets
    first = [int((labels == label).nonzero()[0]) for label in range(count)]
    return images[first].unsqueeze(1), labels[first]


def dlg_network(size: int, seed: int) -> nn.Sequential:
    """DLG's LeNet: three 5x5 convolutions of 12 channels with sigmoids, and a classifier."""
    width = math.ceil(math.ceil(size / 2) / 2)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(12 * width**2, 10),
    )
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


def reconstruct(net: nn.Module, update: Tensor, image: Tensor, smoothing: Sequence[float]) -> tuple[Tensor, int]:
    """The image in [0, 1] and label found; of several amounts of smoothing the image most like the true one."""
    found = [invert(net, -update, image.shape, amount) for amount in smoothing]
    best, label = max(found, key=lambda each: likeness(each[0].clamp(0, 1), image))
    return best.clamp(0, 1), label


def likeness(found: Tensor, image: Tensor) -> float:
    """Pearson's correlation over the pixels, 0 for an empty image."""
    return torch.corrcoef(torch.stack([found.flatten(), image.flatten()]))[0, 1].nan_to_num().item()


def run(images: Tensor, labels: Tensor) -> tuple[list[str], list[list[Tensor]]]:
    """Attack every digit at every level of protection and print the results; titles of columns, and rows of images."""
    epsilons = [gaussian_epsilon(noise, 1) for noise in NOISE]
    rows: list[list[Tensor]] = []
    guesses: list[list[bool]] = []
    for index, (image, label) in enumerate(zip(images, labels)):
        net = dlg_network(image.shape[-1], seed=index)
        update = one_step(net, image, label)
        sent = [GaussianPrivacy(CLIP, noise).protect(update, generator_for(index, "noise")) for noise in NOISE]
        found = [reconstruct(net, update, image, (0.0,))]
        found += [reconstruct(net, each, image, SMOOTHING if noise else (0.0,)) for noise, each in zip(NOISE, sent)]
        rows.append([image, *(each for each, _ in found)])
        guesses.append([guess == int(label) for _, guess in found])
    print("| update | epsilon of one release | mean squared error | PSNR (dB) | correlation | labels found |")
    print("|---|---|---|---|---|---|")
    names = ["unprotected", *(f"clipped, sigma = {noise:g}" for noise in NOISE)]
    for column, (name, epsilon) in enumerate(zip(names, [math.inf, *epsilons])):
        pairs = [(row[column + 1], row[0]) for row in rows]
        errors = torch.tensor([(found - image).square().mean() for found, image in pairs])
        alike = sum(likeness(found, image) for found, image in pairs) / len(pairs)
        right = sum(guess[column] for guess in guesses)
        psnr = (-10 * errors.log10()).mean()
        print(f"| {name} | {epsilon:.4g} | {errors.mean():.2g} | {psnr:.1f} | {alike:.2f} | {right}/{len(rows)} |")
    grey = (images - images.mean()).square().mean()
    print(f"\nEvenly grey images have a mean squared error of {grey:.2g}.")
    noisy = [
        f"$\\sigma$ = {noise:g}\n$\\epsilon$ = {epsilon:,.{0 if epsilon > 10 else 1}f}"
        for noise, epsilon in zip(NOISE[1:], epsilons[1:])
    ]
    return ["original", "unprotected", "only clipped", *noisy], rows


def draw(titles: Sequence[str], rows: Sequence[Sequence[Tensor]], path: Path) -> None:
    """A picture: a row for every digit, a column for every level of protection."""
    figure = Figure(figsize=(1.25 * len(titles), 1.25 * len(rows) + 0.5), dpi=100, layout="constrained")
    axes = figure.subplots(len(rows), len(titles), squeeze=False)
    for line, row in zip(axes, rows):
        for axis, image in zip(line, row):
            axis.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_axis_off()
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with torchvision's MNIST; default: scikit-learn's digits")
    parser.add_argument("--digits", type=int, default=4, choices=range(1, 11), help="how many digits to attack")
    parser.add_argument("--out", type=Path, default=Path("docs/images/gradient_inversion.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    draw(*run(*digits(args.digits, args.root)), args.out)
    print(f"\n{args.out}, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
