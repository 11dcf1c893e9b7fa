"""The HParams tab of TensorBoard: some columns that tell runs apart, and how well each run did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard.summary import hparams


def hyperparameters(chosen: Mapping[str, str | int | float], results: Iterable[str], name: str) -> list[Summary]:
    """What TensorBoard has to be told of a run.

    Args:
        chosen: column to value.
        results: tags of scalars of the same run. TensorBoard shows the last value of each.
        name: of the run in the table.

    Example:
        >>> experiment, start, end = hyperparameters({"algorithm": "FedAvg", "clients": 5}, ["val_acc"], "FedAvg 0")
        >>> told = HParamsPluginData.FromString(experiment.value[0].metadata.plugin_data.content).experiment
        >>> sorted(info.name for info in told.hparam_infos), [info.name.tag for info in told.metric_infos]
        (['algorithm', 'clients'], ['val_acc'])
    """
    experiment, start, end = hparams(dict(chosen), dict.fromkeys(results, 0.0))
    content = start.value[0].metadata.plugin_data
    told = HParamsPluginData.FromString(content.content)
    told.session_start_info.group_name = name
    content.content = told.SerializeToString()
    return [experiment, start, end]


def accuracies(logged: Iterable[str]) -> list[str]:
    """Those of the logged names that say how good a model is.

    Example:
        >>> accuracies(["val_loss", "val_acc", "lr", "val_f1"])
        ['val_acc', 'val_f1']
        >>> accuracies(["train_loss", "val_loss"])
        ['val_loss']
    """
    names = [name for name in logged if not name.startswith("train")]
    good = [name for name in names if any(word in name.lower() for word in ("acc", "f1", "auroc", "auc", "r2"))]
    return good or [name for name in names if "loss" in name.lower() or "error" in name.lower()]
