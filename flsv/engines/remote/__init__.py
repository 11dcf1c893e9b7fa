"""Clients in other processes, whatever carries the messages: sites that train, and a server that runs the rounds."""

from flsv.engines.remote.agreement import agreement
from flsv.engines.remote.data import RemoteData
from flsv.engines.remote.federation import RemoteFederation
from flsv.engines.remote.site import Site
from flsv.engines.remote.transport import Directory, Transport
from flsv.engines.remote.wire import Packet

__all__ = ["Directory", "Packet", "RemoteData", "RemoteFederation", "Site", "Transport", "agreement"]
