"""Noise from a key: that of FIPS 202 and Box and Muller, normal, independent, and of no generator of torch's."""

import hashlib
import math

import pytest
import torch
from scipy import stats

from flsv.privacy import BLOCK, GaussianPrivacy, add_secret_noise
from flsv.uploads import UploadContext

KEY = bytes(range(32))


def noise(size: int, key: bytes = KEY, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    vector = torch.zeros(size, dtype=dtype)
    add_secret_noise(vector, 1.0, key)
    return vector


def by_hand(size: int, key: bytes) -> list[float]:
    """Of one block, number by number."""
    pairs = math.ceil(size / 2)
    drawn = hashlib.shake_256(key + bytes(8)).digest(16 * pairs)
    words = [int.from_bytes(drawn[8 * i : 8 * i + 8], "little") % 2**53 for i in range(2 * pairs)]
    uniform = [(word + 0.5) / 2**53 for word in words]
    radius = [math.sqrt(-2 * math.log(u)) for u in uniform[:pairs]]
    turns = [2 * math.pi * u for u in uniform[pairs:]]
    both = [r * math.cos(a) for r, a in zip(radius, turns)] + [
        r * math.sin(a) for r, a in zip(radius, turns)
    ]
    return both[:size]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_secret_noise_is_box_and_muller_of_shake_256(size: int) -> None:
    assert noise(size).tolist() == pytest.approx(by_hand(size, KEY), rel=1e-12)


def test_secret_noise_is_normal_and_independent_across_blocks_and_keys() -> None:
    size = 2 * BLOCK + 5
    drawn = noise(size)
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert drawn.std().item() == pytest.approx(1, abs=5 / math.sqrt(2 * size))
    assert stats.kurtosis(drawn.numpy()) == pytest.approx(0, abs=5 * math.sqrt(24 / size))
    halves = BLOCK // 2
    shifted = [(drawn[:-lag], drawn[lag:]) for lag in (1, halves, BLOCK)]
    other = noise(size, hashlib.sha256(KEY).digest())
    for one, two in [*shifted, (drawn, other), (drawn.abs(), other.abs())]:
        assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 5 / math.sqrt(len(one))


def test_secret_noise_depends_on_all_256_bits_of_its_key() -> None:
    """All streams of torch's generator on the CPU can be tried: why a site does not draw from it."""
    draw = torch.Generator()
    one, other = (torch.randn(9, generator=draw.manual_seed(5 + high)) for high in (0, 7 << 32))
    assert torch.equal(one, other)
    for bit in range(256):
        key = bytearray(KEY)
        key[bit // 8] ^= 1 << bit % 8
        assert not torch.isclose(noise(4), noise(4, bytes(key))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_secret_noise_keeps_the_updates_dtype_and_changes_with_update_and_key(
    dtype: torch.dtype,
) -> None:
    update = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = update.clone()
    context = UploadContext(0, 3, len(update), 0, secret=KEY)
    free, sent = (GaussianPrivacy(2.0, z).apply(update, context) for z in (0.0, 1.5))
    assert torch.equal(update, before)
    assert sent.dtype == dtype
    assert torch.linalg.vector_norm(free.double()).item() == pytest.approx(2.0, rel=1e-2)
    drawn = sent.double() - free.double()
    assert drawn.std().item() == pytest.approx(3.0, abs=5 * 3 / math.sqrt(2 * len(update)))
    assert abs(torch.cosine_similarity(drawn, free.double(), dim=0)) < 5 / math.sqrt(len(update))
    # The smallest change of the update has other noise, and so has another message's key.
    moved = update.clone()
    moved[0] = (
        torch.nextafter(moved[0], moved[0] + 1) if dtype != torch.bfloat16 else moved[0] * 1.01
    )
    changed = GaussianPrivacy(2.0, 1.5).apply(moved, context).double() - free.double()
    elsewhere = (
        GaussianPrivacy(2.0, 1.5)
        .apply(update, UploadContext(0, 3, len(update), 0, secret=KEY[::-1]))
        .double()
    )
    for other in (changed, elsewhere - free.double()):
        assert abs(torch.corrcoef(torch.stack([drawn, other]))[0, 1]) < 5 / math.sqrt(len(update))


def test_repr_of_an_upload_context_hides_the_secret() -> None:
    assert "secret" not in repr(UploadContext(0, 3, 2, 0, secret=KEY))
