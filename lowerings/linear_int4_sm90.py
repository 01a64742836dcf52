"""``linear_int4`` on Hopper, 1 to 64 tokens.

``choose`` turns a shape into a kernel (SOURCES: one for 1 and 2 tokens, few to 4, many to 32; more run 32 at a time)
and a configuration (blocks, cluster, warps, rings) by counting bytes; ``TUNED`` holds what a measurement in a whole
layer said instead. A norm before more than four tokens is a kernel of its own, ``rms_rows_sm90.cu``.
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

MANY_WARPS = 11
"""Most warps of a many block that multiply, with 80 registers a thread; one more feeds them x."""
MANY_WARPS_FEW = 7
"""With 112 registers."""
FEW_TOKENS = 4
"""Most tokens whose norm every block takes by itself."""
FEW_WARPS = 16
"""Warps of a few block, with 64 registers."""
TOKENS = (1, 2, 4, 8, 16, 32)
"""Kernels are compiled for at most this many tokens; the call's own number is a parameter."""
SOURCES = {
    "one": "linear_int4_one_sm90.cu",
    "few": "linear_int4_sm90.cu",
    "many": "linear_int4_many_sm90.cu",
    "wgmma": "linear_int4_wgmma_sm90.cu",
}
NORMED = ("many", "wgmma")
"""Before these the norm is a launch of its own, which multiplies by the gain."""
_NORMED_SOURCES = frozenset(SOURCES[kind] for kind in NORMED)


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
    """strips of 16 rows: one, many: of a warp at a time; few: (groups of them) between two reductions"""
    slots: int
    """stages of the ring of weights"""
    warps_k: int = 1
    """warps along K"""
    delay: int = 700
    """clocks between a block's start and its first request for weights"""
    prefetch: int = 0
    """one, many: stages beyond the ring that are asked into L2 before the grid before has ended"""
    warps: int = 16
    """one: of a block"""
    chunk: int = 1
    """one, many: most tiles of a strip in a slot"""
    warps_n: int = 1
    """many: consumer warps along the rows; wgmma: warpgroups, as warps_k is there"""
    batch: int = 1
    """one: tiles of x that a warp prepares side by side"""
    xslots: int = 0
    """many: stages of the ring of x"""

    @property
    def threads(self) -> int:
        """Of a block."""
        warps = {"one": self.warps, "few": FEW_WARPS, "many": self.warps_n * self.warps_k + 1}
        warps["wgmma"] = 4 * (self.warps_n * self.warps_k + 1)
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

    def _smem_many(self, n: int, k: int, tile: int, groups: int) -> int:
        warps, step = self.warps_n * self.warps_k, self.warps_k * self.chunk
        weights = ceil_div(warps * self.slots * self.strips * self.chunk * tile, 128) * 128
        x = self.xslots * self.tokens * (step * 256 + 64 + (step * groups * 4 if self.tokens > 16 else 0))
        sums = 0 if self.cluster * self.warps_k == 1 else warps * self.strips * self.tokens * 64
        one_pass = ceil_div(ceil_div(n, TILE_N), self.grid // self.cluster) <= self.warps_n * self.strips
        rings = max(weights + x, sums) if one_pass else weights + x + sums
        return rings + self.tokens * 4 + self.xslots * 24 + warps * self.slots * 8

    def _smem_wgmma(self, n: int, k: int, tile: int, groups: int) -> int:
        warps, step, parts = 4 * self.warps_n * self.warps_k, self.warps_k * self.chunk, 32 // self.tokens
        weights = ceil_div(warps * self.slots * self.strips * self.chunk * tile, 128) * 128
        x = self.xslots * (step * self.tokens * 256 + ceil_div(step * parts * self.tokens * 4, 128) * 128)
        sums = 0 if self.cluster * self.warps_k == 1 else warps * self.strips * self.tokens * 64
        one_pass = ceil_div(ceil_div(n, TILE_N), self.grid // self.cluster) <= self.warps_n * self.strips * 4
        rings = max(weights + x, sums) if one_pass else weights + x + sums
        return rings + self.tokens * 4 + self.xslots * 16 + warps * self.slots * 8


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


def many(
    n: int,
    k: int,
    group: int,
    tokens: int,
    sms: int,
    cluster: int,
    warps_n: int,
    warps_k: int,
    strips: int,
    chunk: int,
    xslots: int,
) -> Config | None:
    """A configuration of the kernel for many tokens with as deep a ring of weights as fits, or none without two stages,
    or when a warp's sums do not fit its registers."""
    depth = ceil_div(ceil_div(k, TILE_K), cluster)
    warps, sums = warps_n * warps_k, strips * tokens // 8  # of 16 x 8, twice: of a group and of all
    if depth < warps_k * chunk or warps > MANY_WARPS or sums > (8 if warps <= MANY_WARPS_FEW else 2):
        return None
    units = _units(cluster, ceil_div(n, TILE_N), sms)
    passes = ceil_div(ceil_div(ceil_div(n, TILE_N), units), warps_n * strips)
    if cluster > 1 and passes > 1:
        return None
    steps = passes * ceil_div(depth, warps_k * chunk)
    config = Config(
        "many", tokens, units * cluster, cluster, strips, 1, warps_k, chunk=chunk, warps_n=warps_n,
        xslots=min(xslots, steps),
    )  # fmt: skip
    stage = warps_n * warps_k * (strips * chunk * int4_tile_bytes(group) + 8)
    slots = min(steps, 16, (SMEM - 256 - config.smem(n, k, group)) // stage + 1)
    return replace(config, slots=slots) if slots >= min(2, steps) else None


def many_configs(n: int, k: int, group: int, tokens: int, sms: int) -> list[Config]:
    """Every division of the work over warps that wastes little, cheapest first by :func:`_cost`."""
    found: dict[Config, float] = {}
    for cluster, strips, warps_n, chunk in itertools.product(
        (1, 2, 4), (1, 2, 3, 4, 7), range(1, MANY_WARPS + 1), (1, 2, 4)
    ):
        for warps_k in range(1, MANY_WARPS // warps_n + 1):
            c = many(n, k, group, tokens, sms, cluster, warps_n, warps_k, strips, chunk, 4)
            c = c or many(n, k, group, tokens, sms, cluster, warps_n, warps_k, strips, chunk, 2)
            if c is not None and c.smem(n, k, group) <= SMEM:
                found[c] = _cost(c, n, k)
    return sorted(found, key=lambda c: found[c])


def wgmma_configs(n: int, k: int, group: int, tokens: int, sms: int) -> list[Config]:
    """For ``--tune``: of the kernel on wgmma, which TUNED alone chooses. Cheapest first: strips that stand empty,
    passes over x."""
    found = []
    strips, tiles = ceil_div(n, TILE_N), ceil_div(k, TILE_K)
    shapes = itertools.product((1, 2, 4), ((1, 1), (1, 2), (2, 1)), (1, 2), (1, 2, 4), (3, 2))
    for cluster, (warps_n, warps_k), each, chunk, xslots in shapes if group == TILE_K and tokens >= 8 else ():
        depth, units = ceil_div(tiles, cluster), _units(cluster, strips, sms)
        rows = warps_n * each * 4
        passes = ceil_div(ceil_div(strips, units), rows)
        if depth < warps_k * chunk or (cluster > 1 and passes > 1):
            continue
        config = Config(
            "wgmma", tokens, units * cluster, cluster, each, 1, warps_k, chunk=chunk, warps_n=warps_n, xslots=xslots
        )
        stage = rows * warps_k * chunk * int4_tile_bytes(group) + 32 * warps_n * warps_k
        slots = min(16, passes * ceil_div(depth, warps_k * chunk), (SMEM - 128 - config.smem(n, k, group)) // stage + 1)
        if slots >= 2:
            empty = passes * rows * units / strips
            found.append((empty + 0.2 * passes - 0.1 * warps_n * warps_k, replace(config, slots=slots)))
    return [config for _, config in sorted(found, key=lambda f: f[0])]


def _cost(config: Config, n: int, k: int) -> float:
    """Of a block of a many kernel, in bytes of memory: weights, with the time that warps without a strip or a tile
    stand still; x, from L2 and, once for each warp along the rows, from shared memory; sums."""
    units, tiles = config.grid // config.cluster, ceil_div(k, TILE_K)
    share, rows = ceil_div(ceil_div(n, TILE_N), units), config.warps_n * config.strips
    passes, step = ceil_div(share, rows), config.warps_k * config.chunk
    steps = ceil_div(ceil_div(tiles, config.cluster), step)
    busy = passes * rows * steps * step * MANY_WARPS / (config.warps_n * config.warps_k)
    x = passes * steps * step * TILE_K * config.tokens * 2
    sums = config.warps_k * share * TILE_N * config.tokens * 4 if config.cluster * config.warps_k > 1 else 0
    return (
        busy * TILE_N * TILE_K * 0.53 + (0.8 + 0.3 * config.warps_n) * x + sums * config.cluster + passes * steps * 4000
    )


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
    if bound > FEW_TOKENS:
        return many_configs(n, k, group, bound, sms)[0]
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
        constants |= {"BATCH": config.batch}
    elif config.kind in NORMED:
        constants |= {"WN": config.warps_n, "WK": config.warps_k, "S": config.strips, "CHUNK": config.chunk}
        constants |= {"XSLOTS": config.xslots}
    else:
        constants |= {"WK": config.warps_k, "PASS": config.strips, "LEAD": -1}
    constants |= {"SLOTS": config.slots, "DELAY": config.delay, "PREFETCH": config.prefetch, "SMEM": smem}
    if config.kind not in NORMED:
        constants |= {"GAIN": int(gain)}
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


@functools.cache
def norm_kernel(k: int, rows: int, half: bool, gain: bool) -> jit.Kernel:
    """What runs before a many kernel with a norm."""
    constants = {"K": k, "HALF": int(half), "GAIN": int(gain)}
    return jit.Kernel("rms_rows_sm90.cu", constants, "ppppif", jit.Shape(rows, 128, 0))


def _normalise(x: Tensor, k: int, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., K] times the gain, and the reciprocal root mean square of its rows, float32 [M]."""
    rows = x.numel() // k
    y = x if gain is None else x.new_empty(x.shape)
    x, ldx = common.rows(x, k)
    rstd = x.new_empty(rows, dtype=torch.float32)
    device, pointer = x.device.index, None if gain is None else gain.data_ptr()
    stream = torch.cuda.current_stream(device).cuda_stream
    run = norm_kernel(k, rows, x.dtype == torch.float16, gain is not None)
    run(device, stream, x.data_ptr(), pointer, y.data_ptr(), rstd.data_ptr(), ldx, eps)
    return y, rstd


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
    sms, half = common.multiprocessors(x.device.index), x.dtype == torch.float16

    def run(x: Tensor, residual: Tensor | None, y: Tensor | None) -> Tensor:
        made = kernel(n, k, group, x.numel() // k, half, prologue, epilogue, sms, gain is not None)
        return launch_with(made, x, packed, n, k, bias, residual, eps, scale, prologue, epilogue, gain, y)

    return common.in_parts(x, n, k, residual, epilogue, TOKENS[-1], run)


def launch_with(
    kernel: jit.Kernel,
    x: Tensor,
    packed: Tensor,
    n: int,
    k: int,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    scale: float,
    prologue: str,
    epilogue: str,
    gain: Tensor | None,
    y: Tensor | None = None,
) -> Tensor:
    """One kernel of :func:`kernel_of`; before one of the kinds in NORMED, the norm."""
    norm = gain
    if kernel.source in _NORMED_SOURCES:
        x, norm = _normalise(x, k, gain, eps) if prologue == "rms" else (x, None)
    return common.launch(kernel, x, packed, n, k, bias, residual, eps, scale, epilogue, y, (norm,))
