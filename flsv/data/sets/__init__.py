"""Data sets by name, and data modules for CSV files."""

from flsv.data.sets.base import ImageData
from flsv.data.sets.characters import CharacterData
from flsv.data.sets.columns import Columns
from flsv.data.sets.csv_data import CSVData
from flsv.data.sets.registry import DATA_SETS, is_downloadable, is_known, load_image_data
from flsv.data.sets.table import TableData
from flsv.data.sets.text import TextData

__all__ = [
    "DATA_SETS",
    "CSVData",
    "CharacterData",
    "Columns",
    "ImageData",
    "TableData",
    "TextData",
    "is_downloadable",
    "is_known",
    "load_image_data",
]
