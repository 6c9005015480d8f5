"""Every geometry rule refuses with the key and the value named; real models are accepted."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest

from dcp_decode.errors import BAD_INPUT, ConfigError
from dcp_decode.geometry import DCP_SIZES, KIMI_SOFTMAX_SCALE, Geometry

SCALES = "model.softmax_scale * cache.q_scale * cache.k_scale"


@pytest.mark.parametrize(
    ("heads", "dcp", "padded"),
    [
        (96, 8, 96),  # Kimi K3.1 latency checkpoint
        (96, 8, 128),
        (96, 16, 96),
        (128, 8, 128),  # DeepSeek-V3.2
        (128, 16, 128),
        (64, 8, 64),  # GLM-5 class
        (64, 4, 64),
        (16, 16, 16),  # one head a rank
        (96, 1, 96),
        (96, 2, 96),
    ],
)
def test_real_models_are_accepted(heads: int, dcp: int, padded: int) -> None:
    geometry = Geometry(heads=heads, dcp=dcp, padded_heads=padded)
    assert geometry.owner_heads * dcp == heads
    owners = [geometry.owner_of_head(head) for head in range(heads)]
    assert owners == sorted(owners)
    assert [owners.count(rank) for rank in range(dcp)] == [geometry.owner_heads] * dcp


def test_a_tile_of_kimi_spans_two_owners() -> None:
    geometry = Geometry(heads=96, dcp=8)
    assert geometry.owner_heads == 12
    assert {geometry.owner_of_head(head) for head in range(16)} == {0, 1}
    assert geometry.owner_of_head(11) == 0
    assert geometry.owner_of_head(12) == 1


@pytest.mark.parametrize("dcp", DCP_SIZES)
def test_every_dcp_size_is_accepted(dcp: int) -> None:
    assert Geometry(dcp=dcp).owner_heads == 96 // dcp


@pytest.mark.parametrize("changes", [{"topk": 1}, {"topk": 2048}, {"capacity": 1}, {"interleave": 64}])
def test_ends_of_the_ranges_are_accepted(changes: dict[str, int]) -> None:
    geometry = dataclasses.replace(Geometry(), **changes)
    assert {name: getattr(geometry, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"dcp": 3}, "parallel.dcp", "1, 2, 4, 8, 16"),
        ({"dcp": 0}, "parallel.dcp", "1, 2, 4, 8, 16"),
        ({"dcp": 32}, "parallel.dcp", "1, 2, 4, 8, 16"),
        ({"generations": 1}, "mailbox.generations", "2, 3"),
        ({"generations": 4}, "mailbox.generations", "2, 3"),
        ({"heads": 0, "padded_heads": 0}, "model.heads", "16 .. 1024"),
        ({"heads": 8, "padded_heads": 16}, "model.heads", "16 .. 1024"),
        ({"heads": 1040, "padded_heads": 1040}, "model.heads", "16 .. 1024"),
        ({"heads": 100, "padded_heads": 112}, "model.heads", "multiple of 16"),
        ({"heads": 24, "padded_heads": 32}, "model.heads", "parallel.dcp = 8"),
        ({"padded_heads": 95}, "mailbox.padded_heads", "96 .. "),
        ({"capacity": 0}, "mailbox.capacity", "1 .. "),
        ({"capacity": 5000}, "mailbox.capacity", "1 .. "),
        ({"topk": 0}, "model.topk", "1 .. 2048"),
        ({"topk": 2049}, "model.topk", "1 .. 2048"),
        ({"interleave": 0}, "parallel.interleave", "1 .. "),
        ({"page_stride_rows": 63}, "cache.page_stride_rows", "64 .. "),
        ({"softmax_scale": 0.0}, "model.softmax_scale", "greater than 0"),
        ({"softmax_scale": -1.0}, "model.softmax_scale", "greater than 0"),
        ({"softmax_scale": math.nan}, "model.softmax_scale", "finite"),
        ({"q_scale": 0.0}, "cache.q_scale", "greater than 0"),
        ({"q_scale": math.inf}, "cache.q_scale", "finite"),
        ({"k_scale": -0.5}, "cache.k_scale", "greater than 0"),
        ({"k_scale": math.nan}, "cache.k_scale", "finite"),
        ({"q_scale": 1e20, "k_scale": 1e20}, SCALES, "finite in FP32"),
        ({"q_scale": 1e-20, "k_scale": 1e-20}, SCALES, "must lie in"),
        ({"q_scale": 2.0**-127, "k_scale": 1.0, "softmax_scale": 1e10}, "cache.q_scale", "2**-118 .. 2**118"),
        ({"k_scale": 2.0**127, "q_scale": 2.0**-60, "softmax_scale": 1e-10}, "cache.k_scale", "2**-118 .. 2**118"),
    ],
)
def test_refusals_name_the_key_the_value_and_what_is_allowed(changes: dict[str, float], key: str, named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Geometry(**changes)  # type: ignore[arg-type]
    assert refusal.value.key == key
    assert refusal.value.exit_code == BAD_INPUT
    message = str(refusal.value)
    assert message.startswith(f"{key} = ")
    assert named in message
    assert "\n" not in message


def test_the_largest_score_stays_finite_at_the_limit() -> None:
    """The overflow rule is sharp: the largest accepted product is finite in FP32, twice it is refused."""
    largest = 576 * 448.0**2
    limit = float.fromhex("0x1.fffffep127") / largest / math.log2(math.e)
    accepted = Geometry(softmax_scale=1.0, q_scale=1.0, k_scale=limit * (1 - 1e-6))
    assert accepted.scale_log2 * largest <= float.fromhex("0x1.fffffep127")
    with pytest.raises(ConfigError, match=r"finite in FP32"):
        Geometry(softmax_scale=1.0, q_scale=1.0, k_scale=limit * 2)


def test_scale_log2_is_an_fp32_value() -> None:
    geometry = Geometry()
    exact = KIMI_SOFTMAX_SCALE / 256 * math.log2(math.e)
    assert geometry.scale_log2 == pytest.approx(exact, rel=2.0**-24)
    assert math.frexp(geometry.scale_log2)[0] * 2**24 % 1 == 0


def test_geometry_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Geometry().heads = 64  # type: ignore[misc]


def test_a_bad_config_is_refused_without_the_import_of_torch():
    """Importing torch takes a second and a half, which nobody should wait for to learn of a typing error."""
    program = "import sys, dcp_decode.cli; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
