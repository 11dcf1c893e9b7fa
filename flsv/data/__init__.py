"""Data for a federation: sources, partitioners, corruptions, and the data module that brings them together."""

from flsv.data.corruption import (
    ClientChoice,
    ClosedSetLabelNoise,
    Corruption,
    GaussianNoise,
    LongTail,
    OpenSetLabelNoise,
)
from flsv.data.datamodule import FederatedDataModule
from flsv.data.loaders import TensorBatches, make_loader
from flsv.data.partition import (
    Colluding,
    DirichletPartitioner,
    Duplicated,
    GroupPartitioner,
    IIDPartitioner,
    OneClient,
    Partitioner,
    PathologicalPartitioner,
    ProportionPartitioner,
    ShardPartitioner,
    SizePartitioner,
    Sybils,
    partition_counts,
    plot_partition,
)
from flsv.data.sets import DATA_SETS, CharacterData, Columns, CSVData, ImageData, TableData, TextData, load_image_data

__all__ = [
    "DATA_SETS",
    "CSVData",
    "CharacterData",
    "ClientChoice",
    "ClosedSetLabelNoise",
    "Colluding",
    "Columns",
    "Corruption",
    "DirichletPartitioner",
    "Duplicated",
    "FederatedDataModule",
    "GaussianNoise",
    "GroupPartitioner",
    "IIDPartitioner",
    "ImageData",
    "LongTail",
    "OneClient",
    "OpenSetLabelNoise",
    "Partitioner",
    "PathologicalPartitioner",
    "ProportionPartitioner",
    "ShardPartitioner",
    "SizePartitioner",
    "Sybils",
    "TableData",
    "TensorBatches",
    "TextData",
    "load_image_data",
    "make_loader",
    "partition_counts",
    "plot_partition",
]
