from .csv_data import (
    CharacterData as CharacterData,
    CSVData as CSVData,
    TextData as TextData,
)
from .dictionary import Column as Column, Dictionary as Dictionary
