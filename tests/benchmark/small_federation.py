"""A federation that is trained in a second: three clients of the digits, the third a free rider."""

from dataclasses import replace
from typing import Any

from flsv.benchmark import Federation, federation

RIDER = {"class_path": "flsv.attacks.FreeRider", "init_args": {"mode": "noise", "scale": 0.5, "clients": [2]}}

SIZES = {"class_path": "flsv.data.SizePartitioner", "init_args": {"proportions": [3, 5, 2], "seed": 1}}


def small(**changes: Any) -> Federation:
    """With other arguments of :class:`flsv.benchmark.Federation`."""
    like = federation("digits_sizes")
    data = {
        **like.data,
        "partitioner": SIZES,
        "splits": {**like.data["splits"], "max_samples": 160},
        "batch_size": 8,
    }
    made = replace(like, name="small", rounds=2, data=data, attacks=[RIDER], bad={"free_rider": [2]})
    return replace(made, **changes)
