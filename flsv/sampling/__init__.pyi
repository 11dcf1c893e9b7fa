from .base import ClientSampler as ClientSampler
from .bernoulli import BernoulliSampler as BernoulliSampler
from .power_of_choice import PowerOfChoice as PowerOfChoice
from .shapley_importance import ShapleyImportanceSampler as ShapleyImportanceSampler
from .softmax import SoftmaxSampler as SoftmaxSampler
from .uniform import (
    FixedCohort as FixedCohort,
    FullParticipation as FullParticipation,
    UniformSampler as UniformSampler,
)
