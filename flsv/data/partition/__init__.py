"""Partitioners decide which client gets which samples."""

from flsv.data.partition.base import Partitioner, partition_counts, plot_partition
from flsv.data.partition.by_label import DirichletPartitioner, PathologicalPartitioner, ShardPartitioner
from flsv.data.partition.by_size import (
    GroupPartitioner,
    IIDPartitioner,
    OneClient,
    ProportionPartitioner,
    SizePartitioner,
)
from flsv.data.partition.cheating import Colluding, Duplicated, Framing, Sybils

__all__ = [
    "Colluding",
    "DirichletPartitioner",
    "Duplicated",
    "Framing",
    "GroupPartitioner",
    "IIDPartitioner",
    "OneClient",
    "Partitioner",
    "PathologicalPartitioner",
    "ProportionPartitioner",
    "ShardPartitioner",
    "SizePartitioner",
    "Sybils",
    "partition_counts",
    "plot_partition",
]
