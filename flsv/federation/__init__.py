"""FederatedLoop, the callback that runs a federation's rounds in a Trainer.

Tier: provisional.
"""

from flsv.federation.loop import FederatedLoop

__all__ = ["FederatedLoop"]
