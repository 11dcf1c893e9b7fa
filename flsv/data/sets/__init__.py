"""Data sets by name."""

from flsv.data.sets.base import ImageData
from flsv.data.sets.registry import DATA_SETS, is_downloadable, load_image_data

__all__ = ["DATA_SETS", "ImageData", "is_downloadable", "load_image_data"]
