"""Sums over sites that tell the server nothing else; see :mod:`flsv.engines.remote.secure.protocol`."""

from flsv.engines.remote.secure.settings import SecureSums

__all__ = ["SecureSums"]
