"""Federations on Flower: ``pip install 'flsv[flower]'``."""

from lightning_utilities.core.imports import RequirementCache

if not (_flower := RequirementCache("flwr>=1.41")):
    raise ModuleNotFoundError(f"flsv.engines.flower needs Flower: pip install 'flsv[flower]'. {_flower}")

from flsv.engines.flower.client import client_app
from flsv.engines.flower.server import server_app

__all__ = ["client_app", "server_app"]
