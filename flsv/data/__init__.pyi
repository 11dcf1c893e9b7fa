from .corruption import (
    ClientChoice as ClientChoice,
    ClosedSetLabelNoise as ClosedSetLabelNoise,
    Corruption as Corruption,
    GaussianNoise as GaussianNoise,
    OpenSetLabelNoise as OpenSetLabelNoise,
)
from .datamodule import FederatedDataModule as FederatedDataModule
from .loaders import Loader as Loader, TensorBatches as TensorBatches, make_loader as make_loader
from .partition import (
    GroupPartitioner as GroupPartitioner,
    IIDPartitioner as IIDPartitioner,
    OneClient as OneClient,
    Partitioner as Partitioner,
    partition_counts as partition_counts,
    plot_partition as plot_partition,
)
from .skew import (
    DirichletPartitioner as DirichletPartitioner,
    LongTail as LongTail,
    PathologicalPartitioner as PathologicalPartitioner,
    ProportionPartitioner as ProportionPartitioner,
    ShardPartitioner as ShardPartitioner,
    SizePartitioner as SizePartitioner,
)
from .sources.base import DATA_SETS as DATA_SETS, Files as Files, SourceData as SourceData
from .sources.named import load_image_data as load_image_data
from .splits import HeldOut as HeldOut, SampleFilter as SampleFilter, Splits as Splits
from .streams import Stream as Stream
