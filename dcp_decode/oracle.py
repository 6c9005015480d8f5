"""The FP64 oracle, the twin that rounds P as the kernel does, and the error bounds that follow from the arithmetic.

For one source rank and one (row, head), with the exact raw score s_j = q . k_j (integers over a power of two: exact in
FP64), x_j = s_j * scale_log2 and m = max x_j:

    oracle   sum_j 2**x_j v_j / sum_j 2**x_j                                          v_j = k_scale * V bytes
    twin     sum_j P_j 2**(m_c - m) v_j / total,  P_j = E4M3(448 * 2**(x_j - m_c)),  total = 448 * sum_j 2**(x_j - m)

m_c is the running max of key j's CTA after j's chunk, so the anchor of P depends on the *family* and on nothing else.
The twin's partials are rounded to BF16 (they travel so) and merged by LSE; its merged row is not rounded.

Bounds: per column, `slack` is the largest |kernel - twin| that correct FP32 arithmetic can cause. It is a sum of

1. Score. A sum of E4M3 products only rounds where a term has a bit below the accumulator's grid. Let
   T = (sum |q k| + |s|) / 2, which no partial sum in any order exceeds, and E = 2**(floor(log2 T) - 22). A term whose
   lowest set bit is g < E carries a potential E - g; each rounding or truncation of an operand from grid g to g' costs
   at most g' - g and lowers the potential by as much. So delta = E * (number of terms with g < E) bounds any order of
   FP32 additions (grid 2**-23) and tensor cores that align 16 products and the accumulator to the largest exponent and
   truncate with at least 22 fraction bits (FP16 HMMA of sm_80 to sm_100; *not* the native FP8 mma of sm_89 and sm_90,
   which keeps 13). The count is bounded for all keys by sum E / (g_q g_k), one product of matrices, and counted
   exactly for the few keys where it matters: near an E4M3 boundary or near the running max.
2. Exponent of P: e_j = scale_log2 * (delta_j + delta of the max) + FP32 roundings of the product, the max, the two
   additions and log2(448) + exp2 at 2 units in the last place. P's rounding can only differ if E4M3(P 2**e) or
   E4M3(P 2**-e) does: `flip_j` is that difference, mostly 0. It weighs flip_j * |v_j| / total.
3. Weight of a chunk (eta): the anchor's error, rescaling factors, and the PV accumulation: n_cta * 2**-22 of
   sum P |v| for n_cta keys in a CTA (18 truncations at 2**-24 a group of 16 would be 2**-23.8 a key).
4. total: the weighted means of 2**e_j and 2**-e_j, plus (n_cta + 16) * 2**-22 in the exponent for its FP32 sum. It
   also bounds the LSE.
5. BF16 of a partial: max over both ends of |BF16(twin +- slack) - BF16(twin)|; weights off by a factor 2**+-lambda_s
   move the merged row by at most sum W_s (2**lambda_s - 1) |part_s - merged| * 2**max(lambda); the merge's FP32 sums;
   half a BF16 unit of the merged row.

bound_twin = L2 norm of slack over the 512 columns / norm of the twin's row; bound_oracle = (|twin - oracle| + slack
norm) / norm of the oracle's row. A zero reference norm divides by 1. `Verdict.ok` also asks for every column inside its
own slack, which finds one wrong column that the norm over 512 would hide.

NaN: a NaN query byte poisons its (row, head), a NaN key byte every head of the rows that select it; there, and only
there, every column must be the canonical NaN. A row without keys must be zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dcp_decode.errors import ConfigError
from dcp_decode.geometry import Geometry
from dcp_decode.numerics import E4M3_MAX, LATENT_DIM, LN_2, LOG2_E, ROW_BYTES
from dcp_decode.rounding import (
    ACCUMULATOR_UNIT,
    Encoded,
    bf16_spacing,
    count_score_error,
    loose_score_error,
    round_bf16,
    round_e4m3,
)
from dcp_decode.verdict import Verdict, judge

FP32_UNIT = 2.0**-24  # unit roundoff
EXP2_LOG2_ERROR = 2.0**-22 * LOG2_E  # 2 units in the last place, as an error of the exponent
LOG2_ERROR = 2.0**-19  # log2(total / 448) <= 11 at 2 units in the last place
SMALLEST_NORMAL = 2.0**-126  # where the GPU may flush to zero
BLOCK_BYTES = 1 << 27  # FP64 key values held at once by the functions that walk over rows


@dataclass(frozen=True)
class Family:
    """How a row's keys are split, which decides where P is anchored and therefore every bit of the result.

    split: CTAs of a cluster. chunk: keys of a CTA between two updates of its running max.
    assignment: "strided", key j to CTA j % split; "dealt", key j to CTA (j // chunk) % split.
    """

    name: str
    split: int
    chunk: int
    assignment: Literal["strided", "dealt"] = "strided"

    def chunk_max(self, values: torch.Tensor, empty: float) -> torch.Tensor:
        """Running max [..., turns, split] over chunks of values [..., length]; missing keys count as `empty`."""
        turn = self.split * self.chunk
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % turn), value=empty)
        if self.assignment == "strided":
            per_chunk = padded.unflatten(-1, (-1, self.chunk, self.split)).amax(-2)
        else:
            per_chunk = padded.unflatten(-1, (-1, self.split, self.chunk)).amax(-1)
        return per_chunk.cummax(-2).values

    def per_key(self, of_chunk: torch.Tensor, length: int) -> torch.Tensor:
        """Values [..., turns, split] of chunks, spread to their keys [..., length]."""
        shape = (*of_chunk.shape[:-1], self.chunk, self.split)
        if self.assignment == "strided":
            keys = of_chunk.unsqueeze(-2).expand(shape)
        else:
            keys = of_chunk.unsqueeze(-1).expand(*of_chunk.shape, self.chunk)
        return keys.flatten(-3)[..., :length]

    def keys_per_cta(self, counts: torch.Tensor) -> torch.Tensor:
        """At least the keys of the fullest CTA of rows that hold `counts` keys."""
        return counts // self.split + self.chunk


SEED_FAMILY = Family("seed", split=4, chunk=64)
# Another order of the FP32 sums (`kernels.sparse_probabilities`); the first has the seed's anchors, so the same twin.
PROBABILITIES_FAMILIES = [Family("probabilities", split=4, chunk=64), Family("probabilities_128", split=4, chunk=128)]
# Split and chunk of `kernels.warpgroup` are choices; P is E4M3 there too, multiplied as f16, which holds it exactly.
WARPGROUP_FAMILIES = [
    Family(f"warpgroup_{split}x{chunk}", split, chunk) for split in (1, 2, 4, 8) for chunk in (64, 128, 256)
]
FAMILIES = {family.name: family for family in (SEED_FAMILY, *PROBABILITIES_FAMILIES, *WARPGROUP_FAMILIES)}


def family_named(name: str) -> Family:
    """The family of that name; ConfigError names those that exist."""
    if name not in FAMILIES:
        raise ConfigError("family", name, f"must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


@dataclass(frozen=True)
class Partial:
    """One source rank's attention over its own keys, all FP64: values [R, H, 512], LSE and flags [R, H].

    oracle, oracle_lse: exact. twin, twin_lse: P rounded to E4M3, before the BF16 rounding; LSE base 2.
    slack, lse_slack: largest |kernel - twin| before the BF16 rounding. poisoned: NaN expected. empty [R]: no keys.
    """

    oracle: torch.Tensor
    oracle_lse: torch.Tensor
    twin: torch.Tensor
    twin_lse: torch.Tensor
    slack: torch.Tensor
    lse_slack: torch.Tensor
    poisoned: torch.Tensor
    empty: torch.Tensor

    @classmethod
    def concatenate(cls, parts: Sequence[Partial]) -> Partial:
        """Partials of consecutive row blocks as one."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Merged:
    """The D sources merged by LSE, FP64 [R, H, 512]: slack includes the BF16 rounding of the merged row."""

    oracle: torch.Tensor
    twin: torch.Tensor
    slack: torch.Tensor
    poisoned: torch.Tensor
    empty: torch.Tensor


def source_partial(
    query_bytes: torch.Tensor,
    key_bytes: torch.Tensor,
    counts: torch.Tensor,
    geometry: Geometry,
    family: Family = SEED_FAMILY,
) -> Partial:
    """One source's partial of queries uint8 [R, H, 576] over keys uint8 [R, L, 576], of which row r uses counts[r].

    Memory is about 15 FP64 tensors [R, H, L] and two [R, L, 576]; `walk_partial` splits large R. Runs on any device;
    its FP32 products are not TF32 (torch's default).
    """
    length = key_bytes.shape[1]
    heads = query_bytes.shape[1]
    device = query_bytes.device
    counts = counts.to(device=device, dtype=torch.int64)
    empty = counts == 0
    present = torch.arange(length, device=device) < counts[:, None]
    nan_key = ((key_bytes & 0x7F).amax(-1) == 0x7F) & present if length else present
    poisoned = ((query_bytes & 0x7F).amax(-1) == 0x7F) | nan_key.any(-1, keepdim=True)
    poisoned = poisoned & ~empty[:, None]
    shape = (query_bytes.shape[0], heads)
    if length == 0 or bool(empty.all()):
        zeros = torch.zeros(*shape, LATENT_DIM, dtype=torch.float64, device=device)
        flat = torch.zeros(shape, dtype=torch.float64, device=device)
        lse = torch.full_like(flat, -torch.inf)
        return Partial(zeros, lse, zeros, lse, zeros, flat, poisoned, empty)
    factor = geometry.scale_log2
    queries, keys = Encoded.read(query_bytes), Encoded.read(key_bytes)
    scores = queries.values @ keys.values.mT  # (R, H, L), exact
    logits = (scores * factor).masked_fill_(~present[:, None], -torch.inf)
    running = family.chunk_max(logits, -torch.inf)
    anchor = family.per_key(running, length)
    row_max = torch.where(empty[:, None], 0.0, logits.amax(-1))[..., None]
    delta = loose_score_error(scores, queries, keys)
    rounding = FP32_UNIT * (logits.abs() + (logits - anchor).abs() + 2 * anchor.abs() + row_max.abs() + 4 * 9.0)
    rounding = torch.where(present[:, None], rounding, 0.0) + 2 * EXP2_LOG2_ERROR
    gap = torch.where(present[:, None], logits - anchor, -torch.inf)

    near_max = (logits + factor * delta >= anchor) & present[:, None]
    loose = rounding + factor * (delta + _anchor_error(delta, near_max, family))
    near_boundary = _e4m3_probability(gap + loose) != _e4m3_probability(gap - loose)
    delta = count_score_error(scores, delta, near_max | near_boundary, queries, keys)
    anchor_delta = factor * _anchor_error(delta, near_max, family)
    exponent_error = rounding + factor * delta + anchor_delta

    rounded = _e4m3_probability(gap)
    above = _e4m3_probability(gap + exponent_error) - rounded
    below = rounded - _e4m3_probability(gap - exponent_error)
    flip = torch.maximum(above, below)
    # Past 2**60 a bound says nothing any more; the clamp keeps it finite.
    anchor_delta, exponent_error = (anchor_delta + rounding).clamp_max_(60.0), exponent_error.clamp_max_(60.0)

    weight = torch.exp2(logits - row_max)
    weight_sum = weight.sum(-1, keepdim=True).clamp_min(SMALLEST_NORMAL)
    lse = (row_max + weight_sum.log2())[..., 0].masked_fill(empty[:, None], -torch.inf)
    chunk_weight = torch.exp2(anchor - row_max).nan_to_num_(nan=0.0) / (E4M3_MAX * weight_sum)
    coefficients = torch.cat([weight / weight_sum, rounded * chunk_weight], 1)
    oracle, twin = (coefficients @ keys.values[..., :LATENT_DIM] * geometry.k_scale).split(heads, 1)

    cta_keys = family.keys_per_cta(counts)[:, None, None].to(torch.float64)
    eta = torch.exp2(anchor_delta) * (1 + ACCUMULATOR_UNIT * cta_keys) - 1
    slack_weight = chunk_weight * (rounded * eta + flip * (1 + eta))
    most = (weight * torch.exp2(exponent_error)).sum(-1, keepdim=True) / weight_sum
    least = (weight * torch.exp2(-exponent_error)).sum(-1, keepdim=True) / weight_sum
    total_log2 = torch.maximum(most, 1 / least).log2() + (cta_keys + 16) * 4 * FP32_UNIT  # (R, H, 1)
    # FP32 product: its own error (2048 * 2**-24) and underflow stay below the factor and the last term.
    spread = slack_weight.float() @ keys.magnitudes[..., :LATENT_DIM]
    grow = torch.exp2(total_log2)
    slack = spread.double() * (geometry.k_scale * (1 + 2.0**-10)) * grow
    slack += twin.abs() * (grow - 1 + 8 * FP32_UNIT) + SMALLEST_NORMAL
    lse_slack = total_log2[..., 0] + LOG2_ERROR + 2 * FP32_UNIT * (row_max[..., 0].abs() + lse.abs())
    none = empty[:, None]
    slack.masked_fill_(none[..., None], 0.0)
    return Partial(oracle, lse, twin, lse, slack, lse_slack.masked_fill(none, 0.0), poisoned, empty)


def walk_partial(
    query_bytes: torch.Tensor,
    cache: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    geometry: Geometry,
    family: Family = SEED_FAMILY,
) -> Partial:
    """`source_partial` of a kernel's own inputs, a few rows at a time so that memory stays bounded.

    query_bytes uint8 [B, heads, 576], cache uint8 [N, 576], rows int32 [>= B, K] with a tail of -1, valid int32 [>= B].
    """
    counts = valid[: query_bytes.shape[0]].to(device=cache.device, dtype=torch.int64)
    longest = max(1, int(counts.max()))
    block = max(1, BLOCK_BYTES // (longest * 8 * (ROW_BYTES + 16 * query_bytes.shape[1])))
    parts = []
    for first in range(0, query_bytes.shape[0], block):
        own = slice(first, min(first + block, query_bytes.shape[0]))
        length = int(counts[own].max())
        selected = rows[own, :length].to(device=cache.device, dtype=torch.int64).clamp_min(0)
        keys = cache[selected.flatten()].view(*selected.shape, ROW_BYTES)
        parts.append(source_partial(query_bytes[own], keys, counts[own], geometry, family))
    return Partial.concatenate(parts)


def merge_partials(parts: Sequence[Partial]) -> Merged:
    """Merge sources 0 .. D-1: the exact partials exactly, the twin's after their BF16 rounding."""
    empty = torch.stack([part.empty for part in parts]).all(0)
    poisoned = torch.stack([part.poisoned for part in parts]).any(0)
    lse = torch.stack([part.twin_lse for part in parts])  # (D, R, H)
    weight = torch.exp2(lse - lse.amax(0).masked_fill(empty[:, None], 0.0))
    weight = (weight / weight.sum(0).clamp_min(SMALLEST_NORMAL))[..., None]
    oracle = _weighted(weight, [part.oracle for part in parts])
    rounded = [round_bf16(part.twin) for part in parts]
    twin = _weighted(weight, rounded)
    # exp2 of an FP32 difference, and ln there and back on the local route: 5 more roundings of the LSE.
    error_log2 = torch.stack([part.lse_slack for part in parts]) + EXP2_LOG2_ERROR
    error_log2 = error_log2 + 5 * FP32_UNIT * lse.abs().nan_to_num(posinf=0.0)
    error_log2 = error_log2.masked_fill(lse == -torch.inf, 0.0)[..., None]
    grow = torch.exp2(error_log2.amax(0))
    move = weight * (torch.exp2(error_log2) - 1) * grow
    slack = torch.zeros_like(twin)
    for source, part in enumerate(parts):
        high = round_bf16(part.twin + part.slack) - rounded[source]
        low = rounded[source] - round_bf16(part.twin - part.slack)
        arithmetic = (len(parts) + 6) * FP32_UNIT * rounded[source].abs()
        slack += weight[source] * (torch.maximum(high, low) * grow + arithmetic)
        slack += move[source] * (rounded[source] - twin).abs()
    slack += SMALLEST_NORMAL
    slack += bf16_spacing(twin.abs() + slack) / 2
    slack.masked_fill_(empty[:, None, None], 0.0)
    return Merged(oracle, twin, slack, poisoned, empty)


def split_sources(
    key_bytes: torch.Tensor, source: torch.Tensor, sources: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys uint8 [R, N, 576] as one compacted (keys [R, longest, 576], counts [R]) for each source, in the order given.

    source: int64 [R, N], the rank that stores the key or -1. Entries past a row's count are key 0 of the row.
    """
    # A stable sort by rank lays the sources one after another and keeps the order inside each.
    order = torch.where(source < 0, sources, source).sort(dim=1, stable=True).indices
    counts = torch.stack([(source == rank).sum(1) for rank in range(sources)])
    starts = counts.cumsum(0) - counts
    result = []
    for rank in range(sources):
        longest = int(counts[rank].max())
        places = (starts[rank, :, None] + torch.arange(longest, device=source.device)).clamp_max(source.shape[1] - 1)
        picked = order.gather(1, places)
        picked += source.shape[1] * torch.arange(source.shape[0], device=source.device)[:, None]
        keys = key_bytes.flatten(0, 1).index_select(0, picked.flatten())
        result.append((keys.view(*picked.shape, ROW_BYTES), counts[rank]))
    return result


def verify_rows(
    merged: torch.Tensor,
    query_bytes: torch.Tensor,
    key_bytes: torch.Tensor,
    source: torch.Tensor,
    geometry: Geometry,
    family: Family | str = SEED_FAMILY,
) -> Verdict:
    """Merged rows BF16 [R, H, 512] against the oracle and the twin.

    query_bytes uint8 [R, H, 576]; key_bytes uint8 [R, N, 576]: each row's selection, the keys of one source in
    ascending position order; source int64 [R, N]: the rank that stores the key, -1 = absent.
    """
    chosen = family_named(family) if isinstance(family, str) else family
    sources = split_sources(key_bytes, source, geometry.dcp)
    return verify_merged(
        merged, merge_partials([source_partial(query_bytes, keys, n, geometry, chosen) for keys, n in sources])
    )


def verify_merged(merged: torch.Tensor, expected: Merged) -> Verdict:
    """Merged rows BF16 [R, H, 512] against what `merge_partials` expects."""
    return judge(merged, expected.oracle, expected.twin, expected.slack, expected.poisoned, expected.empty)


def verify_partial(
    out: torch.Tensor, lse: torch.Tensor, expected: Partial, base: Literal["log2", "ln"] = "log2"
) -> Verdict:
    """One source's partial rows BF16 [R, H, 512] with their LSE FP32 [R, H] of that base, as a kernel wrote them.

    Empty rows: zeros (local route) and LSE -inf. A wrong LSE fails its (row, head) like a wrong column.
    """
    slack = expected.slack + bf16_spacing(expected.twin.abs() + expected.slack) / 2
    slack = slack.masked_fill(expected.empty[:, None, None], 0.0)
    verdict = judge(out, expected.oracle, expected.twin, slack, expected.poisoned, expected.empty)
    unit = LN_2 if base == "ln" else 1.0
    given = lse.to(torch.float64)
    allowed = expected.lse_slack * unit + 2 * FP32_UNIT * (expected.twin_lse * unit).abs().nan_to_num(posinf=0.0)
    error = (given - expected.twin_lse * unit).abs()
    fine = torch.where(expected.empty[:, None], given == -torch.inf, error <= allowed)
    fine = torch.where(expected.poisoned, given.isnan(), fine)
    passed = verdict.passed & fine
    problem = verdict.problem
    if not problem and not bool(passed.all()):
        row, head = (~fine).nonzero()[0].tolist()
        problem = (
            f"row {row} head {head}: LSE (base {base}) is {given[row, head]:.9g}, expected "
            f"{float(expected.twin_lse[row, head]) * unit:.9g} +- {float(allowed[row, head]):.2g}"
        )
    return Verdict(
        verdict.error_oracle,
        verdict.bound_oracle,
        verdict.error_twin,
        verdict.bound_twin,
        verdict.column_use,
        passed,
        problem,
    )


def _weighted(weight: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([weight[source] * row for source, row in enumerate(rows)]).sum(0)


def _anchor_error(delta: torch.Tensor, near_max: torch.Tensor, family: Family) -> torch.Tensor:
    """Error [R, H, L] of each key's anchor: only keys that could be the running max can move it."""
    return family.per_key(family.chunk_max(torch.where(near_max, delta, 0.0), 0.0), delta.shape[-1])


def _e4m3_probability(gap: torch.Tensor) -> torch.Tensor:
    """E4M3(448 * 2**gap) of exponents below the anchor; gaps above 0 saturate."""
    return round_e4m3((E4M3_MAX * torch.exp2(gap)).clamp_max_(E4M3_MAX))
