"""Client samplers draw the cohort of a round. One file each."""

from flsv.sampling.base import ClientSampler, FixedCohort, FullParticipation, UniformSampler
from flsv.sampling.bernoulli import BernoulliSampler, ShapleyImportanceSampler, SystematicShapleySampler
from flsv.sampling.softmax import SoftmaxSampler

__all__ = [
    "BernoulliSampler",
    "ClientSampler",
    "FixedCohort",
    "FullParticipation",
    "ShapleyImportanceSampler",
    "SoftmaxSampler",
    "SystematicShapleySampler",
    "UniformSampler",
]
