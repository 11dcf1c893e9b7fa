"""Client samplers: who takes part in a round. One file each."""

from flsv.sampling.base import ClientSampler, FullParticipation
from flsv.sampling.uniform import UniformSampler

__all__ = ["ClientSampler", "FullParticipation", "UniformSampler"]
