"""Client samplers draw the cohort of a round."""

from flsv.sampling.base import ClientSampler, FixedCohort, FullParticipation, UniformSampler
from flsv.sampling.contribution import (
    BernoulliSampler,
    ShapleyImportanceSampler,
    SoftmaxSampler,
    SystematicShapleySampler,
)
from flsv.sampling.power_of_choice import PowerOfChoice

__all__ = [
    "BernoulliSampler",
    "ClientSampler",
    "FixedCohort",
    "FullParticipation",
    "PowerOfChoice",
    "ShapleyImportanceSampler",
    "SoftmaxSampler",
    "SystematicShapleySampler",
    "UniformSampler",
]
