"""FederatedLoop, the callback that runs a federation's rounds in a Trainer, with its checkpoints and reports. The steps
of a round are in other packages.
"""

from flsv.federation.loop import FederatedLoop

__all__ = ["FederatedLoop"]
