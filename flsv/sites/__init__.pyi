from .deployment import RemoteServer as RemoteServer, SiteClient as SiteClient
from .federation import RemoteFederation as RemoteFederation
from .messages import Packet as Packet
from .policy import SitePolicy as SitePolicy
from .remote_data import RemoteData as RemoteData
from .site import Site as Site
from .transport import (
    Directory as Directory,
    Transport as Transport,
    agreement as agreement,
)
