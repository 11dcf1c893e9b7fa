from .deployment import RemoteServer as RemoteServer, SiteClient as SiteClient
from .federation import RemoteFederation as RemoteFederation
from .messages import Packet as Packet
from .policy import SitePolicy as SitePolicy
from .site import Site as Site
from .transport import (
    Directory as Directory,
    RemoteData as RemoteData,
    Transport as Transport,
    agreement as agreement,
)
