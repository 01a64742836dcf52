"""Static FP8 activation scales: calibrated on text, frozen, kept with the model.

::

    fu_compile.compile(model, fp8_scaling="static")
    fu_compile.calibrate_fp8(model, batches)        # token ids; later calls use the scales found here
    model.save_pretrained("folder")                 # the scales are in the manifest (config.json)

A scale belongs to one projection input. At run time it lies in the state vector beside the packed weights
(formats.fp8_state), which every prefill graph of the model shares; it is remembered beside the first weight of the
projection, so a new graph, ``torch._dynamo.reset()`` or a copy on another device starts with it. A changed parameter is
packed again and starts without one (then as ``"delayed"``).

The scale is no power of two: of eight scales in an octave, with 2x to 1.1x headroom over the largest value of the text,
the one with the least squared error on the text. What decides is whether the massive values of the first tokens, which
are nearly the same in every text, fall on a step of e4m3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fu_compile import formats
from fu_compile.calibration import as_rows
from fu_compile.errors import OptionError
from fu_compile.report import records_of, unwrap
from fu_compile.weights import STORE, set_input_scale

FRACTIONS = tuple(2.0 ** (-i / 8) for i in range(8))
"""Of the scale with 2x headroom, which of them are tried."""
ROWS = 256
"""Rows of an input, evenly spread with the first among them, on which scales are compared at a time."""


def calibrate_fp8(model: Any, batches: Tensor | Iterable[Tensor], *, progress: bool = True, keep: bool = True) -> int:
    """Runs the compiled model on text and freezes the scale of every FP8 projection input.

    Two passes: the largest value of every input, then the scale. The first tokens of a text have by far the largest
    values, so sequences should begin as served ones do. A later call whose values do not fit uses a scale of its own
    for that call and is counted (``saturations`` in the report). Calibrating again starts afresh.

    Args:
        model: compiled with backend "futransformer", ``prefill="fp8"`` (the default) and ``fp8_scaling="static"``.
        batches: int64 token ids [n, length], or several such tensors
            (:func:`fu_compile.calibration.token_batches`).
        progress: a progress bar on standard error.
        keep: remember the scales beside the weights and in ``config.quantization_config``, which ``save_pretrained``
            writes; otherwise they live as long as the packed weights.

    Returns:
        How many scales were frozen.

    Raises:
        OptionError: the model is not compiled so, or its graphs hold no FP8 projection.
        DataError: there is no sequence, or an id outside the vocabulary.
    """
    from tqdm.auto import tqdm

    inner = unwrap(model)
    rows = as_rows(batches, inner.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if short := [r for r in rows if r.shape[1] < 2]:
        what = f"{len(short)} calibration sequences have a single token, which is a decode step"
        raise OptionError(what, where="batches", advice="Give sequences of at least two tokens.")
    device = next(inner.parameters()).device
    with torch.no_grad(), tqdm(total=2 * len(rows), desc="FP8 scales", unit="sequence", disable=not progress) as bar:
        inputs = _inputs(model, rows[0].to(device))
        states = [state for _, state in inputs]
        largest = torch.zeros(len(states), device=device)
        for row in rows:
            model(input_ids=row.to(device), use_cache=False)
            # The history forgets after 16 calls, the calibration does not.
            largest = torch.maximum(largest, torch.stack([s[0] for s in states]))
            bar.update()
        wide = {id(s): 2.0 * amax / formats.E4M3_MAX for s, amax in zip(states, largest.tolist(), strict=True)}
        search = _Search(wide)
        # Kernels that quantise by themselves stand back for lowerings that do it through formats.fp8_quantize.
        with formats.fp8_observed(search.see):
            for row in rows:
                model(input_ids=row.to(device), use_cache=False)
                bar.update()
        found: dict[int, float] = {}
        for weight, state in inputs:
            if wide[id(state)] > 0.0:
                state[0] = wide[id(state)] * formats.E4M3_MAX / 2.0
                formats.fp8_freeze(state, search.best(id(state)))
                found[id(weight)] = float(state[formats.FP8_SLOTS["scale"]])
    if keep:
        _keep(inner, found)
    return len(found)


class _Search:
    """Squared error of every projection input under each of the scales that are tried."""

    def __init__(self, wide: dict[int, float]) -> None:
        """``wide``: id of a state -> its scale with 2x headroom."""
        self._wide = wide
        self._errors: dict[int, Tensor] = {}

    def see(self, x: Tensor, state: Tensor) -> None:
        """x: [..., K] f32, about to be quantised."""
        wide = self._wide.get(id(state), 0.0)
        if not wide > 0.0:
            return
        x = x.reshape(-1, x.shape[-1])
        x = x[:: -(-x.shape[0] // ROWS)]
        errors = []
        for fraction in FRACTIONS:
            scaled = x / (wide * fraction)
            wrong = scaled.to(torch.float8_e4m3fn).to(torch.float32).sub_(scaled)
            errors.append(wrong.square_().sum(dtype=torch.float64) * fraction**2)
        new = torch.stack(errors)
        self._errors[id(state)] = new + self._errors.get(id(state), 0.0)

    def best(self, state: int) -> float | None:
        """The scale with the least error; none (then a power of two) where nothing was seen."""
        errors = self._errors.get(state)
        return None if errors is None else self._wide[state] * FRACTIONS[int(errors.argmin())]


def _inputs(model: Any, row: Tensor) -> list[tuple[Tensor, Tensor]]:
    """First weight and emptied state of the FP8 projections through which a prefill of ``row`` goes; the call packs."""
    inner = unwrap(model)
    model(input_ids=row, use_cache=False)
    static = any(record.options.fp8_scaling == "static" for record in records_of(inner))
    found = STORE.fp8_inputs([*inner.parameters(), *inner.buffers()])
    # Weights that only decode reads have a state that no call touches.
    found = [(w, s) for w, s in found if s[formats.FP8_SLOTS["calls"]] > 0]
    if not static or not found:
        raise OptionError(
            f"this {type(inner).__name__} has no {'FP8 projection' if static else 'static FP8 scales'}",
            where="calibrate_fp8",
            advice='Compile it with prefill="fp8" and fp8_scaling="static" first.',
        )
    for _, state in found:
        state.zero_()
    return found


def _keep(model: Any, scales: dict[int, float]) -> None:
    """``scales``: id of a weight -> scale."""
    from .hf_quantizer import keep_scales

    named = {}
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if id(weight) in scales:
            named[name] = scales[id(weight)]
            set_input_scale(weight, named[name])
    keep_scales(model, named)
