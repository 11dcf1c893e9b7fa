"""Client samplers: who takes part in a round. One file each."""

from flsv.sampling.base import ClientSampler, FullParticipation
from flsv.sampling.bernoulli import BernoulliSampler, ShapleyImportanceSampler
from flsv.sampling.fixed import FixedCohort
from flsv.sampling.softmax import SoftmaxSampler
from flsv.sampling.systematic import SystematicShapleySampler
from flsv.sampling.uniform import UniformSampler

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
