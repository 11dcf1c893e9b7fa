"""FederatedLoop, the callback that runs a federation's rounds in a Trainer, with its checkpoints and reports; no step
of a round is written here.
"""

from flsv.federation.loop import FederatedLoop

__all__ = ["FederatedLoop"]
