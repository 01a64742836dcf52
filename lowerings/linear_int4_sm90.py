"""``linear_int4`` on Hopper, 1 to 64 tokens.

``choose`` turns a shape into a kernel (SOURCES: one for 1 and 2 tokens, few to 4, reg to 8, wide to 32; more run 32 at
a time) and a configuration (blocks, cluster, warps, ring) by counting bytes; ``TUNED`` holds what a measurement in a
whole layer said instead.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from fu_compile.lowerings import decode_linear as common
from fu_compile.lowerings import tuned_int4_sm90
from fu_compile.lowerings.decode_linear import SMEM, SMS, ceil_div
from torch import Tensor

from fu_compile import jit
from fu_compile.formats import GROUPS, TILE_K, TILE_N, int4_bytes, int4_tile_bytes

WARPS = 8
"""Warps of a reg block, with 128 registers a thread."""
FEW_WARPS = 16
"""Warps of a few block, with 64 registers."""
TOKENS = (1, 2, 4, 8, 16, 32)
"""Kernels are compiled for at most this many tokens; the call's own number is a parameter."""
SOURCES = {
    "one": "linear_int4_one_sm90.cu",
    "few": "linear_int4_sm90.cu",
    "reg": "linear_int4_reg_sm90.cu",
    "wide": "linear_int4_wide_sm90.cu",
}


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
    """strips of 16 rows: one, wide: of a warp at a time; few, reg: (groups of them) between two reductions"""
    slots: int
    """stages of the ring"""
    warps_k: int = 1
    """warps along K; reg: tiles of a slot and of the x that a warp holds, 2 or 4"""
    delay: int = 700
    """clocks between a block's start and its first request for weights"""
    warps: int = 16
    """one: of a block"""
    chunk: int = 1
    """one: most tiles of a strip in a slot"""
    warps_n: int = 1
    """wide: consumer warps along the rows"""

    @property
    def threads(self) -> int:
        """Of a block."""
        warps = {"one": self.warps, "few": FEW_WARPS, "reg": WARPS, "wide": self.warps_n * self.warps_k + 1}
        return warps[self.kind] * 32

    @property
    def per_pass(self) -> int:
        """one: strips of a cluster between two reductions."""
        return self.warps // self.warps_k * self.strips

    def smem(self, n: int, k: int, group: int) -> int:
        """Bytes of shared memory: the sum at the top of each kernel."""
        return getattr(self, f"_smem_{self.kind}")(n, k, int4_tile_bytes(group), TILE_K // group)

    def _smem_one(self, n: int, k: int, tile: int, groups: int) -> int:
        depth = ceil_div(ceil_div(k, TILE_K), self.cluster)
        ring = ceil_div(self.warps * self.slots * self.strips * self.chunk * tile, 128) * 128
        x_tile = 768 if self.tokens == 2 else 512 if depth <= 64 else 384
        return (
            ring
            + depth * (x_tile + groups * 32)
            + 384 * self.warps_k * self.per_pass
            + 8 * self.warps * (1 + self.slots)
        )

    def _smem_few(self, n: int, k: int, tile: int, groups: int) -> int:
        depth = ceil_div(ceil_div(k, TILE_K), self.cluster)
        tiles = ceil_div(depth, self.warps_k) * self.warps_k
        sums = self.strips * FEW_WARPS * 128 * max(1, self.tokens // 2)
        slots = self.slots * (FEW_WARPS * tile + 16)
        return slots + tiles * (self.tokens * 256 + groups * 32) + sums + FEW_WARPS * 32

    def _smem_reg(self, n: int, k: int, tile: int, groups: int) -> int:
        sums, block = 128 if self.tokens <= 2 else 512, self.warps_k
        return WARPS * (self.slots * (block * tile + 8) + self.strips * sums + block * groups * 32 + 32 + 16)

    def _smem_wide(self, n: int, k: int, tile: int, groups: int) -> int:
        nb, rows = self.tokens // 8, self.warps_n * self.strips
        slot = rows * self.warps_k * tile + self.warps_k * (nb * 2048 + groups * self.tokens * 4)
        slot = ceil_div(slot, 128) * 128
        sums = 0 if self.cluster * self.warps_k == 1 else self.warps_k * rows * nb * 512
        one_pass = ceil_div(ceil_div(n, TILE_N), self.grid // self.cluster) <= rows
        ring = max(self.slots * slot, sums) if one_pass else self.slots * slot + sums
        return ring + self.tokens * 4 + self.slots * (16 + self.warps_n * self.warps_k * 8)


def _units(cluster: int, strips: int, sms: int) -> int:
    # Not every GPC has a multiple of four SMs: 32 clusters of four or 16 of eight do not all fit with one block on an
    # SM, and two blocks of one grid on an SM take twice as long as the others.
    return max(1, min(sms // cluster if cluster <= 2 else sms // cluster - 2, strips))


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


def one(
    n: int,
    k: int,
    group: int,
    tokens: int,
    sms: int,
    cluster: int = 1,
    warps: int = 16,
    warps_k: int = 16,
    strips: int = 2,
    chunk: int = 2,
) -> Config | None:
    """A configuration in integers with as deep a ring as fits, or none when no two chunks of a warp do."""
    tiles = ceil_div(k, TILE_K)
    if tiles < cluster or warps % warps_k:
        return None
    chunk = min(chunk, ceil_div(ceil_div(tiles, cluster), warps_k))
    units = _units(cluster, ceil_div(n, TILE_N), sms)
    config = Config("one", tokens, units * cluster, cluster, strips, 0, warps_k, warps=warps, chunk=chunk)
    each = ceil_div(ceil_div(ceil_div(n, TILE_N), units), config.per_pass)
    each *= ceil_div(ceil_div(ceil_div(tiles, cluster), warps_k), chunk)
    slots = (SMEM - 128 - config.smem(n, k, group)) // (warps * (strips * chunk * int4_tile_bytes(group) + 8))
    return replace(config, slots=min(slots, each, 16)) if slots >= min(2, each) else None


def _one(n: int, k: int, group: int, tokens: int, sms: int) -> Config:
    """Warps along K as long as that leaves a strip for every warp, the ring in chunks of two tiles where they fit."""
    share = max(1.0, ceil_div(n, TILE_N) / sms)
    for cluster, warps_k, chunk in itertools.product((1, 2, 4, 8), (4, 8, 16), (2, 1)):
        if 16 // warps_k > share * cluster and warps_k < 16:
            continue
        found = one(n, k, group, tokens, sms, cluster, 16, warps_k, 1, chunk)
        if found is not None:
            return found
    raise AssertionError(f"no configuration for {n} x {k}, {tokens} tokens")


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
            config = Config("wide", tokens, units * cluster, cluster, each, slots, warps_k, warps_n=warps_n)
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


TUNED: dict[tuple[int, int, int], Config] = {key: Config(**values) for key, values in tuned_int4_sm90.TUNED.items()}
"""(n, k, tokens) -> what was fastest in a whole layer on 132 multiprocessors, group 128."""


@functools.cache
def choose(n: int, k: int, group: int, tokens: int, sms: int = SMS) -> Config:
    """The configuration for an [n, k] weight and at most ``tokens`` tokens on ``sms`` multiprocessors."""
    bound = next(t for t in TOKENS if tokens <= t)
    if sms == SMS and group == 128 and (n, k, bound) in TUNED:
        return TUNED[n, k, bound]
    if bound <= 2:
        return _one(n, k, group, bound, sms)
    if bound > 8:
        # Clusters of four and eight read x less often and measured slower all the same (8B, 32 tokens).
        options = [c for cluster in (1, 2) if (c := _wide(n, k, group, bound, sms, cluster)) is not None]
        return min(options, key=lambda c: _bytes(c, n, k))
    if bound == 8:  # every block's copy of x is traffic that counts, and x in registers is read once
        return _reg(n, k, group, bound, sms, 2 if k >= 8192 and n <= 16 * sms * 5 else 1)
    few = [c for cluster in (1, 2, 4, 8) if (c := _few(n, k, group, bound, sms, cluster)) is not None]
    # The fewest blocks that split K with which four stages, or all there are, fit beside x.
    deep = [c for c in few if c.slots >= min(4, ceil_div(ceil_div(k, TILE_K), c.cluster * c.warps_k))]
    return deep[0] if deep else max(few, key=lambda c: c.slots)


def kernel_of(
    config: Config, n: int, k: int, group: int, half: bool, prologue: str, epilogue: str, gain: bool = False
) -> jit.Kernel:
    """The kernel of one configuration."""
    smem = config.smem(n, k, group)
    constants = {"N": n, "K": k, "GROUP": group, "TOKENS": config.tokens}
    constants |= {"GRID": config.grid, "CLUSTER": config.cluster}
    if config.kind == "one":
        constants |= {"WARPS": config.warps, "WK": config.warps_k, "S": config.strips, "CHUNK": config.chunk}
    elif config.kind == "wide":
        constants |= {"WN": config.warps_n, "WK": config.warps_k, "S": config.strips, "BLOCKS_PER_SM": 2, "LEAD": -1}
    else:
        constants |= {"WK" if config.kind == "few" else "BLOCK": config.warps_k}
        constants |= {"PASS": config.strips, "LEAD": -1}
    constants |= {"SLOTS": config.slots, "DELAY": config.delay, "SMEM": smem, "GAIN": int(gain)}
    constants |= common.flags(half, prologue, epilogue)
    shape = jit.Shape(config.grid, config.threads, smem, config.cluster)
    return jit.Kernel(SOURCES[config.kind], constants, "p" + common.SIGNATURE, shape)


def kernel(
    n: int, k: int, group: int, tokens: int, half: bool, prologue: str, epilogue: str, sms: int, gain: bool = False
) -> jit.Kernel:
    """The kernel that runs this call; compiled at its first launch."""
    return _kernel(
        n, k, group, next((t for t in TOKENS if tokens <= t), TOKENS[-1]), half, prologue, epilogue, sms, gain
    )


@functools.cache
def _kernel(
    n: int, k: int, group: int, tokens: int, half: bool, prologue: str, epilogue: str, sms: int, gain: bool
) -> jit.Kernel:
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
    columns = n // 2 if "swiglu" in epilogue else n
    tokens, most = x.numel() // k, TOKENS[-1]
    sms, half = common.multiprocessors(x.device.index), x.dtype == torch.float16
    if tokens <= most:
        run = kernel(n, k, group, tokens, half, prologue, epilogue, sms, gain is not None)
        return common.launch(run, x, packed, n, k, bias, residual, eps, scale, epilogue, scales=(gain,))
    y = x.new_empty((*x.shape[:-1], columns))
    rows, out = x.reshape(tokens, k), y.view(tokens, columns)
    added = residual.reshape(tokens, columns) if residual is not None and "residual" in epilogue else None
    for i in range(0, tokens, most):
        run = kernel(n, k, group, min(most, tokens - i), half, prologue, epilogue, sms, gain is not None)
        more = None if added is None else added[i : i + most]
        part = rows[i : i + most]
        common.launch(run, part, packed, n, k, bias, more, eps, scale, epilogue, out[i : i + most], scales=(gain,))
    return y
