"""FederatedLoop: the callback that is the server."""

from flsv.loop.federated_loop import FederatedLoop

__all__ = ["FederatedLoop"]
