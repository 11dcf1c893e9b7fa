"""Clients in other processes, whatever carries the messages: sites that train, and a server that runs the rounds."""

from flsv.engines.remote.data import RemoteData
from flsv.engines.remote.federation import RemoteFederation
from flsv.engines.remote.messages import Packet
from flsv.engines.remote.site import Site
from flsv.engines.remote.transport import Directory, Transport, agreement

__all__ = ["Directory", "Packet", "RemoteData", "RemoteFederation", "Site", "Transport", "agreement"]
