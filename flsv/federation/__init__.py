"""FederatedLoop: the callback that is the server."""

from flsv.federation.loop import FederatedLoop

__all__ = ["FederatedLoop"]
