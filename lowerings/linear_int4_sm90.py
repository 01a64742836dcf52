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
"""Warps of a reg block, with 128 registers a thread."""
FEW_WARPS = 16
"""Warps of a few block, with 64 registers."""
TOKENS = (1, 2, 4, 8, 16, 32, 64)
"""Kernels are compiled for at most this many tokens; the call's own number is a parameter."""
SOURCES = {"few": "linear_int4_sm90.cu", "reg": "linear_int4_reg_sm90.cu", "wgmma": "linear_int4_wgmma_sm90.cu"}


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
    """few: strip groups between two reductions; wgmma: strips of 16 rows of a warp"""
    slots: int
    """stages of the ring"""
    warps_k: int = 1
    """few: warps along K; reg: tiles of a slot and of the x that a warp holds, 2 or 4; wgmma: warpgroups along K"""
    delay: int = 700
    """clocks between a block's start and its first request for weights"""
    lead: int = -1
    """few, reg: stages before the last refill at which the next kernel may start; -1: at once"""
    warpgroups: int = 2
    """wgmma"""
    phases: int = 1
    """wgmma: parts of a block's x that are in shared memory one after another"""
    chunk: int = 4
    """wgmma: most tiles of a slot"""

    @property
    def threads(self) -> int:
        """Of a block."""
        return {"few": FEW_WARPS, "reg": WARPS, "wgmma": self.warpgroups * 4}[self.kind] * 32

    def smem(self, n: int, k: int, group: int) -> int:
        """Bytes of shared memory: the sum at the top of each kernel."""
        tile, groups, tokens = int4_tile_bytes(group), TILE_K // group, self.tokens
        if self.kind == "reg":
            sums, block = 128 if tokens <= 2 else 512, self.warps_k
            return WARPS * (self.slots * (block * tile + 8) + self.strips * sums + block * groups * 32 + 32)
        depth = ceil_div(ceil_div(k, TILE_K), self.cluster)
        if self.kind == "few":
            tiles = ceil_div(depth, self.warps_k) * self.warps_k
            sums = self.strips * FEW_WARPS * 128 * max(1, tokens // 2)
            slots = self.slots * (FEW_WARPS * tile + 16)
            return slots + tiles * (tokens * 256 + groups * 32) + sums + FEW_WARPS * 32
        warps, nb, tiles = self.warpgroups * 4, tokens // 8, ceil_div(depth, self.phases)
        ring = ceil_div(warps * self.slots * self.chunk * tile, 128) * 128
        sums, x = self.warps_k * self.per_pass * nb * 512, tiles * tokens * 256
        one_pass = ceil_div(ceil_div(n, TILE_N), self.grid // self.cluster) <= self.per_pass
        both = max(sums, x) if one_pass else 2 * sums + x
        return ring + both + tiles * groups * tokens * 4 + warps // nb * tokens * 4 + warps * self.slots * 8

    @property
    def blocks_per_sm(self) -> int:
        """Two, so that the next kernel fills its rings; 64 tokens need the registers of one."""
        return 1 if self.tokens > 32 else 2

    @property
    def per_pass(self) -> int:
        """wgmma: strips of a cluster between two reductions."""
        return self.warpgroups // self.warps_k * 4 * self.strips


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


def wgmma(
    n: int,
    k: int,
    group: int,
    tokens: int,
    sms: int,
    cluster: int,
    warpgroups: int = 2,
    warps_k: int = 1,
    strips: int = 1,
    phases: int = 1,
    chunk: int = 4,
) -> Config | None:
    """A configuration on wgmma with as deep a ring as fits, or none when not even three chunks of a warp do."""
    tiles = ceil_div(k, TILE_K)
    if tiles < cluster * phases * warps_k or (warpgroups * 4) % (tokens // 8) or warpgroups % warps_k:
        return None
    chunk = min(chunk, ceil_div(ceil_div(tiles, cluster * phases), warps_k))
    units = _units(cluster, ceil_div(n, TILE_N), sms)
    config = Config(
        "wgmma", tokens, units * cluster, cluster, strips, 0, warps_k,
        warpgroups=warpgroups, phases=phases, chunk=chunk,
    )  # fmt: skip
    share = ceil_div(ceil_div(n, TILE_N), units)
    each = ceil_div(share, config.per_pass) * strips * phases
    each *= ceil_div(ceil_div(ceil_div(tiles, cluster * phases), warps_k), chunk)
    room = SMEM if config.blocks_per_sm == 2 else common.SMEM_MAX - 1024
    slots = (room - 128 - config.smem(n, k, group)) // (warpgroups * 4 * (chunk * int4_tile_bytes(group) + 8))
    return replace(config, slots=min(slots, each, 16)) if slots >= min(3, each) else None


def _wgmma(n: int, k: int, group: int, tokens: int, sms: int) -> Config:
    """The fewest blocks that split K with which x fits beside the ring and every warp has a strip."""
    share = ceil_div(n, TILE_N) / sms
    for cluster, phases in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16), (4, 16), (1, 1), (1, 64)):
        if cluster < 8 and share * cluster < 6 and ceil_div(k, TILE_K) >= 2 * cluster:
            continue
        for chunk in (4, 2, 1):
            found = wgmma(n, k, group, tokens, sms, cluster, phases=phases, chunk=chunk)
            if found is not None:
                return found
    raise AssertionError(f"no configuration for {n} x {k}, {tokens} tokens")


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
    tuned = TUNED.get((n, k, bound)) if sms == SMS else None
    if bound > 4:
        return _wgmma(n, k, group, bound, sms)
    kind = tuned.kind if tuned else "few"
    if kind == "reg":
        config = _reg(n, k, group, bound, sms, tuned.cluster if tuned else 1)
    else:
        few = [c for cluster in clusters if (c := _few(n, k, group, bound, sms, cluster)) is not None]
        # The fewest blocks that split K with which four stages, or all there are, fit beside x.
        deep = [c for c in few if c.slots >= min(4, ceil_div(ceil_div(k, TILE_K), c.cluster * c.warps_k))]
        config = deep[0] if deep else max(few, key=lambda c: c.slots)
    return replace(config, delay=tuned.delay) if tuned else config


def kernel_of(
    config: Config, n: int, k: int, group: int, half: bool, prologue: str, epilogue: str, gain: bool = False
) -> jit.Kernel:
    """The kernel of one configuration."""
    smem = config.smem(n, k, group)
    constants = {"N": n, "K": k, "GROUP": group, "TOKENS": config.tokens}
    constants |= {"GRID": config.grid, "CLUSTER": config.cluster}
    if config.kind == "wgmma":
        constants |= {"WARPGROUPS": config.warpgroups, "WK": config.warps_k, "S": config.strips}
        constants |= {"PHASES": config.phases, "CHUNK": config.chunk, "BLOCKS_PER_SM": config.blocks_per_sm}
    else:
        constants |= {"WK" if config.kind == "few" else "BLOCK": config.warps_k}
        constants |= {"PASS": config.strips, "LEAD": config.lead}
    constants |= {"SLOTS": config.slots, "DELAY": config.delay, "SMEM": smem, "GAIN": int(gain)}
    constants |= common.flags(half, prologue, epilogue)
    shape = jit.Shape(config.grid, config.threads, smem, config.cluster)
    return jit.Kernel(SOURCES[config.kind], constants, "p" + common.SIGNATURE, shape)


@functools.cache
def kernel(
    n: int, k: int, group: int, tokens: int, half: bool, prologue: str, epilogue: str, sms: int, gain: bool = False
) -> jit.Kernel:
    """The kernel that runs this call; compiled at its first launch."""
    return kernel_of(choose(n, k, group, tokens, sms), n, k, group, half, prologue, epilogue, gain)


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
    gain: Tensor | None = None,
) -> str | None:
    """Why this call is not ours, or none."""
    if group not in GROUPS:
        return f"group {group}; there are {GROUPS}"
    if packed.dtype != torch.uint8 or packed.numel() != int4_bytes(n, k, group) or not packed.is_contiguous():
        return "the weight is not a packed INT4 weight of this shape"
    if gain is not None:
        if prologue != "rms" or gain.shape != (k,) or gain.dtype != x.dtype or not gain.is_contiguous():
            return "the gain is not a vector like a row of the activations, or there is no norm"
        if x.dtype == torch.float16:
            return "float16: activations times their gain may leave its range"
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
    gain: Tensor | None = None,
) -> Tensor:
    """The operator ``linear_int4`` on the current CUDA stream."""
    tokens = next(t for t in TOKENS if x.numel() // k <= t)
    sms = common.multiprocessors(x.device.index)
    run = kernel(n, k, group, tokens, x.dtype == torch.float16, prologue, epilogue, sms, gain is not None)
    return common.launch(run, x, packed, n, k, bias, residual, eps, scale, epilogue, scales=(gain,))
