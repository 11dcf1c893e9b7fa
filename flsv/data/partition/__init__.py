"""Partitioners: which client gets which samples."""

from flsv.data.partition.base import Partitioner, partition_counts
from flsv.data.partition.cheating import Colluding, Duplicated, Framing, Sybils
from flsv.data.partition.dirichlet import DirichletPartitioner
from flsv.data.partition.groups import GroupPartitioner
from flsv.data.partition.one_client import OneClient
from flsv.data.partition.pathological import PathologicalPartitioner
from flsv.data.partition.plot import plot_partition
from flsv.data.partition.proportions import ProportionPartitioner
from flsv.data.partition.shards import ShardPartitioner
from flsv.data.partition.sizes import IIDPartitioner, SizePartitioner

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
