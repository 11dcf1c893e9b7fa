"""The folder in which a site keeps its secret, its states and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# This module must not import torch, as flsv.sites.flower_resident.

#: The site's folder if its owner has not configured another one.
SITE_FOLDER = "flsv-site"


def site_folder(node: Mapping[str, Any]) -> Path:
    """Return the site's folder by the configuration that its owner has written."""
    return Path(str(node.get("folder", SITE_FOLDER)))
