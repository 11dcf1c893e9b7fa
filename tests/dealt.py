"""What the configuration files are, and what they have dealt out."""

import os
from pathlib import Path

import pytest
import torch

from flsv.data import load_image_data

CONFIGS = Path(__file__).parents[1] / "configs"
SCENARIOS = CONFIGS / "scenarios"
ROOT = os.environ.get("FLSV_DATA_ROOT")
EVEN = [0, 2, 4, 6, 8]


def real(*files):
    """Skip, with the reason, where the data root does not have these files."""
    if ROOT is None:
        return pytest.mark.skip(reason="FLSV_DATA_ROOT is not set: no real image data")
    missing = [file for file in files if not (Path(ROOT) / file).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"FLSV_DATA_ROOT has no {', '.join(missing)}")


def named(folder):
    return [pytest.param(path, id=path.stem) for path in sorted(folder.glob("*.yaml"))]


def dealt_counts(data):
    """Samples by client and true class, all of a client's splits together ``[n, M]``."""
    labels = load_image_data(data.source, data.files.root).train.tensors[-1]  # as they were before corruptions
    return torch.stack(
        [
            sum(
                torch.bincount(labels[data.client_indices(client, split)], minlength=data.num_classes)
                for split in ("train", "val", "test")
            )
            for client in range(data.num_clients)
        ]
    )
