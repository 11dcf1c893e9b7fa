"""Data sets whose samples are not the same each time they are read."""

import numpy as np
import torch
from torch.utils.data import Dataset

from helpers import make_generator
from helpers.data import toy_sets
from zoo.program import Sets, make_data


class NoisySamples(Dataset):
    """Adds noise of a generator that it holds when a sample is read, as augmentations by NumPy do.

    Samples of the indices ``without_noise`` have none.
    """

    def __init__(self, without_noise=()):
        self.inputs, self.targets = toy_sets()[0].tensors
        self.generator = np.random.RandomState(0)
        self.without_noise = without_noise

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        x = self.inputs[index]
        y = int(self.targets[index])
        if index in self.without_noise:
            return x, y
        noise = self.generator.randn(len(x))
        noisy_x = x + 0.1 * torch.from_numpy(noise)
        return noisy_x.float(), y


def make_noisy_sets():
    """Samples of which those that the server validates on have no noise."""
    data = make_data()
    data.setup("fit")
    return NoisySamples(data.server_val_indices.tolist()), toy_sets()[1]


class TwoViews(Dataset):
    """Draws two views of a picture from the global generator when a sample is read, as torchvision's transforms do."""

    def __init__(self, num_samples, seed, fixed=False):
        generator = make_generator(seed)
        self.pictures = torch.randn(num_samples, 1, 8, 8, generator=generator)
        self.fixed = fixed
        self.targets = torch.arange(num_samples) % 3

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index]
        views = (self.view(picture), self.view(picture))
        return views, self.targets[index]

    def view(self, picture):
        if self.fixed:
            return picture + 0.1 * picture.flip(-1)
        num_columns = int(torch.randint(0, 8, ()))
        rolled_picture = picture.roll(num_columns, dims=-1)
        noise = torch.randn_like(picture)
        return rolled_picture + 0.1 * noise


def make_views():
    return Sets(TwoViews(44, seed=0), TwoViews(12, seed=1, fixed=True))
