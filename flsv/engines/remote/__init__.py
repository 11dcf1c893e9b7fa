"""Federations whose clients are other processes: sites train, a server runs the rounds, over any transport."""

from flsv.engines.remote.audit import AuditLog, verify_audit
from flsv.engines.remote.data import RemoteData
from flsv.engines.remote.federation import RemoteFederation
from flsv.engines.remote.messages import Packet
from flsv.engines.remote.policy import SitePolicy
from flsv.engines.remote.secure import SecureSums
from flsv.engines.remote.site import Site
from flsv.engines.remote.transport import Directory, Transport, agreement
from flsv.engines.remote.waiting import Wait, Waiting

__all__ = [
    "AuditLog",
    "Directory",
    "Packet",
    "RemoteData",
    "RemoteFederation",
    "SecureSums",
    "Site",
    "SitePolicy",
    "Transport",
    "Wait",
    "Waiting",
    "agreement",
    "verify_audit",
]
