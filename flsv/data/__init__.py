"""Data for a federation: sources, partitioners, corruptions, and the data module that combines them.

No code in this package reads a model.
"""

from flsv.data.corruption import (
    ClientChoice,
    ClosedSetLabelNoise,
    Corruption,
    GaussianNoise,
    OpenSetLabelNoise,
)
from flsv.data.datamodule import FederatedDataModule
from flsv.data.loaders import Loader, TensorBatches, make_loader
from flsv.data.partition import (
    GroupPartitioner,
    IIDPartitioner,
    OneClient,
    Partitioner,
    Splits,
    partition_counts,
    plot_partition,
)
from flsv.data.skew import (
    DirichletPartitioner,
    LongTail,
    PathologicalPartitioner,
    ProportionPartitioner,
    ShardPartitioner,
    SizePartitioner,
)
from flsv.data.sources.base import Files, SourceData
from flsv.data.sources.columns import Columns
from flsv.data.sources.csv_data import CharacterData, CSVData, TableData, TextData
from flsv.data.sources.named import DATA_SETS, load_image_data

__all__ = [
    "DATA_SETS",
    "CSVData",
    "CharacterData",
    "ClientChoice",
    "ClosedSetLabelNoise",
    "Columns",
    "Corruption",
    "DirichletPartitioner",
    "FederatedDataModule",
    "Files",
    "GaussianNoise",
    "GroupPartitioner",
    "IIDPartitioner",
    "Loader",
    "LongTail",
    "OneClient",
    "OpenSetLabelNoise",
    "Partitioner",
    "PathologicalPartitioner",
    "ProportionPartitioner",
    "ShardPartitioner",
    "SizePartitioner",
    "SourceData",
    "Splits",
    "TableData",
    "TensorBatches",
    "TextData",
    "load_image_data",
    "make_loader",
    "partition_counts",
    "plot_partition",
]
