"""``linear_int4`` on Hopper, 1 to 64 tokens.

``choose`` turns a shape into a kernel (SOURCES) and a configuration (blocks, cluster, warps, rings) by counting bytes
and instructions; ``TUNED`` holds what a measurement in a whole layer said instead. More than 32 tokens run 32 at a
time. Above PREPARED tokens a kernel of its own, ``arrange_rows_sm90.cu``, puts x in order once for all blocks.
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

WARPS = 16
"""Most warps of a block that multiply; in the kernel for floats others bring weights and x."""
SMEM_ALONE = 229_376
"""Shared memory of the one block of a multiprocessor: what is left is for blocks of arrange_rows."""
FLIGHT = 65_536
"""Bytes of weights of a multiprocessor on their way at once: more does not make memory faster, and x waits behind."""
PREPARED = 8
"""Most tokens whose x every block puts in order by itself."""
TOKENS = (1, 2, 4, 8, 16, 32)
"""Kernels are compiled for at most this many tokens; the call's own number is a parameter."""
SOURCES = {"integer": "linear_int4_one_sm90.cu", "float": "linear_int4_sm90.cu"}


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
    """strips of 16 rows of a warp at a time"""
    slots: int
    """stages of a warp's ring of weights"""
    warps_n: int
    """warps along the rows; with wgmma warpgroups, as warps_k"""
    warps_k: int
    """warps along K"""
    chunk: int = 1
    """most tiles of a strip in a stage"""
    delay: int = 700
    """clocks between a block's start and its first request for weights"""
    pace: int = 0
    """clocks between two warps' first requests for weights, or as many for each warp that a request is for"""
    flight: int = 0
    """float: most stages of weights that are on their way at once, 0: all of the ring; x waits behind them"""
    prefetch: int = 0
    """stages beyond the ring that are asked into L2 before the grid before has ended"""
    batch: int = 1
    """integer: tiles of x that a warp prepares side by side"""
    prepare: bool = False
    """float: every block puts its x in order by itself, which is no launch more"""
    wgmma: bool = False
    """float: four warps multiply together, x is read from shared memory by the tensor cores"""
    xslots: int = 0
    """float, not prepare: stages of the ring of x"""
    share: int = 1
    """float, not prepare: blocks, each with rows of its own, among which one copy of x goes from L2 (multicast)"""

    @property
    def way(self) -> tuple[int, int, bool, bool]:
        """float: what divisions of one kind have in common: cluster, share, prepare, wgmma."""
        return self.cluster, self.share, self.prepare, self.wgmma

    @property
    def warps(self) -> int:
        """Of a block, that multiply."""
        return self.warps_n * self.warps_k * (4 if self.wgmma else 1)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + (2 - self.prepare) * (self.kind == "float"))

    def stage(self, group: int) -> int:
        """Bytes of weights of a block in one stage of its ring."""
        return self.warps * self.strips * self.chunk * int4_tile_bytes(group)

    @property
    def registers(self) -> int:
        """float: of a thread, beside one warp of arrange_rows on each of the four register files."""
        return _registers(self.threads // 32)

    @property
    def limit(self) -> int:
        """Most bytes of shared memory."""
        return SMEM if self.kind == "integer" else SMEM_ALONE

    def smem(self, n: int, k: int, group: int) -> int:
        """Bytes of shared memory: the sum at the top of each kernel."""
        warps = self.warps
        depth = ceil_div(ceil_div(k, TILE_K), self.cluster)
        ring = ceil_div(self.slots * self.stage(group), 128) * 128
        if self.kind == "integer":
            x_tile = 768 if self.tokens == 2 else 512 if depth <= 64 else 384
            sums = 384 * self.warps_k * self.warps_n * self.strips
            return ring + depth * (x_tile + TILE_K // group * 32) + sums + 8 * warps * (1 + self.slots)
        if self.prepare:  # 64 bytes behind every 32 columns
            x = depth * 4 * (self.tokens * 64 + 64)
        else:
            x = self.xslots * self.warps_k * self.chunk * record(self.tokens, group, self.wgmma)
        sums = 0 if self.cluster * self.warps_k == 1 else warps * self.strips * max(8, self.tokens) * 64
        one_pass = ceil_div(ceil_div(n, TILE_N), self.grid // self.cluster) <= warps // self.warps_k * self.strips
        rings = max(ring + x, sums) if one_pass else ring + x + sums
        bars = warps * 32 if self.prepare else self.xslots * (16 if self.share == 1 else 24)
        return rings + max(8, self.tokens) * 4 + bars + self.slots * 16


def record(tokens: int, group: int, wgmma: bool) -> int:
    """Bytes of 128 columns of x and their sums, as arrange_rows_sm90.cu leaves them."""
    return tokens * (256 + (16 if wgmma else TILE_K // group * 4))


def bound(tokens: int) -> int:
    """Of TOKENS: what runs so many tokens, or the largest, which runs more in parts."""
    return next((t for t in TOKENS if tokens <= t), TOKENS[-1])


def _units(cluster: int, strips: int, sms: int) -> int:
    # Not every GPC has a multiple of four SMs: of 132, 30 clusters of four fit, and a block that has to wait for
    # another takes the whole grid twice as long.
    return max(1, min(sms // cluster if cluster <= 2 else sms // cluster - 3, strips))


def integer(
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
    config = Config("integer", tokens, units * cluster, cluster, strips, 0, warps // warps_k, warps_k, chunk)
    each = ceil_div(ceil_div(ceil_div(n, TILE_N), units), config.warps_n * strips)
    each *= ceil_div(ceil_div(ceil_div(tiles, cluster), warps_k), chunk)
    slots = (SMEM - 128 - config.smem(n, k, group)) // (config.stage(group) + 8 * warps)
    return replace(config, slots=min(slots, each, 16)) if slots >= min(2, each) else None


def _integer(n: int, k: int, group: int, tokens: int, sms: int) -> Config:
    """Warps along K as long as that leaves a strip for every warp, the ring in chunks of two tiles where they fit."""
    share = max(1.0, ceil_div(n, TILE_N) / sms)
    for cluster, warps_k, chunk in itertools.product((1, 2, 4, 8), (4, 8, 16), (2, 1)):
        if 16 // warps_k > share * cluster and warps_k < 16:
            continue
        found = integer(n, k, group, tokens, sms, cluster, 16, warps_k, 1, chunk)
        if found is not None:
            return found
    raise AssertionError(f"no configuration for {n} x {k}, {tokens} tokens")


def _registers(warps: int) -> int:
    return min(232, (16384 - 1024) // (32 * ceil_div(warps, 4)) // 8 * 8)


def floats(
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
    xslots: int = 0,
    prepare: bool = False,
    wgmma: bool = False,
    half: bool = False,
    share: int = 1,
) -> Config | None:
    """A configuration in floats with as deep a ring of weights as fits; none without two stages, when a warp's sums do
    not fit its registers, or when half of the warps along the rows have nothing to do."""
    depth, warps = ceil_div(ceil_div(k, TILE_K), cluster), warps_n * warps_k * (4 if wgmma else 1)
    units = _units(cluster, ceil_div(n, TILE_N), sms) // share * share
    if share > 1 and (cluster > 1 or prepare or units == 0):
        return None
    most, rows = ceil_div(ceil_div(n, TILE_N), units), warps // warps_k * strips
    passes = ceil_div(most, rows)
    if depth < warps_k * chunk or warps > WARPS or (cluster > 1 and passes > 1):
        return None
    if rows >= 2 * most and warps_n > 1:
        return None
    # sums; operands of two vectors of weights, or x and words of every strip; the rest: what did not spill
    registers = strips * tokens // 2
    if wgmma:
        registers += 62 if strips > 1 and warps > 12 else 72 + 12 * (strips > 1 and chunk > 1)
    else:
        registers += tokens // 2 + 8 * strips + 24 + 36 * (group < TILE_K) + 12 * half
    if prepare:  # every lane has some of x at once
        registers = max(registers, 4 * tokens * ceil_div(depth * 16, 32 * warps) + 24)
    if registers > _registers(warps + 2 - prepare):
        return None
    steps = passes * ceil_div(depth, warps_k * chunk)
    config = Config(
        "float", tokens, units * cluster, cluster, strips, 1, warps_n, warps_k, chunk,
        prepare=prepare, wgmma=wgmma, xslots=0 if prepare else min(xslots, steps), share=share,
    )  # fmt: skip
    stage = config.stage(group) + 16
    slots = min(steps, 16, (config.limit - 256 - config.smem(n, k, group)) // stage + 1)
    if slots < min(2, steps):
        return None
    return replace(config, slots=slots, delay=0, flight=min(slots, max(1, FLIGHT // stage)))


def configs(
    n: int,
    k: int,
    group: int,
    tokens: int,
    sms: int,
    half: bool = False,
    rings: tuple[int, ...] = (4, 3, 2),
) -> list[Config]:
    """Divisions of the work in floats, cheapest first by :func:`_cost`; rings: stages of x to try."""
    found: list[Config | None] = []
    wgmma = (False, True) if group == TILE_K and not half else (False,)
    warps = [(a, b) for a in range(1, WARPS + 1) for b in range(1, WARPS // a + 1)]
    for each in itertools.product((1, 2), warps, (1, 2, 3, 4), (1, 2, 3, 4)):  # larger clusters do not all fit at once
        cluster, (warps_n, warps_k), strips, chunk = each
        division = (n, k, group, tokens, sms, cluster, warps_n, warps_k, strips, chunk)
        if tokens <= PREPARED:
            found.append(floats(*division, prepare=True, half=half))
        if tokens >= 8:
            for xslots, wg, share in itertools.product(rings, wgmma, (1, 2) if cluster == 1 else (1,)):
                found.append(floats(*division, xslots, wgmma=wg, half=half, share=share))
    return sorted({c for c in found if c is not None}, key=lambda c: (_cost(c, n, k), repr(c)))


def _cost(config: Config, n: int, k: int) -> float:
    """Microseconds, roughly."""
    units, strips, tiles = config.grid // config.cluster, ceil_div(n, TILE_N), ceil_div(k, TILE_K)
    warps, step = config.warps, config.warps_k * config.chunk
    rows, depth = warps // config.warps_k * config.strips, ceil_div(tiles, config.cluster)
    passes, steps = ceil_div(ceil_div(strips, units), rows), ceil_div(depth, step)
    weights, x = strips * tiles * 1072, config.grid // config.share * passes * depth * TILE_K * config.tokens * 2
    # tiles of the busiest warp; cycles of its quarter of a multiprocessor: issue or tensor cores
    each = passes * config.strips * steps * config.chunk
    slots = 110 + config.tokens / 2 + 24 / config.chunk if config.wgmma else max(110, 7 * config.tokens)
    work = each * slots * ceil_div(warps, 4) / 1.9e3 * (1 + 8 / warps)
    flight = (config.slots - 1) * config.stage(TILE_K)
    memory = max(weights / 4.3e6, (weights + x) / (5.2e6 * config.grid / SMS))
    memory *= 1 + max(0, 100_000 - flight) / 200_000
    sums = config.warps_k * rows * config.tokens * 64 if config.cluster * config.warps_k > 1 else 0
    both = max(memory, work) + 0.3 * min(memory, work) + passes * steps * config.chunk * 0.02
    launches = 0 if config.prepare else 3.5
    return both - 0.2 * min(config.chunk, 3) + launches + passes * (sums * 1e-5 + (config.cluster > 1))


TUNED: dict[tuple[int, int, int], Config] = {key: Config(**values) for key, values in tuned_int4_sm90.TUNED.items()}
"""(n, k, tokens) -> what was fastest in a whole layer on 132 multiprocessors, group 128, bfloat16."""


@functools.cache
def choose(n: int, k: int, group: int, tokens: int, sms: int = SMS, half: bool = False) -> Config:
    """The configuration for an [n, k] weight and at most ``tokens`` tokens on ``sms`` multiprocessors.

    Args:
        half: float16 activations.
    """
    most = bound(tokens)
    tuned = TUNED.get((n, k, most)) if sms == SMS and group == 128 and not half else None
    if tuned is not None:
        return tuned
    if most <= 2:
        return _integer(n, k, group, most, sms)
    found = configs(n, k, group, most, sms, half) or configs(n, k, group, 8, sms, half)
    return found[0]


def kernel_of(
    config: Config,
    n: int,
    k: int,
    group: int,
    half: bool,
    prologue: str,
    epilogue: str,
    gain: bool = False,
    stamps: bool = False,
) -> jit.Kernel:
    """The kernel of one configuration; ``stamps``: without a bias, whose place takes times instead."""
    smem = config.smem(n, k, group)
    constants = {"N": n, "K": k, "GROUP": group, "TOKENS": config.tokens}
    constants |= {"GRID": config.grid, "CLUSTER": config.cluster, "WN": config.warps_n, "WK": config.warps_k}
    constants |= {"S": config.strips, "CHUNK": config.chunk, "SLOTS": config.slots}
    constants |= {"DELAY": config.delay, "PACE": config.pace, "PREFETCH": config.prefetch}
    constants |= {"SMEM": smem, "STAMPS": int(stamps)}
    if config.kind == "integer":
        constants |= {"BATCH": config.batch, "GAIN": int(gain)}
    else:
        constants |= {"XSLOTS": config.xslots, "SHARE": config.share, "REGISTERS": config.registers}
        constants |= {"FLIGHT": config.flight or config.slots}
        constants |= {"WG": int(config.wgmma), "PREPARE": int(config.prepare), "GAIN": int(gain and config.prepare)}
    constants |= common.flags(half, prologue, epilogue)
    shape = jit.Shape(config.grid, config.threads, smem, config.cluster * config.share)
    return jit.Kernel(SOURCES[config.kind], constants, "p" + common.SIGNATURE, shape)


def kernel(
    n: int, k: int, group: int, tokens: int, half: bool, prologue: str, epilogue: str, sms: int, gain: bool = False
) -> jit.Kernel:
    """The kernel that runs this call; compiled at its first launch."""
    return _kernel(n, k, group, bound(tokens), half, prologue, epilogue, sms, gain)


@functools.cache
def _kernel(
    n: int, k: int, group: int, tokens: int, half: bool, prologue: str, epilogue: str, sms: int, gain: bool
) -> jit.Kernel:
    config = choose(n, k, group, tokens, sms, half)
    return kernel_of(config, n, k, group, half, prologue, epilogue, gain)


def arrange_kernel(kernel: jit.Kernel, gain: bool) -> jit.Kernel | None:
    """What runs before a kernel of this module, with a gain or without: a block for each token and part of its row, and
    with a norm one more for the token; none before those that read x as it is."""
    if kernel.constants.get("PREPARE") != 0:
        return None
    names = ("K", "GROUP", "TOKENS", "HALF", "RMS", "WG")
    return _arrange_kernel(*(kernel.constants[name] for name in names), gain)


@functools.cache
def _arrange_kernel(k: int, group: int, tokens: int, half: int, rms: int, wg: int, gain: bool) -> jit.Kernel:
    # 3 or 4 times 16 bytes of a thread are what 32 registers hold; more blocks than fit at once would begin late
    parts = min(ceil_div(ceil_div(k, TILE_K) * 16, 384 if gain else 512), max(1, SMS // tokens - rms))
    constants = {"K": k, "GROUP": group, "TOKENS": tokens, "PARTS": parts, "HALF": half, "RMS": rms, "WG": wg}
    shape = jit.Shape(tokens * (parts + rms), 128, 0)
    return jit.Kernel("arrange_rows_sm90.cu", constants | {"GAIN": int(gain)}, "ppppif", shape)


def _arrange(
    run: jit.Kernel, x: Tensor, k: int, prologue: str, gain: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """x [M, K] as arrange_rows_sm90.cu says (bytes), and rstd, float32 [M], with a norm."""
    rows, c = x.numel() // k, run.constants
    x, ldx = common.rows(x, k)
    size = ceil_div(k, TILE_K) * record(c["TOKENS"], c["GROUP"], bool(c["WG"]))
    records = x.new_empty(size, dtype=torch.uint8)
    rstd = x.new_empty(rows, dtype=torch.float32) if prologue else None
    device = x.device.index
    run(
        device,
        torch.cuda.current_stream(device).cuda_stream,
        x.data_ptr(),
        None if gain is None else gain.data_ptr(),
        records.data_ptr(),
        None if rstd is None else rstd.data_ptr(),
        ldx,
        eps,
        grid=rows * (c["PARTS"] + c["RMS"]),
    )
    return records, rstd


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
    """One kernel of :func:`kernel_of`, behind the one that puts x in order if it needs that."""
    norm, before = gain, arrange_kernel(kernel, gain is not None)
    if before is not None:
        if y is None:
            y = x.new_empty((*x.shape[:-1], common.columns_of(n, epilogue)))
        x, norm = _arrange(before, x, k, prologue, gain, eps)
    return common.launch(kernel, x, packed, n, k, bias, residual, eps, scale, epilogue, y, (norm,))
