"""INT4 codes for a model's weights: round to nearest, round to nearest with calibrated ranges, GPTQ.

::

    weight W [N, K], second moments H = X^T X of its input [K, K]

    ranges     per row and group the scale that minimises sum_k H_kk (w_k - q_k)^2, from the unmodified weight
    order      columns by falling H_kk, so that the error of what matters most can still be corrected by all others
    columns    one after the other: round, and spread the error over the columns not yet rounded (H^-1 decides how)
    refit      with the codes fixed, the scales of a row that minimise (w - q) H (w - q)^T
    sweep      with the scales fixed, each code in turn becomes the best one given all others; then refit again

The groups are those of the stored columns whatever the order ("static groups"), so nothing has to be permuted at run
time. Sources: GPTQ (Frantar et al., 2022), activation order and static groups as in its reference implementation;
coordinate descent: QuantEase (Behdin et al., 2023). What each step is worth: docs/numerics.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fu_compile import formats
from fu_compile.calibration import Moments, Part, Walk, as_rows, decoder_layers, moved
from fu_compile.errors import DataError, DtypeError, FormatError, FuWarning, NoLlamaBlockError, OptionError
from fu_compile.formats import Int4Codes
from fu_compile.models import check
from fu_compile.options import PRECISIONS

METHODS = ("gptq", "rtn")
GRIDS = ("asym", "sym8")

RATIOS = tuple(1.0 - 0.025 * i for i in range(15))
"""Fractions of a group's full range that the range search tries: 1.0 down to 0.65."""

SWEEPS = 2
"""Sweeps over the codes after GPTQ: later ones change ever less."""

NORMS = ("norm", "final_layernorm")
"""Names of the norm in front of the output head."""

_FLOOR = 1e-3
"""Least weight of a column in the range search, in means of diag(H): a column that calibration never used keeps a
range."""

_COLUMNS = 128
"""Columns whose corrections are applied one by one; the rest of the matrix gets them in one product."""

_CHUNK = 1 << 20
"""Weights searched at a time: the temporaries stay in a CPU's cache."""
_ROWS = 1 << 27
"""Weights whose columns are rounded at a time: 512 MB in float32, and two more of it as temporaries."""

_MANIFEST = "quantize.json"
_FORMAT = 1


@dataclass(frozen=True)
class Block:
    """One finished decoder layer (or the output head)."""

    name: str
    """``model.layers.0``"""
    layers: dict[str, Int4Codes]
    """Full name of a linear (``model.layers.0.mlp.down_proj``) -> its codes, on the device of its weight."""
    errors: dict[str, float]
    """Full name -> sum of |(W - Q) x|^2 over sum of |W x|^2 on the calibration text, in the metric that the method
    minimised (v_proj: inputs weighted by received attention). Without calibration: |W - Q|^2 over |W|^2."""
    notes: tuple[str, ...] = field(default=())
    """What was not as usual: damping that had to be raised, inputs that were never used."""


@dataclass(frozen=True)
class Choice:
    """How one linear is quantised."""

    method: str
    group_size: int
    grid: str


@dataclass(frozen=True)
class Solver:
    """How hard GPTQ tries."""

    damping: float = 0.01
    """Added to the diagonal of H, in means of it."""
    refit: bool = True
    """Least-squares refit of the scales, after GPTQ and after each sweep."""
    sweeps: int = SWEEPS
    """Sweeps of coordinate descent over the codes after GPTQ."""


def quantize_blocks(
    model: nn.Module,
    batches: Tensor | Iterable[Tensor] | None = None,
    *,
    method: str = "gptq",
    group_size: int = 128,
    grid: str = "asym",
    overrides: Iterable[tuple[str, str | Mapping[str, Any]]] = (),
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
    lm_head: bool = False,
    damping: float = 0.01,
    refit: bool = True,
    sweeps: int = SWEEPS,
    device: torch.device | str | None = None,
) -> Iterator[Block]:
    """Quantises the linears of all decoder layers, one layer at a time; the model itself is not changed.

    All statistics come from the unquantised model, so what the caller does with a finished block changes nothing in
    later ones only as long as the float layers stay as they are until the next block has been yielded. A finished
    layer is not needed again: it may be replaced and freed.

    Args:
        model: a causal language model of transformers in eval mode, on one device.
        batches: calibration sequences, int64 [n, length], or several such tensors
            (:func:`fu_compile.calibration.token_batches`). None: ``method="rtn"`` alone, ranges from the weights.
        method: ``"gptq"``, or ``"rtn"``: with ``batches`` its ranges are weighted by the inputs.
        group_size: columns that share a scale: 128, 64 or 32; the last group may be ragged.
        grid: ``"asym"`` (integer zero 0..15) or ``"sym8"`` (signed scale, zero 8).
        overrides: pairs (shell glob over the full name, choice), first match wins. A choice is ``"int4"`` (as the
            other arguments say), another precision (the linear is left out: the caller keeps it in that precision), or
            a mapping of ``method``, ``group_size``, ``grid``.
        resume: a folder; every finished block is written to it, and blocks found there are not computed again.
        progress: a progress bar with the time left, on standard error.
        lm_head: quantise the output head too, as a last block of that name.
        damping: added to the diagonal of H, in means of it.
        refit: least-squares refit of the scales after GPTQ and after each sweep.
        sweeps: sweeps of coordinate descent over the codes after GPTQ.
        device: where it is computed; none: where the model is. On another device (a model on the CPU, a GPU) each
            layer visits it in turn, with the activations of the calibration text.

    Yields:
        :class:`Block`, in the order of the layers. The same input gives the same codes on the same machine.

    Raises:
        OptionError: an argument that does not exist or fit; GPTQ without batches.
        DataError: unusable calibration ids; activations that are not finite; a folder of another run, or damaged.
        FormatError: a weight that is not finite. DtypeError: a weight that is not floating.
        NoLlamaBlockError, TrainingModeError, MetaParameterError, OffloadedParameterError: a model that does not fit.
    """
    default = _choice(Choice(method, group_size, grid), "quantize_blocks")
    chosen = [(pattern, choice_of(entry, default)) for pattern, entry in parse_overrides(overrides)]
    if not 0.0 < damping <= 1.0:
        raise OptionError(f"damping cannot be {damping!r}", where="damping", advice="0.01 is usual; at most 1.")
    if not isinstance(sweeps, int) or sweeps < 0:
        raise OptionError(f"sweeps cannot be {sweeps!r}", where="sweeps", advice="A whole number, 0 for plain GPTQ.")
    check(model, quantising=True)
    plan = _plan(model, default, chosen, lm_head)
    rows = None
    if batches is not None:
        rows = as_rows(batches, model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    elif any(c.method == "gptq" for block in plan.values() for c in block.values()):
        raise OptionError(
            "GPTQ needs calibration sequences",
            where="batches",
            advice="Pass batches=fu_compile.calibration.token_batches(...), or method='rtn'.",
        )
    solver = Solver(damping, bool(refit), sweeps)
    store = None if resume is None else _Store(Path(resume).expanduser(), model, rows, plan, solver)
    return _blocks(model, rows, plan, solver, store, progress, device)


def _blocks(
    model: nn.Module,
    rows: Sequence[Tensor] | None,
    plan: dict[str, dict[str, Choice]],
    solver: Solver,
    store: _Store | None,
    progress: bool,
    device: torch.device | str | None,
) -> Iterator[Block]:
    from tqdm.auto import tqdm

    last_open = max((i for i in range(len(plan)) if store is None or not store.has(i)), default=-1)
    walk = None
    home = next(model.parameters()).device
    bar = tqdm(total=len(plan), desc="INT4 weights", unit="block", disable=not progress, smoothing=0.1)
    with bar:
        for i, (name, choices) in enumerate(plan.items()):
            linears = {n: _linear(model, n) for n in choices}
            found, new = store.load(i, home) if store is not None else None, False
            parts: dict[str, list[Part]] = {}
            notes: list[str] = []
            with moved(_modules(model, i, name) if i <= last_open else (), device):
                if rows is not None and i <= last_open:
                    walk = Walk(model, rows, device) if walk is None else walk
                    full = any(c.method == "gptq" for c in choices.values())
                    parts, notes = observe(model, walk, i, name, linears if found is None else {}, full)
                if found is None:
                    found = _home(quantize_block(name, linears, choices, parts, solver, notes), device, home)
                    new = True
            if new and store is not None:
                store.save(i, found)
            del parts
            bar.update()
            for note in found.notes:
                warnings.warn(note, FuWarning, stacklevel=2)
            yield found


def _modules(model: nn.Module, index: int, name: str) -> list[nn.Module]:
    """What runs when block ``index`` of the plan is observed: the decoder layer, or the last norm and the head."""
    decoder, _, layers = decoder_layers(model)
    norm = [] if index < len(layers) else [m for n, m in decoder.named_children() if n in NORMS]
    return [*norm, model.get_submodule(name)]


def _home(block: Block, device: torch.device | str | None, home: torch.device) -> Block:
    """The block with its codes on the model's device."""
    if device is None:
        return block
    layers = {
        n: Int4Codes(q.codes.to(home), q.scales.to(home), q.zeros.to(home), q.group) for n, q in block.layers.items()
    }
    return replace(block, layers=layers)


def block_linears(model: nn.Module, lm_head: bool = False) -> dict[str, dict[str, nn.Linear]]:
    """Block name -> full name -> linear, of all decoder layers and, if asked for, of the output head as a last block.

    Raises:
        NoLlamaBlockError: there is no list of decoder layers.
    """
    _, prefix, layers = decoder_layers(model)
    found = {
        f"{prefix}.{i}": {f"{prefix}.{i}.{name}": m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        for i, layer in enumerate(layers)
    }
    if lm_head:
        head = model.get_output_embeddings()  # type: ignore[operator]
        found |= {n: {n: m} for n, m in model.named_modules() if m is head and isinstance(m, nn.Linear)}
    return found


def observe(
    model: nn.Module, walk: Walk, index: int, block: str, linears: dict[str, nn.Linear], full: bool
) -> tuple[dict[str, list[Part]], list[str]]:
    """Moves all sequences through one block of :func:`block_linears`.

    Args:
        model: the float model.
        walk: its hidden states in front of this block.
        index: number of the block; the output head follows the last layer.
        block: its name.
        linears: full name -> linear whose inputs are wanted.
        full: whole second moments, not only the diagonal.

    Returns:
        Full name -> rows of the weight and the second moments that apply to them; and notes.

    Raises:
        DataError: the block gives a value that is not finite. NoLlamaBlockError: no norm in front of the head.
    """
    decoder, _, layers = decoder_layers(model)
    if index == len(layers):
        norm = next((m for n, m in decoder.named_children() if n in NORMS), None)
        if norm is None:
            raise NoLlamaBlockError("the norm in front of the output head was not found", where=block)
        moments = Moments(model, linears, full)
        if linears:
            walk.head(norm, moments, next(iter(linears.values())))
        return moments.parts(), []
    moments = Moments(layers[index], {n.removeprefix(block + "."): m for n, m in linears.items()}, full)
    walk.step(index, moments if linears else None)
    notes = [f"{block}.{n}: its attention was not seen, inputs count equally" for n in moments.unweighted]
    return {f"{block}.{n}": p for n, p in moments.parts().items()}, notes


# ---- arguments -------------------------------------------------------------------------------------------------------


def _choice(choice: Choice, where: str) -> Choice:
    for name, value, possible in (
        ("method", choice.method, METHODS),
        ("group_size", choice.group_size, formats.GROUPS),
        ("grid", choice.grid, GRIDS),
    ):
        if value not in possible:
            raise OptionError(
                f"{name} cannot be {value!r}", where=where, advice=f"Possible: {', '.join(map(str, possible))}."
            )
    return choice


def parse_overrides(overrides: Any) -> list[tuple[str, Any]]:
    """Pairs of name pattern and choice. OptionError for entries that are none."""
    pairs = list(overrides.items()) if isinstance(overrides, Mapping) else list(overrides)
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str):
            raise OptionError(
                f"overrides entry {pair!r} is not a pair (layer name pattern, choice)",
                where="overrides",
                advice="Write overrides=[('*.down_proj', {'group_size': 64}), ('model.layers.0.*', 'bf16')].",
                code="FU-OPT-003",
            )
    return [(pattern, entry) for pattern, entry in pairs]


def choice_of(entry: Any, default: Choice) -> Choice | None:
    """The choice of an entry of ``overrides``; none: the linear is left out."""
    if isinstance(entry, str) and entry in PRECISIONS:
        return default if entry == "int4" else None
    names = set(asdict(default))
    if not isinstance(entry, Mapping) or not set(entry) <= names:
        raise OptionError(
            f"overrides cannot give a layer {entry!r}",
            where="overrides",
            advice=f"Possible: {', '.join(PRECISIONS)}, or a mapping of {', '.join(sorted(names))}.",
            code="FU-OPT-003",
        )
    return _choice(Choice(**{**asdict(default), **entry}), "overrides")


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return module


def _plan(
    model: nn.Module, default: Choice, overrides: list[tuple[str, Choice | None]], lm_head: bool
) -> dict[str, dict[str, Choice]]:
    """Block name -> full name of each linear to quantise -> how."""
    plan: dict[str, dict[str, Choice]] = {}
    for block, linears in block_linears(model, lm_head).items():
        plan[block] = {}
        for name, linear in linears.items():
            weight = linear.weight
            choice = next((c for pattern, c in overrides if fnmatchcase(name, pattern)), default)
            if choice is None:
                continue
            if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                raise DtypeError(f"the weight of {name} is {weight.dtype}", where=name)
            plan[block][name] = choice
    return plan


# ---- one block -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_block(
    block: str,
    linears: dict[str, nn.Linear],
    choices: dict[str, Choice],
    parts: dict[str, list[Part]],
    solver: Solver = Solver(),
    notes: Iterable[str] = (),
) -> Block:
    """Codes of one block's linears.

    Args:
        block: its name.
        linears: full name -> linear.
        choices: full name -> how.
        parts: what :func:`observe` found; empty: without calibration.
        solver: how hard GPTQ tries.
        notes: for the result, in front of its own.
    """
    notes = list(notes)
    # Rows with the same moments and the same choice are quantised together: one factorisation, longer columns.
    jobs: dict[tuple[int | str, Choice], list[tuple[str, slice, Tensor | None]]] = {}
    for name, linear in linears.items():
        whole: list[tuple[slice, Tensor | None]] = [(slice(0, linear.weight.shape[0]), None)]
        for rows, moments in parts.get(name) or whole:
            together = name if moments is None else id(moments)
            jobs.setdefault((together, choices[name]), []).append((name, rows, moments))
        if parts and name not in parts:
            notes.append(f"{name}: the calibration text never reached it; rounded to nearest")
    pieces: dict[str, list[tuple[int, Int4Codes]]] = {name: [] for name in linears}
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in linears}
    for (_, choice), members in jobs.items():
        try:
            weight = torch.cat([linears[n].weight.detach()[rows].to(torch.float32) for n, rows, _ in members])
            codes, wrong, power, said = quantize(weight, members[0][2], choice, solver)
        except (FormatError, DataError) as error:
            error.where = ", ".join(n for n, _, _ in members)
            raise
        notes += [f"{', '.join(n for n, _, _ in members)}: {note}" for note in said]
        first = 0
        for name, rows, _ in members:
            here = slice(first, first + rows.stop - rows.start)
            pieces[name].append(
                (rows.start, Int4Codes(codes.codes[here], codes.scales[here], codes.zeros[here], codes.group))
            )
            sums[name][0] += float(wrong[here].sum())
            sums[name][1] += float(power[here].sum())
            first = here.stop
    layers = {name: _join([c for _, c in sorted(found, key=lambda f: f[0])]) for name, found in pieces.items()}
    return Block(block, layers, {n: a / b if b > 0 else 0.0 for n, (a, b) in sums.items()}, tuple(notes))


def _join(pieces: list[Int4Codes]) -> Int4Codes:
    codes, scales, zeros = (torch.cat([getattr(p, name) for p in pieces]) for name in ("codes", "scales", "zeros"))
    return Int4Codes(codes, scales, zeros, pieces[0].group)


def quantize(
    weight: Tensor, moments: Tensor | None, choice: Choice, solver: Solver = Solver()
) -> tuple[Int4Codes, Tensor, Tensor, list[str]]:
    """One weight matrix.

    Args:
        weight: [N, K] f32 or f64; computed in that dtype.
        moments: [K, K] second moments of the input, their diagonal [K] (RTN only), or none (RTN only).
        choice: method, group size and grid.
        solver: how hard GPTQ tries.

    Returns:
        The codes; per row the squared error and the power of the output in the metric of the moments, [N] each; notes.

    Raises:
        FormatError: a weight that is not finite, or needs a scale beyond float16.
        DataError: moments that are not finite.
    """
    if moments is None:
        codes = formats.quantize_int4(weight, choice.group_size, choice.grid)
        delta = weight - formats.dequantize_int4(codes)
        return codes, delta.square().sum(1), weight.square().sum(1), []
    if not bool(torch.isfinite(weight).all()):
        row = int((~torch.isfinite(weight)).any(1).nonzero()[0])
        raise FormatError(f"row {row} of the weight is not finite (NaN or infinity)")
    if not bool(torch.isfinite(moments).all()):
        raise DataError("the inputs that the calibration text gives are not finite, or their squares overflow")
    diagonal = moments.diagonal() if moments.dim() == 2 else moments
    scales, zeros = search_ranges(weight, diagonal, choice.group_size, choice.grid)
    notes: list[str] = []
    if choice.method == "rtn":
        group = choice.group_size
        q = _round(weight, _spread(scales, group, weight), _spread(zeros, group, weight))
    else:
        factor, order, said = factorize(moments, solver.damping)
        notes += said
        q = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        step = max(1, _ROWS // weight.shape[1])
        for first in range(0, weight.shape[0], step):
            rows = slice(first, first + step)
            q[rows] = round_columns(weight[rows], factor, order, scales[rows], zeros[rows], choice.group_size)
    codes = Int4Codes(q, scales, zeros, choice.group_size)
    if choice.method == "gptq":
        codes = refit_scales(weight, codes, moments) if solver.refit else codes
        for _ in range(solver.sweeps):
            codes = sweep_codes(weight, codes, moments, solver.damping)
            codes = refit_scales(weight, codes, moments) if solver.refit else codes
    wrong, power = _metric(weight - formats.dequantize_int4(codes), moments), _metric(weight, moments)
    return codes, wrong, power, notes


def _metric(x: Tensor, moments: Tensor) -> Tensor:
    """x H x^T of every row: [N, K] -> [N]."""
    m = moments.to(x.dtype)
    return ((x @ m) * x).sum(1) if m.dim() == 2 else (x.square() * m).sum(1)


def _spread(per_group: Tensor, group: int, like: Tensor) -> Tensor:
    """[N, G] -> [N, K], in the dtype of ``like``."""
    return per_group.to(like.dtype).repeat_interleave(group, 1)[:, : like.shape[1]]


def _round(w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Nearest codes, u8; where the scale is 0 the code is the zero."""
    q = (w / torch.where(scales == 0, 1.0, scales)).round_().add_(zeros).clamp_(0, 15)
    return torch.where(scales == 0, zeros, q).to(torch.uint8)


# ---- ranges ----------------------------------------------------------------------------------------------------------


def search_ranges(weight: Tensor, diagonal: Tensor, group: int, grid: str) -> tuple[Tensor, Tensor]:
    """Scales and zeros per row and group that minimise sum_k d_k (w_k - q_k)^2 over :data:`RATIOS` of the full range.

    Args:
        weight: [N, K] floating and finite.
        diagonal: [K], at least 0: the mean square of each input, up to a factor.
        group: columns that share a scale.
        grid: ``"sym8"`` or ``"asym"``.

    Returns:
        scales [N, G] f16 and zeros [N, G] u8.

    Raises:
        FormatError: a scale beyond float16.
    """
    n, k = weight.shape
    groups = -(-k // group)
    d = diagonal.to(torch.float32)
    mean = d.mean()
    d = torch.where(mean > 0, (d / mean).clamp_min(_FLOOR), 1.0)
    d = nn.functional.pad(d, (0, groups * group - k)).view(groups, group)
    scales = torch.empty((n, groups), dtype=torch.float16, device=weight.device)
    zeros = torch.empty((n, groups), dtype=torch.uint8, device=weight.device)
    step = max(1, _CHUNK // k)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        w = nn.functional.pad(weight[rows].to(torch.float32), (0, groups * group - k)).unflatten(1, (groups, group))
        best = torch.full(w.shape[:2], torch.inf, device=w.device)
        for s, z in _candidates(w, grid):
            scale = s.float()
            q = (w / torch.where(scale == 0, 1.0, scale)[..., None]).round_().add_(z[..., None]).clamp_(0, 15)
            error = q.sub_(z[..., None]).mul_(scale[..., None]).sub_(w).square_().mul_(d).sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            scales[rows] = torch.where(better, s, scales[rows])
            zeros[rows] = torch.where(better, z.to(torch.uint8), zeros[rows])
        if not bool(torch.isfinite(best).all()):
            row = first + int((~torch.isfinite(best)).any(1).nonzero()[0])
            raise FormatError(f"row {row} of the weight needs an INT4 scale beyond float16 (magnitudes over 5e5)")
    return scales, zeros


def _candidates(w: Tensor, grid: str) -> Iterator[tuple[Tensor, Tensor]]:
    """(scale f16, zero f32 integers), [N, G] each, of every ratio; the full range first, so that it wins a tie."""
    low, high = torch.aminmax(w, dim=-1)
    if grid == "sym8":
        extreme = torch.where(-low >= high, low, high)
        eight = torch.full_like(extreme, 8.0)
        for ratio in RATIOS:
            yield formats._to_f16_scale(extreme * (ratio / -8.0)), eight
        return
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    for ratio in RATIOS:
        s = formats._to_f16_scale((formats.divide(high, 15.0) - formats.divide(low, 15.0)) * ratio)
        divisor = torch.where(s == 0, 1.0, s.float())
        yield s, (-low * ratio / divisor).round_().clamp_(0.0, 15.0)


# ---- GPTQ ------------------------------------------------------------------------------------------------------------


def factorize(moments: Tensor, damping: float) -> tuple[Tensor, Tensor, list[str]]:
    """Upper triangular U with U^T U = (H + damping)^-1 for the columns of H in the order in which they are rounded.

    Inputs that are never used (H_kk = 0) get the mean of the diagonal: they correct nothing and are not corrected. If
    the matrix cannot be factorised the damping is raised tenfold until it can.

    Args:
        moments: [K, K] f32 or f64, symmetric, finite.
        damping: in means of the diagonal.

    Returns:
        U [K, K] f64, the order [K] int64 (falling diagonal, stable), and notes.
    """
    h = moments.to(torch.float64)
    diagonal = h.diagonal()
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if not bool(dead.all()) else torch.ones_like(diagonal[0])
    # By the diagonal before filling: unused columns come last.
    order = torch.argsort(diagonal, descending=True, stable=True)
    h = h[order][:, order]
    filled = torch.where(dead[order], mean, 0.0)
    notes = [f"{int(dead.sum())} of {h.shape[0]} inputs are always zero on the calibration text"] if dead.any() else []
    used = damping
    while True:
        damped = h + torch.diag(filled + used * mean)
        # H = R R^T with R upper (the Cholesky factor in reverse order), so U = R^-1.
        lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if int(info) == 0:
            break
        used *= 10.0
    if used != damping:
        notes.append(f"second moments are not positive definite: damping raised from {damping:g} to {used:g}")
    eye = torch.eye(h.shape[0], dtype=h.dtype, device=h.device)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
    return upper, order, notes


def round_columns(w: Tensor, factor: Tensor, order: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """GPTQ's loop: codes [N, K] u8 on given ranges.

    Args:
        w: [N, K] f32 or f64.
        factor: U of :func:`factorize`.
        order: its order.
        scales: [N, G] f16.
        zeros: [N, G] u8.
        group: columns that share a scale, of the stored columns.
    """
    columns = order.numel()
    u = factor.to(w.dtype)
    rest = w.t()[order].contiguous()  # a column of the weight is a contiguous row here
    q = torch.empty_like(rest)
    s, z = scales.t().to(w.dtype), zeros.t().to(w.dtype)
    divisor = torch.where(s == 0, 1.0, s)
    of = (order // group).tolist()
    pivots = u.diagonal().tolist()
    for first in range(0, columns, _COLUMNS):
        last = min(first + _COLUMNS, columns)
        errors = torch.empty_like(rest[first:last])
        for i in range(first, last):
            g = of[i]
            torch.div(rest[i], divisor[g], out=q[i])
            q[i].round_().add_(z[g]).clamp_(0, 15)
            e = errors[i - first]
            torch.sub(rest[i], (q[i] - z[g]).mul_(s[g]), out=e)
            e.div_(pivots[i])
            if i + 1 < last:
                rest[i + 1 : last].addr_(u[i, i + 1 : last], e, alpha=-1)
        if last < columns:
            rest[last:].addmm_(u[first:last, last:].t(), errors, alpha=-1)
    codes = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    codes[order] = q.to(torch.uint8)
    zero = zeros.repeat_interleave(group, 1)[:, :columns]
    return torch.where((scales == 0).repeat_interleave(group, 1)[:, :columns], zero, codes.t()).contiguous()


def refit_scales(weight: Tensor, q: Int4Codes, moments: Tensor) -> Int4Codes:
    """The scales that minimise (w - q) H (w - q)^T of each row, codes and zeros as they are, rounded to f16.

    A row whose error would not fall keeps its scales. weight: [N, K]; moments: [K, K].
    """
    n, k = weight.shape
    groups = q.scales.shape[1]
    h = moments.to(weight.dtype)
    new = q.scales.clone()
    step = max(1, (_CHUNK * 8) // k)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        w, scales = weight[rows], q.scales[rows]
        levels = q.codes[rows].to(w.dtype) - _spread(q.zeros[rows], q.group, w)
        delta = w - levels * _spread(scales, q.group, w)
        # Normal equations of the change: A[g, g'] = c_g H c_g'^T, b[g] = c_g H delta^T, c_g = the levels of group g.
        matrix = torch.empty((w.shape[0], groups, groups), dtype=torch.float64, device=w.device)
        side = torch.empty((w.shape[0], groups), dtype=torch.float64, device=w.device)
        for g in range(groups):
            here = slice(g * q.group, min((g + 1) * q.group, k))
            image = levels[:, here] @ h[here]
            padded = nn.functional.pad(image * levels, (0, groups * q.group - k))
            matrix[:, g] = padded.unflatten(1, (groups, q.group)).sum(-1)
            side[:, g] = (image * delta).sum(1)
        size = matrix.diagonal(dim1=1, dim2=2).mean(1)
        ridge = torch.where(size > 0, size * 1e-6, 1.0)  # a group of zeros has a row of zeros: its change is 0
        matrix.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
        change = torch.linalg.solve_ex(matrix, side)[0]
        fitted = (scales.double() + change).to(torch.float16)
        fitted = torch.where(torch.isfinite(fitted) & (scales != 0), fitted, scales)
        after = _metric(w - levels * _spread(fitted, q.group, w), moments)
        new[rows] = torch.where((after < _metric(delta, moments))[:, None], fitted, scales)
    return Int4Codes(q.codes, new, q.zeros, q.group)


def sweep_codes(weight: Tensor, q: Int4Codes, moments: Tensor, damping: float) -> Int4Codes:
    """One sweep of coordinate descent: column after column, each code becomes the best one while all others stay.

    The objective is GPTQ's, (w - q) (H + damping) (w - q)^T of every row, and never rises; scales and zeros stay.

    Args:
        weight: [N, K] f32 or f64.
        q: its codes.
        moments: [K, K].
        damping: in means of the diagonal.
    """
    new = torch.empty_like(q.codes)
    step = max(1, _ROWS // weight.shape[1])
    h = moments.to(weight.dtype)
    mean = h.diagonal().mean()
    order = torch.argsort(h.diagonal(), descending=True, stable=True)
    h = h[order][:, order] + torch.diag(torch.where(mean > 0, damping * mean, 1.0).expand(order.numel()))
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        part = Int4Codes(q.codes[rows], q.scales[rows], q.zeros[rows], q.group)
        new[rows] = _sweep(weight[rows], part, h, order)
    return Int4Codes(new, q.scales, q.zeros, q.group)


def _sweep(w: Tensor, q: Int4Codes, h: Tensor, order: Tensor) -> Tensor:
    """Codes after one sweep; h: [K, K] damped and in the order."""
    columns = order.numel()
    codes = q.codes.t()[order].to(w.dtype)
    s, z = q.scales.t().to(w.dtype), q.zeros.t().to(w.dtype)
    divisor = torch.where(s == 0, 1.0, s)
    of = (order // q.group).tolist()
    value = (codes - z[order // q.group]).mul_(s[order // q.group])
    slope = h @ (w.t()[order] - value)  # minus half the derivative by each column
    curvature = h.diagonal().tolist()
    for first in range(0, columns, _COLUMNS):
        last = min(first + _COLUMNS, columns)
        change = torch.empty_like(value[first:last])
        for i in range(first, last):
            g = of[i]
            best = (value[i] + slope[i] / curvature[i]).div_(divisor[g]).round_().add_(z[g]).clamp_(0, 15)
            torch.sub(value[i], (best - z[g]).mul_(s[g]), out=change[i - first])
            codes[i] = torch.where(s[g] == 0, z[g], best)
            if i + 1 < last:
                slope[i + 1 : last].addr_(h[i, i + 1 : last], change[i - first])
        if last < columns:
            slope[last:].addmm_(h[first:last, last:].t(), change)
    out = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device)
    out[order] = codes.to(torch.uint8)
    return out.t()


# ---- a run that can be continued -------------------------------------------------------------------------------------


class _Store:
    """A folder with a manifest (what the run is) and one safetensors file per finished block.

    Raises:
        DataError: the folder belongs to something else.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        rows: Sequence[Tensor] | None,
        plan: dict[str, dict[str, Choice]],
        solver: Solver,
    ) -> None:
        self._folder = folder
        self._names = list(plan)
        self._choices = plan
        self._shapes = {n: _linear(model, n).weight.shape for block in plan.values() for n in block}
        choices = {n: asdict(c) for block in plan.values() for n, c in block.items()}
        identity = {
            "format": _FORMAT,
            "weights": _digest(dict(model.named_parameters())),
            "calibration": _digest({str(i): r for i, r in enumerate(rows or ())}),
            "settings": {**asdict(solver), "choices": choices, "blocks": self._names},
        }
        manifest = folder / _MANIFEST
        if manifest.is_file():
            try:
                there = json.loads(manifest.read_text())
                differ = [name for name in identity if there.get(name) != identity[name]]
            except (ValueError, AttributeError) as error:
                raise DataError(f"{manifest} is damaged: {error}", where="resume", advice=_OTHER) from error
            if differ:
                raise DataError(
                    f"{folder} holds a run with other {' and '.join(differ)}", where="resume", advice=_OTHER
                )
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} is not empty and holds no run of quantize_blocks", where="resume", advice=_OTHER)
        folder.mkdir(parents=True, exist_ok=True)
        _write(manifest, lambda path: path.write_text(json.dumps(identity, indent=1) + "\n"))

    def _file(self, index: int) -> Path:
        return self._folder / f"block-{index:04d}.safetensors"

    def has(self, index: int) -> bool:
        """Whether this block is finished."""
        return self._file(index).is_file()

    def save(self, index: int, block: Block) -> None:
        """Writes a block; a file of this name is always whole."""
        from safetensors.torch import save_file

        tensors = {n: formats.pack_int4(q).cpu() for n, q in block.layers.items()}
        notes = {"errors": json.dumps(block.errors), "notes": json.dumps(block.notes), "block": block.name}
        _write(self._file(index), lambda path: save_file(tensors, path, notes))

    def load(self, index: int, device: torch.device) -> Block | None:
        """A finished block, or none.

        Raises:
            DataError: the file is damaged.
        """
        if not self.has(index):
            return None
        from safetensors import SafetensorError, safe_open

        file, name = self._file(index), self._names[index]
        try:
            with safe_open(file, "pt") as opened:
                notes = opened.metadata() or {}
                if notes["block"] != name or set(opened.keys()) != set(self._choices[name]):
                    raise ValueError("it holds other layers")
                layers = {}
                for n, choice in self._choices[name].items():
                    rows, columns = self._shapes[n]
                    packed = opened.get_tensor(n).to(device)
                    layers[n] = formats.unpack_int4(packed, rows, columns, choice.group_size)
            return Block(name, layers, json.loads(notes["errors"]), tuple(json.loads(notes["notes"])))
        except (SafetensorError, FormatError, KeyError, ValueError, OSError) as error:
            raise DataError(
                f"{file} is damaged: {error}", where="resume", advice="Remove the file; the block is computed again."
            ) from error


_OTHER = "Give an empty folder, or the folder of the run that is to be continued."


def _write(path: Path, write: Any) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    write(part)
    os.replace(part, path)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)
        for piece in flat.split(1 << 26):
            digest.update(memoryview(piece.contiguous().cpu().view(torch.uint8).numpy()))
    return digest.hexdigest()
