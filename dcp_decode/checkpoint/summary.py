"""What a checkpoint's document says, for its table and its report: pure functions of the parsed JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dcp_decode.checkpoint.points import own_shape_in

Document = Mapping[str, Any]
Point = Mapping[str, Any]
Axis = Literal["batch", "keys", "heads"]

STAGES = ("query_push", "sparse_decode", "value_push", "merge", "chain", "fused_chain", "rank_skew")
MODES = {
    "solo": "solo: one rank's kernels; peers' words lie ready, no NVLink time in it",
    "loopback": "loopback: all ranks' work one after the other on one GPU, no NVLink time in it",
    "group": "group: real ranks, maximum over ranks per iteration",
}
AXES: tuple[Axis, ...] = ("batch", "keys", "heads")
CLIFF = 1.3  # of the line between a point's neighbours
DECODE_FLOORS = ("bytes", "dependent_loads", "gather", "launch")
CHAINS = ("chain", "fused_chain")
NCCL_CHAIN = "nccl_chain"
# Timed beside the peers, but no alternative to the sparse decode.
NO_ALTERNATIVE = frozenset({"own_local_route", "nccl", NCCL_CHAIN})


def own_points(document: Document) -> dict[str, Point]:
    """The checkpoint's own point by L2 state, of those in which it has not failed."""
    return {point["l2"]: point for point in document["points"] if is_own(point, document)}


def is_own(point: Point, document: Document) -> bool:
    """Whether a point, or what else has its extents, is of the checkpoint's own shape."""
    own = own_shape_in(document["config"])
    return all(point[axis] == getattr(own, axis) for axis in AXES)


def median(point: Point, stage: str) -> float | None:
    """Median microseconds of a stage; None where it was not timed."""
    times = point["stages"].get(stage)
    return None if times is None else times["p50_us"]


def timed_peers(point: Point, kind: str | None = None) -> list[Mapping[str, Any]]:
    """Peers that ran at a point, the fastest first; kind: only those."""
    ran = [peer for peer in point["peers"] if peer["skipped"] is None and kind in (None, peer["kind"])]
    return sorted(ran, key=lambda peer: peer["p50_us"])


def lead(point: Point, kind: str | None = "public") -> tuple[Mapping[str, Any], float] | None:
    """The fastest alternative and how many times longer it takes than our sparse decode; None without one."""
    peers = [peer for peer in timed_peers(point, kind) if peer["name"] not in NO_ALTERNATIVE]
    own = median(point, "sparse_decode")
    return (peers[0], peers[0]["p50_us"] / own) if peers and own else None


def largest_floor(point: Point, names: Collection[str] = DECODE_FLOORS) -> tuple[str, float] | None:
    """The floor that the sparse decode can't undercut whatever it does: name and microseconds."""
    known = {name: point["floors"][name]["p50_us"] for name in names if name in point["floors"]}
    return max(known.items(), key=lambda item: item[1]) if known else None


def compared_stages(point: Point) -> tuple[str, ...]:
    """What of ours stands beside the peers: the sparse decode, of real ranks the chains."""
    return CHAINS if point["mode"] == "group" else ("sparse_decode",)


@dataclass(frozen=True)
class GroupChain:
    """Microseconds of one of a group's chains, of the same kernels without peers, and of the chain over NCCL."""

    name: str
    chain: float
    solo: float
    nccl: float


def group_chains(point: Point) -> list[GroupChain]:
    """What a point of mode group says about its chains; none for other modes."""
    nccl = next((peer["p50_us"] for peer in point["peers"] if peer["name"] == NCCL_CHAIN), None)
    if nccl is None:
        return []
    return [
        GroupChain(name, chain, solo["p50_us"], nccl)
        for name in CHAINS
        if (chain := median(point, name)) is not None and (solo := point["floors"].get(f"solo_{name}")) is not None
    ]


@dataclass(frozen=True)
class Scaling:
    """Points that differ from the checkpoint's own in one extent, in ascending order."""

    axis: Axis
    l2: str
    points: Sequence[Point]

    @property
    def extents(self) -> list[int]:
        return [point[self.axis] for point in self.points]

    def times(self, stage: str) -> list[float | None]:
        return [median(point, stage) for point in self.points]

    def floors(self) -> list[float | None]:
        """The largest of the floors that are known at every point."""
        names = [name for name in DECODE_FLOORS if all(name in point["floors"] for point in self.points)]
        found = [largest_floor(point, names) for point in self.points]
        return [floor and floor[1] for floor in found]

    def cliffs(self, stage: str) -> Iterator[tuple[int, float]]:
        """(extent, time over the line between its neighbours) of every inner point."""
        extents, times = self.extents, self.times(stage)
        for index in range(1, len(extents) - 1):
            left, own, right = times[index - 1 : index + 2]
            if left is None or own is None or right is None:
                continue
            share = (extents[index] - extents[index - 1]) / (extents[index + 1] - extents[index - 1])
            yield extents[index], own / (left + share * (right - left))

    def worst_cliff(self, stage: str) -> tuple[int, float] | None:
        return max(self.cliffs(stage), key=lambda cliff: cliff[1], default=None)


def scalings(document: Document) -> list[Scaling]:
    """Every axis and L2 state along which at least two points were measured."""
    found = []
    own = own_shape_in(document["config"])
    for axis in AXES:
        fixed = [name for name in AXES if name != axis]
        for l2 in dict.fromkeys(point["l2"] for point in document["points"]):
            points = [
                point
                for point in document["points"]
                if point["l2"] == l2 and all(point[name] == getattr(own, name) for name in fixed)
            ]
            if len(points) > 1:
                found.append(Scaling(axis, l2, sorted(points, key=lambda point: point[axis])))
    return found


def fastest_chain(point: Point) -> float | None:
    """The faster of the chain of launches and the fused one; None where neither was timed."""
    return min((time for name in CHAINS if (time := median(point, name)) is not None), default=None)


def modelled_chain(point: Point) -> float | None:
    """The fastest chain plus both crossings of the wire as modelled: not measured."""
    chain, wire = fastest_chain(point), point["floors"].get("wire")
    return chain + wire["p50_us"] if chain is not None and wire else None


def notes(document: Document) -> list[str]:
    """What must be known about the table's figures: a few lines."""
    lines = [f"microseconds, medians; {MODES[document['mode']]}"]
    wire = document["wire"]
    if document["mode"] != "group":
        modelled = wire["query_us"] + wire["value_us"]
        lines.append(f"wire, modelled and not in any figure above: {modelled:.2f} us a layer ({wire['source']})")
    for point in document["points"]:
        for group in group_chains(point):
            lines.append(
                f"{point['batch']} x {point['keys']}, {point['l2']}: {group.name.replace('_', ' ')} "
                f"{group.chain:.2f} us, {group.chain - group.solo:+.2f} us on one rank alone ({group.solo:.2f} us); "
                f"NCCL between the stages' kernels {group.nccl:.2f} us, {group.nccl / group.chain:.1f} x"
            )
    for alone, chained in dict.fromkeys(
        (own.get("variant_alone", own["variant"]), own["variant"]) for own in own_points(document).values()
    ):
        if alone != chained:
            lines.append(f"the sparse decode alone is {alone}, in the chain {chained}")
    for step in document["step"]:
        if step["within"] and not is_own(step, document):
            continue
        lines.append(
            f"verify step of {step['layers']} layers in one graph, {step.get('stage', 'chain').replace('_', ' ')}, "
            f"{step['batch']} x {step['keys']}, {step['heads']} heads, {step['l2']}: "
            f"{step['p50_us']:.1f} us, {'at most' if step['within'] else 'MORE THAN'} {step['allowed_us']:.1f} us "
            f"({step['layers']} x {step['layer_p50_us']:.2f} us + 5 %)"
        )
    for name, reason in dict.fromkeys(
        (peer["name"], peer["skipped"]) for point in document["points"] for peer in point["peers"] if peer["skipped"]
    ):
        lines.append(f"skipped peer {name}: {reason}")
    lines += [f"WRONG RESULT, not timed: {failure}" for failure in document.get("failures", ())]
    if document["verified"]:
        lines.append(
            f"verified before and after every timing, worst error {document['worst_error']:.3%} "
            f"of at most {document['error_bound']:.3%}"
        )
    return lines
