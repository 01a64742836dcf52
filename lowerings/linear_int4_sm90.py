"""``linear_int4`` on Hopper, 1 to 64 tokens: csrc/linear_int4_sm90.cu (to 8) and csrc/linear_int4_wide_sm90.cu.

``choose`` turns a shape into a configuration (blocks, cluster, warps, ring) by counting bytes; ``TUNED`` holds the
shapes for which a measurement said otherwise.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from fu_compile.lowerings import decode_linear as common
from fu_compile.lowerings.decode_linear import SMEM, SMS, ceil_div
from torch import Tensor

from fu_compile import jit
from fu_compile.formats import GROUPS, TILE_K, TILE_N, int4_bytes, int4_tile_bytes

WARPS = 8
"""Warps of a wide block, consumers and loader: sixteen on an SM leave each thread 128 registers."""
FEW_WARPS = 16
"""Warps of a block for at most 8 tokens, with 64 registers."""
TOKENS = (1, 2, 4, 8, 16, 32, 64)
"""Kernels are compiled for at most this many tokens; the call's own number is a parameter."""
SOURCES = {"few": "linear_int4_sm90.cu", "reg": "linear_int4_reg_sm90.cu", "wide": "linear_int4_wide_sm90.cu"}


@dataclass(frozen=True)
class Config:
    """How one shape is run."""

    kind: str
    """a key of SOURCES"""
    tokens: int
    grid: int
    """blocks"""
    cluster: int
    """blocks that split K"""
    strips: int
    """few: strip groups between two reductions; wide: strips of 16 rows of a warp"""
    slots: int
    """stages of the ring"""
    warps_n: int = 1
    """wide: consumer warps along the rows"""
    warps_k: int = 1
    """few, wide: consumer warps along K; reg: tiles of a slot and of the x that a warp holds, 2 or 4"""
    blocks_per_sm: int = 2
    lead: int = -1
    """stages before the last refill at which the next kernel may start; -1: at once"""
    delay: int = 700
    """clocks between a block's start and its first request for weights"""

    @property
    def threads(self) -> int:
        """Of a block."""
        return {"few": FEW_WARPS, "reg": WARPS, "wide": self.warps_n * self.warps_k + 1}[self.kind] * 32

    def smem(self, n: int, k: int, group: int) -> int:
        """Bytes of shared memory: the sum at the top of each kernel."""
        tile, groups, tokens = int4_tile_bytes(group), TILE_K // group, self.tokens
        if self.kind == "reg":
            sums, block = 128 if tokens <= 2 else 512, self.warps_k
            return WARPS * (self.slots * (block * tile + 8) + self.strips * sums + block * groups * 32 + 32)
        if self.kind == "few":
            depth = ceil_div(ceil_div(k, TILE_K), self.cluster)
            tiles = ceil_div(depth, self.warps_k) * self.warps_k
            sums = self.strips * FEW_WARPS * 128 * max(1, tokens // 2)
            slots = self.slots * (FEW_WARPS * tile + 16)
            return slots + tiles * (tokens * 256 + groups * 32) + sums + FEW_WARPS * 32
        nb, rows = tokens // 8, self.warps_n * self.strips
        slot = rows * self.warps_k * tile + self.warps_k * (nb * 2048 + groups * tokens * 4)
        slot = ceil_div(slot, 128) * 128
        sums = 0 if self.cluster * self.warps_k == 1 else self.warps_k * rows * nb * 512
        one_pass = ceil_div(ceil_div(n, TILE_N), self.grid // self.cluster) <= rows
        ring = max(self.slots * slot, sums) if one_pass else self.slots * slot + sums
        return ring + tokens * 4 + self.slots * (16 + self.warps_n * self.warps_k * 8)


def _units(cluster: int, strips: int, sms: int) -> int:
    # Clusters of four and more leave a few SMs of the larger GPCs idle: 32 of four, 16 of eight on 132 SMs.
    return max(1, min(sms // cluster if cluster <= 2 else sms // (4 * cluster) * 4, strips))


def _few(n: int, k: int, group: int, tokens: int, sms: int, cluster: int, warps_k: int | None = None) -> Config | None:
    strips, tiles = ceil_div(n, TILE_N), ceil_div(k, TILE_K)
    if tiles < cluster:
        return None
    units, depth = _units(cluster, strips, sms), ceil_div(tiles, cluster)
    share = ceil_div(strips, units)
    if warps_k is None:  # the split that leaves the fewest warps without a tile or a strip, the deepest of them

        def work(wk: int) -> int:
            return ceil_div(depth, wk) * ceil_div(share, FEW_WARPS // wk)

        warps_k = min((16, 8, 4, 2, 1), key=work)
    groups = ceil_div(share, FEW_WARPS // warps_k)
    most = min(max(1, 4 // max(1, tokens // 2)), warps_k * cluster)  # a warp finishes one strip of a pass
    per_pass = ceil_div(groups, ceil_div(groups, most))
    config = Config("few", tokens, units * cluster, cluster, per_pass, 0, warps_k=warps_k)
    slots = (SMEM - config.smem(n, k, group)) // (FEW_WARPS * int4_tile_bytes(group) + 16)
    slots = min(slots, 6, groups * ceil_div(depth, warps_k))
    return replace(config, slots=slots) if slots > 0 else None


def _reg(n: int, k: int, group: int, tokens: int, sms: int, cluster: int = 1) -> Config:
    strips, tiles = ceil_div(n, TILE_N), ceil_div(k, TILE_K)
    units = _units(cluster, strips, sms)
    share, depth = ceil_div(strips, units), ceil_div(tiles, WARPS * cluster)
    block = 2 if depth <= 2 else 4
    # Where a warp's x does not fit its registers it is read again in every pass: few passes then, and fewer slots.
    most = 7 if tokens <= 2 or depth > block else 2
    passes = 1 if cluster > 1 else ceil_div(share, most)
    config = Config("reg", tokens, units * cluster, cluster, ceil_div(share, passes), 0, warps_k=block)
    slots = (SMEM - config.smem(n, k, group)) // (WARPS * (block * int4_tile_bytes(group) + 8))
    return replace(config, slots=max(1, min(slots, share * ceil_div(depth, block))))


def _wide(n: int, k: int, group: int, tokens: int, sms: int, cluster: int) -> Config | None:
    strips, tiles = ceil_div(n, TILE_N), ceil_div(k, TILE_K)
    units = _units(cluster, strips, sms)
    if tiles < cluster:
        return None
    share = ceil_div(strips, units)
    each = 1 if tokens > 32 or (tokens == 32 and group < 128) else 2  # as many strips as registers allow
    passes = ceil_div(share, each * (WARPS - 1))
    if cluster > 1 and passes > 1:
        return None
    warps_n = ceil_div(ceil_div(share, passes), each)
    for warps_k in range(max(1, min((WARPS - 1) // warps_n, ceil_div(tiles, cluster))), 0, -1):
        for slots in (6, 5, 4, 3, 2)[: 5 if warps_k == 1 else 4]:
            config = Config("wide", tokens, units * cluster, cluster, each, slots, warps_n, warps_k)
            if config.smem(n, k, group) <= SMEM:
                return config
    return None


def _bytes(config: Config, n: int, k: int) -> float:
    """What one block of a wide kernel moves: weights, x (from L2), sums (through distributed shared memory)."""
    units = config.grid // config.cluster
    share = ceil_div(ceil_div(n, TILE_N), units)
    passes = ceil_div(share, config.warps_n * config.strips)
    depth = k / config.cluster
    x = passes * depth * config.tokens * 2
    sums = share * TILE_N * config.tokens * 4 if config.cluster > 1 else 0
    return share * TILE_N * depth * 0.53 + 0.8 * x + sums


@dataclass(frozen=True)
class Tuning:
    """What :func:`choose` is told about a shape that was measured."""

    kind: str
    cluster: int = 1
    delay: int = 700


TUNED: dict[tuple[int, int, int], Tuning] = {
    # 8B: qkv, o, gate_up, down
    (6144, 4096, 1): Tuning("few", delay=0),
    (4096, 4096, 1): Tuning("few", delay=2000),
    (28672, 4096, 1): Tuning("reg", delay=1400),
    (4096, 14336, 1): Tuning("few"),
    (6144, 4096, 8): Tuning("reg", delay=0),
    (4096, 4096, 8): Tuning("reg", delay=2000),
    (28672, 4096, 8): Tuning("reg", delay=0),
    (4096, 14336, 8): Tuning("reg", 2, 0),
    # 70B
    (10240, 8192, 1): Tuning("few", delay=0),
    (8192, 8192, 1): Tuning("few", delay=2000),
    (57344, 8192, 1): Tuning("few"),
    (8192, 28672, 1): Tuning("reg"),
    (10240, 8192, 8): Tuning("reg", 2, 0),
    (8192, 8192, 8): Tuning("reg", 2, 0),
    (57344, 8192, 8): Tuning("reg", 1, 0),
    (8192, 28672, 8): Tuning("reg", 2, 0),
}
"""(n, k, tokens) -> what was fastest in a whole layer (benchmarks/decode_linears.py --tune-layer)."""


@functools.cache
def choose(n: int, k: int, group: int, tokens: int, sms: int = SMS) -> Config:
    """The configuration for an [n, k] weight and at most ``tokens`` tokens on ``sms`` multiprocessors."""
    bound = next(t for t in TOKENS if tokens <= t)
    clusters = (1, 2, 4, 8)
    if bound > 8:
        # Clusters of four and eight read x less often and measured slower all the same (8B, 32 tokens).
        options = [c for cluster in (1, 2) if (c := _wide(n, k, group, bound, sms, cluster)) is not None]
        return min(options, key=lambda c: _bytes(c, n, k))
    tuned = TUNED.get((n, k, bound)) if sms == SMS else None
    # From 8 tokens on every block's copy of x is traffic that counts, and x in registers is read once.
    kind = tuned.kind if tuned else "few" if bound < 8 else "reg"
    if kind == "reg":
        cluster = tuned.cluster if tuned else 2 if k >= 8192 and n <= 16 * sms * 5 else 1
        config = _reg(n, k, group, bound, sms, cluster)
    else:
        few = [c for cluster in clusters if (c := _few(n, k, group, bound, sms, cluster)) is not None]
        # The fewest blocks that split K with which four stages, or all there are, fit beside x.
        deep = [c for c in few if c.slots >= min(4, ceil_div(ceil_div(k, TILE_K), c.cluster * c.warps_k))]
        config = deep[0] if deep else max(few, key=lambda c: c.slots)
    return replace(config, delay=tuned.delay) if tuned else config


def kernel_of(config: Config, n: int, k: int, group: int, half: bool, prologue: str, epilogue: str) -> jit.Kernel:
    """The kernel of one configuration."""
    smem = config.smem(n, k, group)
    constants = {"N": n, "K": k, "GROUP": group, "TOKENS": config.tokens}
    constants |= {"GRID": config.grid, "CLUSTER": config.cluster}
    if config.kind == "wide":
        constants |= {"WN": config.warps_n, "WK": config.warps_k, "S": config.strips}
        constants |= {"BLOCKS_PER_SM": config.blocks_per_sm}
    else:
        constants |= {"PASS": config.strips}
    if config.kind != "wide":
        constants |= {"WK" if config.kind == "few" else "BLOCK": config.warps_k}
    constants |= {
        "SLOTS": config.slots,
        "LEAD": config.lead,
        "DELAY": config.delay,
        "SMEM": smem,
    } | common.flags(half, prologue, epilogue)
    shape = jit.Shape(config.grid, config.threads, smem, config.cluster)
    return jit.Kernel(SOURCES[config.kind], constants, common.SIGNATURE, shape)


@functools.cache
def kernel(n: int, k: int, group: int, tokens: int, half: bool, prologue: str, epilogue: str, sms: int) -> jit.Kernel:
    """The kernel that runs this call; compiled at its first launch."""
    return kernel_of(choose(n, k, group, tokens, sms), n, k, group, half, prologue, epilogue)


def accepts(
    x: Tensor,
    packed: Tensor,
    n: int,
    k: int,
    group: int,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
) -> str | None:
    """Why this call is not ours, or none."""
    if group not in GROUPS:
        return f"group {group}; there are {GROUPS}"
    if packed.dtype != torch.uint8 or packed.numel() != int4_bytes(n, k, group) or not packed.is_contiguous():
        return "the weight is not a packed INT4 weight of this shape"
    return common.refuses(x, n, k, bias, residual, prologue, epilogue)


def launch(
    x: Tensor,
    packed: Tensor,
    n: int,
    k: int,
    group: int,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
) -> Tensor:
    """The operator ``linear_int4`` on the current CUDA stream."""
    tokens = next(t for t in TOKENS if x.numel() // k <= t)
    sms = common.multiprocessors(x.device.index)
    run = kernel(n, k, group, tokens, x.dtype == torch.float16, prologue, epilogue, sms)
    return common.launch(run, x, packed, n, k, bias, residual, eps, scale, epilogue)
