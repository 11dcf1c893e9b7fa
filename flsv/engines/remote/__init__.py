"""Federations whose clients are other processes (sites), reached over any transport."""

from flsv.engines.remote.federation import RemoteFederation
from flsv.engines.remote.messages import Packet
from flsv.engines.remote.policy import SitePolicy
from flsv.engines.remote.site import Site
from flsv.engines.remote.transport import Directory, RemoteData, Transport, agreement

__all__ = [
    "Directory",
    "Packet",
    "RemoteData",
    "RemoteFederation",
    "Site",
    "SitePolicy",
    "Transport",
    "agreement",
]
