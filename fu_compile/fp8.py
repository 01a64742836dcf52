"""Static FP8 activation scales: calibrated on text, frozen, kept with the packed weights.

::

    fu_compile.compile(model, fp8_scaling="static")
    fu_compile.calibrate_fp8(model, batches)        # token ids; later calls use the scales found here

A scale belongs to one projection input. It lies in the state vector beside the packed weights (formats.fp8_state),
which every prefill graph of the model shares, and lives as long as they do: a new graph or ``torch._dynamo.reset()``
keeps it, a changed parameter is packed again and starts without one (then as ``"delayed"``).
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
from fu_compile.weights import STORE


def calibrate_fp8(model: Any, batches: Tensor | Iterable[Tensor], *, progress: bool = True) -> int:
    """Runs the compiled model on text and freezes the scale of every FP8 projection input.

    The frozen scale holds twice the largest value that any of the calls has shown; the first tokens of a text have by
    far the largest, so sequences should begin as served ones do. A later call that needs more uses a scale of its own
    for that call and is counted (``saturations`` in the report). Calibrating again starts afresh.

    Args:
        model: compiled with backend "futransformer", ``prefill="fp8"`` (the default) and ``fp8_scaling="static"``.
        batches: int64 token ids [n, length], or several such tensors
            (:func:`fu_compile.calibration.token_batches`).
        progress: a progress bar on standard error.

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
    with torch.no_grad(), tqdm(rows, desc="FP8 scales", unit="sequence", disable=not progress) as bar:
        states = _states(model, rows[0].to(device))
        largest = torch.zeros(len(states), device=device)
        for row in bar:
            model(input_ids=row.to(device), use_cache=False)
            # The history forgets after 16 calls, the calibration does not.
            largest = torch.maximum(largest, torch.stack([s[0] for s in states]))
        used = [(state, amax) for state, amax in zip(states, largest.tolist(), strict=True) if amax > 0.0]
        for state, amax in used:
            state[0] = amax
            formats.fp8_freeze(state)
    return len(used)


def _states(model: Any, row: Tensor) -> list[Tensor]:
    """Empty states of the FP8 projections through which a prefill of ``row`` goes; the call packs what is missing."""
    inner = unwrap(model)
    model(input_ids=row, use_cache=False)
    static = any(record.options.fp8_scaling == "static" for record in records_of(inner))
    # Weights that only decode reads have a state that no call touches.
    states = [s for s in STORE.fp8_states([*inner.parameters(), *inner.buffers()]) if s[formats.FP8_SLOTS["calls"]] > 0]
    if not static or not states:
        raise OptionError(
            f"this {type(inner).__name__} has no {'FP8 projection' if static else 'static FP8 scales'}",
            where="calibrate_fp8",
            advice='Compile it with prefill="fp8" and fp8_scaling="static" first.',
        )
    for state in states:
        state.zero_()
    return states
