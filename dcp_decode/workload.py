"""Keys, queries and index scores as pure functions of integers: any rank, or the oracle, can make any row again.

    (seed, purpose, layer, request)  --scalar mix-->  stream --+
    (position, salt[, head])         ------------------------- + --mix--> row word --+--mix--> 72 words a row
                                                                     word number ----+          |  byte
                                                                                                v
                                                                       256 quantiles of a normal distribution

Nothing is stored and nothing depends on call order: a value is a counter-based hash (the SplitMix64 finalizer) of
what names it. Only int64 multiply, shift, and, xor and table look-ups run, so a CPU and a GPU give the same bits;
the tables hold rounded integers / 1024, so no transcendental of any library can move them either.

A token's *salt* is its identity at a position: 0 in the prompt, the request's verify-step number + 1 for a draft. A
rejected slot is overwritten by a token with another salt, hence other bytes, so a stale row can't go unnoticed.

Structure, so that runs are not only flat softmax over uniform noise:

* 1 key in 128 of a (layer, request) is *heavy*: twice the norm, and its first 64 columns follow a pattern that 1 in 8
  (row, head) queries shares, which lifts its logit by about 9 nats there (at Kimi's softmax scale). The other heads
  are flat or mildly peaked.
* Index scores favour the first `SINKS` positions (always first), recent positions and heavy keys; half of these are
  active at a time and change every 64 positions, so that neighbouring rows share hitters and distant rows don't. The
  rest is a per-key and a per-(key, row) part. Scores are integers below 2**16 times 2**-8: exact in FP32, and coarse
  enough that ties at the top-k border are the normal case, not the exception.

Measured on one CPU core (torch 2.13): `key_bytes` makes 700 to 760 MB/s (chunks of 64 rows 320, one chunk of 15,360
rows 340), scores of 15,360 keys take 0.27 ms, queries of 5 rows of 12 heads 0.2 ms. The mix alone runs at 2.9 GB/s, and
an int32 `index_select` applies the byte table at 1.6 GB/s where int64 indexing does 0.45 and numpy take 1.35.
`bytearray.translate` (3.2 GB/s) was dropped: CPU only, and one table of 256 where heavy keys need two.
"""

from __future__ import annotations

from enum import IntEnum
from statistics import NormalDist

import torch

from dcp_decode import numerics
from dcp_decode.errors import ConfigError
from dcp_decode.geometry import Geometry

SINKS = 4
EPOCH_TOKENS = 64  # positions of rows that share one active half of the heavy keys
RECENT_TOKENS = 256
SCORE_FRACTION_BITS = 8

WORDS = numerics.ROW_BYTES // 8
PATTERN_WORDS = 8  # 64 columns
HEAVY_MASK = 127
ALIGNED_MASK = 7
ROWS_A_CHUNK = 1024  # 576 KiB of words: within 1 % of the best of 64 .. 20,000 on the machine measured

_BITS = (1 << 64) - 1
# Odd 64-bit constants (SplitMix64's, and hexadecimal digits of pi): each counter moves along its own lattice.
_WORD_STEP = 0x9E3779B97F4A7C15
_POSITION_STEP = 0x243F6A8885A308D3
_SALT_STEP = 0x13198A2E03707345
_HEAD_STEP = 0xA4093822299F31D1
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


class Purpose(IntEnum):
    """What a stream of hashed words is for: one number each, so that no two uses share their randomness."""

    KEY = 1
    HEAVY = 2
    QUERY = 3
    PATTERN = 4
    EPOCH = 5
    NOISE = 6
    ACCEPTANCE = 7


class Workload:
    """The generator of one run. Results lie on the device of `positions`; equal arguments give equal bits anywhere.

    seed: any integer (its low 64 bits count). geometry: gives k_scale and the number of query heads.
    """

    def __init__(self, seed: int, geometry: Geometry) -> None:
        self.seed = seed
        self.geometry = geometry
        values = normal_quantiles()
        # 512 entries: plain keys, then heavy keys (twice the value, saturating): one look-up serves both.
        keys = numerics.quantize_e4m3(torch.cat((values, 2 * values)), geometry.k_scale)
        states = torch.tensor([_signed(hashed_word(seed, purpose)) for purpose in Purpose])
        self._tables = {torch.device("cpu"): (keys, values.to(torch.bfloat16), states)}

    def key_bytes(self, layer: int, request: int, positions: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
        """E4M3 bytes (uint8 [n, 576], never NaN) of the keys at `positions`, `salts` (int64 [n])."""
        pattern = self._pattern(layer, request, positions.device)
        row_words = token_words(self._stream(Purpose.KEY, layer, request), positions, salts)
        return self.encode_keys(row_words, self._heavy(layer, request, positions, salts), pattern)

    def encode_keys(self, row_words: torch.Tensor, heavy: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
        """E4M3 bytes (uint8 [n, 576]) of keys by their words of stream KEY (int64 [n]) and whether they are heavy.

        pattern: int64 [8] of all keys, or [n, 8], one each.
        """
        device = row_words.device
        key_table, _, _ = self._device_tables(device)
        result = torch.empty((len(row_words), numerics.ROW_BYTES), dtype=torch.uint8, device=device)
        # A GPU is faster with few large launches, a CPU with words that never leave the cache.
        chunk = ROWS_A_CHUNK if device.type == "cpu" else max(1, len(row_words))
        for start in range(0, len(row_words), chunk):
            part = slice(start, start + chunk)
            words = make_words(row_words[part])
            first = words[:, :PATTERN_WORDS]
            first.copy_(torch.where(heavy[part, None], pattern if pattern.dim() == 1 else pattern[part], first))
            entries = words.view(torch.uint8).to(torch.int32)
            entries += heavy[part, None].to(torch.int32) << 8
            result[part] = key_table.index_select(0, entries.view(-1)).view(entries.shape)
        return result

    def key_rows(self, layer: int, request: int, positions: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
        """BF16 [n, 576] whose E4M3 quantization by k_scale is exactly `key_bytes` of the same arguments.

        BF16's relative error 2**-9 can't cross an E4M3 rounding boundary, which is at least 2**-5 away.
        """
        return self.decode_keys(self.key_bytes(layer, request, positions, salts))

    def decode_keys(self, encoded: torch.Tensor) -> torch.Tensor:
        """BF16 (same shape) of key bytes."""
        return (numerics.e4m3_values(encoded) * self.geometry.k_scale).to(torch.bfloat16)

    def queries(
        self, layer: int, request: int, positions: torch.Tensor, salts: torch.Tensor, heads: range
    ) -> torch.Tensor:
        """BF16 [n, len(heads), 576], roughly N(0, 1): a head's bits don't depend on which other heads are made.

        positions, salts: int64 [n]. heads: gathered head numbers; ConfigError outside 0 .. geometry.heads - 1.
        """
        if len(heads) and not (min(heads) >= 0 and max(heads) < self.geometry.heads):
            raise ConfigError("heads", heads, f"must lie in 0 .. {self.geometry.heads - 1}")
        pattern = self._pattern(layer, request, positions.device)
        row_words = token_words(self._stream(Purpose.QUERY, layer, request), positions, salts)
        return self.make_queries(row_words, pattern.expand(len(positions), PATTERN_WORDS), heads)

    def make_queries(self, row_words: torch.Tensor, pattern: torch.Tensor, heads: range) -> torch.Tensor:
        """BF16 [n, len(heads), 576] of tokens by their words of stream QUERY (int64 [n]) and patterns int64 [n, 8]."""
        device = row_words.device
        _, query_table, _ = self._device_tables(device)
        head_numbers = torch.arange(heads.start, heads.stop, heads.step, dtype=torch.int64, device=device)
        head_words = mix(row_words[:, None] + head_numbers * _signed(_HEAD_STEP))  # (n, heads)
        words = make_words(head_words.view(-1)).view(*head_words.shape, WORDS)
        aligned = (head_words & ALIGNED_MASK)[:, :, None] == 0
        first = words[:, :, :PATTERN_WORDS]
        first.copy_(torch.where(aligned, pattern[:, None, :], first))
        entries = words.view(torch.uint8).to(torch.int32)
        values = query_table.index_select(0, entries.view(-1))
        return values.view(len(row_words), len(heads), numerics.ROW_BYTES)

    def index_scores(
        self,
        layer: int,
        request: int,
        row_position: int,
        row_salt: int,
        positions: torch.Tensor,
        salts: torch.Tensor,
    ) -> torch.Tensor:
        """FP32 [n] index scores of the keys at `positions`, `salts` (int64 [n]) for the row at `row_position`.

        Multiples of 2**-8 below 2**8, computed in integers: the same on every rank and device, and ties occur.
        The caller passes only positions that the row may see (0 .. row_position).
        """
        return scores_of_keys(
            token_words(self._stream(Purpose.HEAVY, layer, request), positions, salts),
            self._stream(Purpose.EPOCH, layer, request, row_position // EPOCH_TOKENS),
            self._stream(Purpose.NOISE, layer, request, row_position, row_salt),
            row_position,
            positions,
        )

    def purpose_states(self, device: torch.device) -> torch.Tensor:
        """int64 [len(Purpose)] on `device`: where `hashed_words` begins for each purpose, in their order."""
        return self._device_tables(device)[2]

    def _heavy(self, layer: int, request: int, positions: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
        """bool [n]: the keys that index scores may favour, and whose rows stand out."""
        return is_heavy(token_words(self._stream(Purpose.HEAVY, layer, request), positions, salts))

    def _pattern(self, layer: int, request: int, device: torch.device) -> torch.Tensor:
        """int64 [8]: the words of the first 64 columns that heavy keys and aligned queries share."""
        stream = self._stream(Purpose.PATTERN, layer, request)
        return make_words(torch.tensor([stream], dtype=torch.int64))[0, :PATTERN_WORDS].to(device)

    def _stream(self, purpose: Purpose, *names: int) -> int:
        """Signed 64-bit start of the stream of (seed, purpose, names)."""
        return _signed(hashed_word(self.seed, purpose, *names))

    def _device_tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(uint8 [512] key bytes, bf16 [256] query values, `purpose_states`) on `device`, copied there once."""
        if device not in self._tables:
            keys, values, states = self._tables[torch.device("cpu")]
            self._tables[device] = (keys.to(device), values.to(device), states.to(device))
        return self._tables[device]


def hashed_word(seed: int, purpose: Purpose, *names: int) -> int:
    """Uniform integer in 0 .. 2**64 - 1 that (seed, purpose, names) name; order counts."""
    state = _mix_integer(seed & _BITS)
    for name in (purpose, *names):
        state = _mix_integer((state + (name + 1) * _WORD_STEP) & _BITS)
    return state


def hashed_words(state: torch.Tensor, *names: torch.Tensor) -> torch.Tensor:
    """The int64 bits of `hashed_word`, elementwise over broadcast int64 names.

    state: int64, what the names before these have made: at first one of `Workload.purpose_states`.
    """
    for name in names:
        state = mix((name + 1) * _signed(_WORD_STEP) + state)
    return state


def is_heavy(popularity: torch.Tensor) -> torch.Tensor:
    """bool: whether keys are heavy, by their words of stream HEAVY (int64, any shape)."""
    return (popularity & HEAVY_MASK) == 0


def scores_of_keys(
    popularity: torch.Tensor,
    epoch: int | torch.Tensor,
    row: int | torch.Tensor,
    row_position: int | torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """FP32 index scores, `popularity`'s shape: of keys by their words of stream HEAVY and their positions (int64).

    epoch, row: starts of the row's streams EPOCH and NOISE. They and row_position are numbers, or one a row, broadcast.
    """
    # popularity is mixed already, so one multiply after the xor is enough; the top bits are the well mixed ones.
    active = (popularity ^ epoch).mul_(_signed(_MIX[0][1])) < 0
    active &= is_heavy(popularity)
    score = ((popularity ^ row).mul_(_signed(_MIX[1][1])) >> 54).bitwise_and_(0x3FF)  # row noise: 10 bits
    score += (popularity >> 8) & 0x7FF  # the key's own part: 11 bits
    score += (positions - (row_position - RECENT_TOKENS)).clamp_(0, RECENT_TOKENS).mul_(16)  # 12 bits
    score += active.to(torch.int64) << 13
    # Sinks keep their noise, and the offset is above every sum of the other parts (below 2**14).
    score += (positions < SINKS).to(torch.int64) << 15
    return score.to(torch.float32).mul_(2.0**-SCORE_FRACTION_BITS)


def normal_quantiles() -> torch.Tensor:
    """FP32 [256]: the (i + 0.5) / 256 quantiles of N(0, 1), rounded to multiples of 1/1024 (+-2.886 at the ends).

    Rounding removes what two mathematical libraries could differ by.
    """
    normal = NormalDist()
    return torch.tensor([round(1024 * normal.inv_cdf((i + 0.5) / 256)) / 1024 for i in range(256)])


def make_words(row_words: torch.Tensor) -> torch.Tensor:
    """int64 [n, 72]: the random words of rows that int64 [n] `row_words` (already mixed) name."""
    numbers = torch.arange(1, WORDS + 1, dtype=torch.int64, device=row_words.device)
    return mix(row_words[:, None] + numbers * _signed(_WORD_STEP))


def mix(words: torch.Tensor) -> torch.Tensor:
    """The SplitMix64 finalizer, in place on int64 `words` (any shape), which it returns.

    int64 products wrap. Torch shifts int64 arithmetically, so each shift is masked to the logical one: without the
    mask the sign would cancel itself and the map would lose bits.
    """
    shifted = torch.empty_like(words)
    for shift, factor in _MIX:
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    torch.bitwise_right_shift(words, _LAST_SHIFT, out=shifted)
    return words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - _LAST_SHIFT)) - 1))


def token_words(stream: int | torch.Tensor, positions: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
    """int64: the mixed word of each token of a stream (or of one stream a token); shapes broadcast."""
    return mix(positions * _signed(_POSITION_STEP) + salts * _signed(_SALT_STEP) + stream)


def _mix_integer(word: int) -> int:
    """`mix` of one unsigned 64-bit Python integer."""
    for shift, factor in _MIX:
        word = ((word ^ (word >> shift)) * factor) & _BITS
    return word ^ (word >> _LAST_SHIFT)


def _signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit integer."""
    return word - (1 << 64) if word >> 63 else word
