"""Noise from a key: that of FIPS 202 and Box and Muller, normal, independent, and of no generator of torch's."""

import hashlib
import math

import pytest
import torch
from scipy import stats

from flsv.privacy import BLOCK_SIZE, GaussianPrivacy, add_secret_noise
from flsv.uploads import UploadContext
from helpers import make_generator

KEY = bytes(range(32))


def draw_noise(size: int, key: bytes = KEY, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    vector = torch.zeros(size, dtype=dtype)
    add_secret_noise(vector, 1.0, key)
    return vector


def noise_by_hand(size: int, key: bytes) -> list[float]:
    """Compute the noise of one block, number by number."""
    pairs = math.ceil(size / 2)
    stream = hashlib.shake_256(key + bytes(8)).digest(16 * pairs)
    uniform = []
    for position in range(0, len(stream), 8):
        word = int.from_bytes(stream[position : position + 8], "little") % 2**53
        uniform.append((word + 0.5) / 2**53)

    radii = [math.sqrt(-2 * math.log(u)) for u in uniform[:pairs]]
    angles = [2 * math.pi * u for u in uniform[pairs:]]
    polar = list(zip(radii, angles))
    cosines = [radius * math.cos(angle) for radius, angle in polar]
    sines = [radius * math.sin(angle) for radius, angle in polar]

    return (cosines + sines)[:size]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_secret_noise_is_box_and_muller_of_shake_256(size):
    assert draw_noise(size).tolist() == pytest.approx(noise_by_hand(size, KEY), rel=1e-12)


def test_secret_noise_is_normal_and_independent_across_blocks_and_keys():
    size = 2 * BLOCK_SIZE + 5

    numbers = draw_noise(size)
    with_other_key = draw_noise(size, hashlib.sha256(KEY).digest())

    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-3
    assert numbers.std().item() == pytest.approx(
        1,
        abs=5 / math.sqrt(2 * size),
    )

    kurtosis = stats.kurtosis(numbers.numpy())
    assert kurtosis == pytest.approx(
        0,
        abs=5 * math.sqrt(24 / size),
    )

    pairs = [
        (numbers, with_other_key),
        (numbers.abs(), with_other_key.abs()),
    ]
    for lag in (1, BLOCK_SIZE // 2, BLOCK_SIZE):
        pairs.append((numbers[:-lag], numbers[lag:]))

    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(a))


def flip_bit(key: bytes, bit: int) -> bytes:
    flipped_key = bytearray(key)
    flipped_key[bit // 8] ^= 1 << bit % 8
    return bytes(flipped_key)


def test_secret_noise_depends_on_all_256_bits_of_its_key():
    noise = draw_noise(4)
    for bit in range(256):
        noise_of_other_key = draw_noise(4, flip_bit(KEY, bit))
        assert not torch.isclose(noise, noise_of_other_key).any()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
    ],
)
def test_secret_noise_keeps_the_updates_dtype_and_changes_with_update_and_key(dtype):
    size = 100_000
    update = torch.randn(
        size,
        generator=make_generator(1),
    ).to(dtype)
    original = update.clone()
    noiseless = GaussianPrivacy(2.0, 0.0)
    noisy = GaussianPrivacy(2.0, 1.5)
    context = UploadContext(0, 3, size, 0, secret=KEY)
    other_context = UploadContext(
        0,
        3,
        size,
        0,
        secret=KEY[::-1],
    )

    clipped = noiseless.apply(update, context).double()
    sent = noisy.apply(update, context)

    assert torch.equal(update, original)
    assert sent.dtype == dtype
    assert torch.linalg.vector_norm(clipped).item() == pytest.approx(2.0, rel=1e-2)

    added = sent.double() - clipped
    assert added.std().item() == pytest.approx(
        3.0,
        abs=5 * 3 / math.sqrt(2 * size),
    )

    similarity = torch.cosine_similarity(added, clipped, dim=0)
    assert abs(similarity) < 5 / math.sqrt(size)

    # The smallest change of the update has other noise, and so has another message's key.
    changed = update.clone()
    if dtype == torch.bfloat16:
        changed[0] *= 1.01
    else:
        changed[0] = torch.nextafter(changed[0], changed[0] + 1)

    for independent in (
        noisy.apply(changed, context),
        noisy.apply(update, other_context),
    ):
        pair = torch.stack([added, independent.double() - clipped])
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(size)


def test_repr_of_an_upload_context_hides_the_secret():
    assert "secret" not in repr(UploadContext(0, 3, 2, 0, secret=KEY))
