"""Triton kernels of the checkpoint: the grouped split-KV baseline, its combine, and a gather that marks a floor.

Imported only where Triton is installed. Rows of the flat cache are 576 bytes: 512 latent, 64 rope. Row offsets are
INT32, so a cache may have 3.7 million rows.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def split_attention(
    query,  # bf16 (B, HEADS, 576)
    cache,  # e4m3 (N, 576)
    indices,  # int32 (B, keys)
    rows,  # bf16 (B, HEADS, 512) if there is one part, else fp32 (B, PARTS, HEADS, 512)
    lse,  # fp32 (B, HEADS) or (B, PARTS, HEADS), base 2
    score_scale,
    value_scale,
    keys,
    part_keys,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a group of heads of one row over one part of its keys, with a running maximum."""
    row = tl.program_id(0)
    part = tl.program_id(2)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    known = (head < HEADS)[:, None]
    latent = tl.arange(0, 512)[None, :]
    rope = 512 + tl.arange(0, 64)[None, :]
    if PDL:
        gdc_wait()
    query_row = query + (row * HEADS + head)[:, None] * 576
    query_latent = tl.load(query_row + latent, mask=known, other=0.0)
    query_rope = tl.load(query_row + rope, mask=known, other=0.0)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    sums = tl.zeros([GROUP, 512], tl.float32)
    last = tl.minimum((part + 1) * part_keys, keys)
    for first in tl.range(part * part_keys, last, BLOCK, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK)
        if EVEN:
            slot = tl.load(indices + row * keys + key)
        else:
            slot = tl.load(indices + row * keys + key, mask=key < last, other=0)
        key_row = cache + slot[:, None] * 576
        key_latent = tl.load(key_row + latent).to(tl.bfloat16)
        key_rope = tl.load(key_row + rope).to(tl.bfloat16)
        score = tl.dot(query_rope, tl.trans(key_rope), tl.dot(query_latent, tl.trans(key_latent))) * score_scale
        if not EVEN:
            score = tl.where((key < last)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        sums = tl.dot(weight.to(tl.bfloat16), key_latent, sums * shrink[:, None])
        top = higher
    if PDL:
        gdc_launch_dependents()
    line = (row * PARTS + part) * HEADS + head
    tl.store(lse + line, top + tl.log2(total), mask=head < HEADS)
    result = sums * (value_scale / total)[:, None]
    tl.store(rows + line[:, None] * 512 + latent, result.to(rows.dtype.element_ty), mask=known)


@triton.jit
def combine_parts(
    part_rows,  # fp32 (B, PARTS, HEADS, 512)
    part_lse,  # fp32 (B, PARTS, HEADS), base 2
    rows,  # bf16 (B, HEADS, 512)
    lse,  # fp32 (B, HEADS), base 2
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one (row, head); PARTS is a power of two."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    line = (row * PARTS + tl.arange(0, PARTS)) * HEADS + head
    column = tl.arange(0, 512)
    if PDL:
        gdc_wait()
    parts = tl.load(part_rows + line[:, None] * 512 + column[None, :])
    each = tl.load(part_lse + line)
    if PDL:
        gdc_launch_dependents()
    top = tl.max(each, 0)
    weight = tl.exp2(each - top)
    total = tl.sum(weight, 0)
    own = row * HEADS + head
    tl.store(rows + own * 512 + column, tl.sum(parts * (weight / total)[:, None], 0).to(tl.bfloat16))
    tl.store(lse + own, top + tl.log2(total))


@triton.jit
def gather_rows(
    cache,  # int32 (N, 144)
    indices,  # int32 (B, keys)
    rows,  # int32 (B, HEADS, 256): as many bytes as the partial rows
    keys,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program reads BLOCK keys of a row and writes HEAD_BLOCK head rows that depend on every word of them."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    word = tl.arange(0, 128)
    if PDL:
        gdc_wait()
    slot = tl.load(indices + row * keys + part * BLOCK + tl.arange(0, BLOCK))
    latent = tl.load(cache + slot[:, None] * 144 + word[None, :])
    rope = tl.load(cache + slot[:, None] * 144 + 128 + tl.arange(0, 16)[None, :])
    if PDL:
        gdc_launch_dependents()
    folded = tl.xor_sum(latent, 0) ^ tl.xor_sum(tl.xor_sum(rope, 1), 0)
    head = part * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    place = rows + (row * HEADS + head)[:, None] * 256 + word[None, :]
    inside = (head < HEADS)[:, None]
    value = tl.broadcast_to(folded[None, :], (HEAD_BLOCK, 128))
    tl.store(place, value, mask=inside)
    tl.store(place + 128, value, mask=inside)
