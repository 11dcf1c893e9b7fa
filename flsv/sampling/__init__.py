"""Client samplers: rules that draw the cohort of a round, that is, the clients that train in it."""

from flsv.sampling.base import ClientSampler
from flsv.sampling.bernoulli import BernoulliSampler
from flsv.sampling.power_of_choice import PowerOfChoice
from flsv.sampling.shapley_importance import ShapleyImportanceSampler
from flsv.sampling.softmax import SoftmaxSampler
from flsv.sampling.uniform import FixedCohort, FullParticipation, UniformSampler

__all__ = [
    "BernoulliSampler",
    "ClientSampler",
    "FixedCohort",
    "FullParticipation",
    "PowerOfChoice",
    "ShapleyImportanceSampler",
    "SoftmaxSampler",
    "UniformSampler",
]
