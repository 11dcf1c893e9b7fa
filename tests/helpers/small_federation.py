"""A federation of the benchmark with three clients."""

from dataclasses import replace

from benchmark import federation

RIDER = {
    "class_path": "flsv.attacks.FreeRider",
    "init_args": {"mode": "noise", "scale": 0.5, "clients": [2]},
}
SIZES = {
    "class_path": "flsv.data.SizePartitioner",
    "init_args": {"proportions": [3, 5, 2], "seed": 1},
}


def make_small_federation(**changes):
    """With other arguments of :class:`benchmark.Federation`."""
    like = federation("digits_sizes")
    data = {
        **like.data,
        "partitioner": SIZES,
        "splits": {**like.data["splits"], "max_samples": 160},
        "batch_size": 8,
    }
    small = replace(like, name="small", rounds=2, data=data, attacks=[RIDER])
    return replace(small, **changes)
