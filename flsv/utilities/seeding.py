"""Random generators, each derived from the run's seed and its purpose."""
# No generator lives from one round to the next: a client's batches in round 7 depend only on (seed, 7, client), whether
# or not the run was resumed, and whoever else is in the cohort.

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_or_default(seed: int | None) -> int:
    """Return ``seed``, or if it is None the seed of Lightning's ``seed_everything``, or 0."""
    if seed is not None:
        return seed
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


@contextmanager
def kept_global_seed() -> Iterator[None]:
    """Restore the seed of ``seed_everything`` after this context, in which users' code may call it again."""
    variables = {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    try:
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def derive_seed(seed: int | None, *path: int | str) -> int:
    """Derive a 63-bit seed from a run's seed and the words and numbers in ``path``."""
    words = []
    for part in path:
        if isinstance(part, str):
            words.append(zlib.crc32(part.encode()))
        else:
            words.append(part % 2**32)

    if seed is None:
        seed = seed_or_default(seed)
    # The length is included because SeedSequence pads with zeros: ("a",) and ("a", 0) would be the same stream.
    entropy = [seed % 2**64, len(words), *words]
    sequence = np.random.SeedSequence(entropy)
    (number,) = sequence.generate_state(1, np.uint64)
    # 63 bits, since torch's seeds are signed.
    return int(number >> np.uint64(1))


def generator_for(seed: int | None, *path: int | str) -> torch.Generator:
    """Return a new CPU generator, seeded by :func:`derive_seed`."""
    derived = derive_seed(seed, *path)
    return torch.Generator().manual_seed(derived)


def shuffle_stream(
    seed: int,
    round_index: int,
    client: int,
    epoch: int,
) -> torch.Generator:
    """Return a new generator that shuffles a client's samples for one local epoch."""
    return generator_for(seed, "shuffle", round_index, client, epoch)


def seed_global_rngs(seed: int, *path: int | str) -> None:
    """Seed the global generators of Python, NumPy and torch by :func:`derive_seed`."""
    derived_seed = derive_seed(seed, *path)
    random.seed(derived_seed)
    np.random.seed(derived_seed % 2**32)  # noqa: NPY002 - users' code draws from the global generator

    # One by one, since torch.manual_seed takes 5 % of a small network's round to note which devices are absent.
    torch.default_generator.manual_seed(derived_seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(derived_seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(derived_seed)


def seed_generators(
    generators: Iterable[Any],
    seed: int,
    *path: int | str,
) -> None:
    """Seed each generator by ``seed``, its position, and the numbers in ``path``, such as a worker's."""
    for position, generator in enumerate(generators):
        derived_seed = derive_seed(seed, "held generator", position, *path)
        if isinstance(generator, np.random.RandomState):
            generator.seed(derived_seed % 2**32)
        elif isinstance(generator, np.random.Generator):
            bit_generator = generator.bit_generator
            seeded_generator = type(bit_generator)(derived_seed)
            bit_generator.state = seeded_generator.state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(derived_seed)
        else:  # of the module random
            generator.seed(derived_seed)


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator of Python, NumPy or torch."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    """Set a random generator to a state that :func:`generator_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextmanager
def kept_generators(generators: Iterable[Any]) -> Iterator[None]:
    """Restore the states of random generators at the end of this context."""
    states = [(generator, generator_state(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            restore_generator(generator, state)


def global_rngs() -> tuple[Any, ...]:
    """Return the states of Python's, NumPy's and torch's global generators."""
    cuda_states = None
    if torch.cuda.is_initialized():
        cuda_states = torch.cuda.get_rng_state_all()
    numpy_state = np.random.get_state()  # noqa: NPY002
    return random.getstate(), numpy_state, torch.get_rng_state(), cuda_states


def restore_global_rngs(states: tuple[Any, ...]) -> None:
    """Set the global generators to states that :func:`global_rngs` returned."""
    python_state, numpy_state, cpu_state, cuda_states = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(cpu_state)
    if cuda_states is not None:
        torch.cuda.set_rng_state_all(cuda_states)


def torch_rngs(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of torch's generators on the CPU and on ``device``."""
    cpu_state = torch.get_rng_state()
    if device.type != "cuda":
        return cpu_state, None
    return cpu_state, torch.cuda.get_rng_state(device)


def restore_torch_rngs(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    """Set torch's generators to states that :func:`torch_rngs` returned."""
    cpu_state = states[0]
    device_state = states[1]
    torch.set_rng_state(cpu_state)
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, device)


@contextmanager
def isolated_rngs(seed: int, *path: int | str) -> Iterator[None]:
    """Seed the global generators within this context, and restore their states at its end."""
    states = global_rngs()
    seed_global_rngs(seed, *path)
    try:
        yield
    finally:
        restore_global_rngs(states)
