"""FederatedLoop, the callback that runs a federation's rounds in a Trainer."""

from flsv.federation.loop import FederatedLoop

__all__ = ["FederatedLoop"]
