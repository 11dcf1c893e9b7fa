"""Rounds of models with two parameters, and the two statistics of a BatchNorm without parameters."""

import torch
from torch import nn

from flsv.core import ParameterSpace, Round

START = [1.0, 1.0, 0.0, 1.0]
NUM_PARAMETERS = 2
SPACE = ParameterSpace(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)))


def make_round(models, num_samples, start=START):
    return Round(
        round_index=0,
        client_ids=torch.arange(len(models)),
        num_samples=torch.tensor(num_samples),
        global_vector=torch.tensor(start),
        client_vectors=torch.tensor(models),
        space=SPACE,
    )
