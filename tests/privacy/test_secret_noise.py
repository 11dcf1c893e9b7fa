"""Noise from a key: that of FIPS 202 and Box and Muller, normal, independent, and of no generator of torch's."""

import hashlib
import math

import pytest
import torch
from scipy import stats

from flsv.privacy import GaussianPrivacy
from flsv.privacy.secret_noise import BLOCK_SIZE, add_secret_noise
from flsv.uploads import UploadContext
from helpers import make_generator

KEY = bytes(range(32))


def noise_by_hand(size: int, block: int) -> list[float]:
    """Compute the noise of a block, number by number."""
    pairs = math.ceil(size / 2)
    key = KEY + block.to_bytes(8, "big")
    stream = hashlib.shake_256(key).digest(16 * pairs)
    uniform = []
    for position in range(0, len(stream), 8):
        end = position + 8
        word = int.from_bytes(stream[position:end], "little")
        mantissa = word % 2**53
        uniform.append((mantissa + 0.5) / 2**53)

    cosines = []
    sines = []
    for uniform_of_radius, uniform_of_angle in zip(uniform[:pairs], uniform[pairs:]):
        radius = math.sqrt(-2 * math.log(uniform_of_radius))
        angle = 2 * math.pi * uniform_of_angle
        cosines.append(radius * math.cos(angle))
        sines.append(radius * math.sin(angle))
    return (cosines + sines)[:size]


@pytest.mark.slow
def test_secret_noise_is_box_and_muller_of_shake_256_of_key_and_block():
    expected = torch.tensor(noise_by_hand(BLOCK_SIZE, 0), dtype=torch.float64)
    for size in (1, 2, 7):
        vector = torch.zeros(BLOCK_SIZE + size, dtype=torch.float64)
        add_secret_noise(vector, 1.0, KEY)
        first_block, last_block = vector.split(BLOCK_SIZE)

        torch.testing.assert_close(first_block, expected, rtol=1e-12, atol=0)
        assert last_block.tolist() == pytest.approx(noise_by_hand(size, 1), rel=1e-12)

    assert stats.kstest(expected.numpy(), "norm").pvalue > 1e-3


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
