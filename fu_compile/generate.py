"""``fu_compile.generate``: the decoding loop around a compiled model, as a ``custom_generate`` of transformers.

    model.generate(**inputs, custom_generate=fu_compile.generate)
    fu_compile.generate(model, **inputs)                            # the same call, shorter

transformers prepares the configuration, the cache, the logits processors and the stopping criteria, and calls us with
them. Greedy decoding and sampling run in the loop below: one prefill (in chunks with ``prefill_chunk_size``), then
:class:`Step` over and over. A step has fixed input tensors that are moved on in place, so a CUDA graph can replay it.
Every other decoding method (beams, assistants, lookup) is transformers' own, on the same compiled model.

Tokens, scores and the use of random numbers are those of transformers' ``_sample``: the same processors in the same
order, one ``multinomial`` of the same shape per token.

What a step costs outside of the model is measured by ``benchmarks/generate_overhead.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput

from .caches import too_short
from .doctor import BACKEND, backend_of
from .errors import FuWarning, GenerateError, MissingDependencyError

log = logging.getLogger(__name__)

CHECK_EVERY = {"cpu": 1}
"""Device type -> steps between two looks at whether everybody is done. A look waits for the device; on a CPU there is
nothing to wait for. What was decoded beyond the end is taken back."""
CHECK_OTHERWISE = 8

ROOM = 4096
"""New tokens that get room before the first is decoded; it grows by doubling."""

CACHE = "cache" if any(f.name == "cache" for f in dataclasses.fields(GenerateDecoderOnlyOutput)) else "past_key_values"
"""What this transformers calls the cache: ``cache`` (5.24) or ``past_key_values`` (5.17)."""

OWN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def generate(
    model: Any,
    input_ids: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool | None = None,
    streamer: Any = None,
    inputs_tensor: Tensor | None = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Any:
    """Generates tokens: as ``custom_generate`` of ``model.generate``, or alone with the arguments of that.

    Args:
        model: a causal language model of transformers, compiled with the backend (otherwise it warns once).
        input_ids: [batch, tokens] int64, left-padded where lengths differ.
        generator: where sampling takes its random numbers from; none: PyTorch's own, seeded by ``torch.manual_seed``.
        logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, inputs_tensor, assistant_model,
            assistant_tokenizer, tokenizer, model_kwargs: as for ``model.generate``.

    Returns:
        What ``model.generate`` returns: [batch, tokens] int64 with the prompt, or an output object.

    Raises:
        GenerateError: an encoder-decoder model, ``synced_gpus=True``, a method that transformers does not ship, a
            ``prefill_chunk_size`` below 1, a generator where transformers' own method decodes, no token that the cache
            does not hold already.
        CacheLengthError: the cache is too short for the prompt, or, during decoding, for the next token.
    """
    mode_kwargs = {
        "synced_gpus": synced_gpus,
        "streamer": streamer,
        "inputs_tensor": inputs_tensor,
        "assistant_model": assistant_model,
        "assistant_tokenizer": assistant_tokenizer,
        "tokenizer": tokenizer,
    }
    if not hasattr(generation_config, "_eos_token_tensor"):  # not prepared: a user's call, not one by transformers
        given = {**mode_kwargs, "logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        given |= {"generation_config": generation_config, "input_ids": input_ids, "generator": generator}
        return _alone(model, {k: v for k, v in given.items() if v is not None} | model_kwargs)

    refuse(model, synced_gpus)
    mode = generation_config.get_generation_mode(assistant_model)
    method = GENERATION_MODES_MAPPING[mode]
    if "/" in method:
        raise GenerateError(
            f"{mode.value.replace('_', ' ')} is no part of transformers",
            where="fu_compile.generate",
            advice=f"model.generate(..., custom_generate='{method}', trust_remote_code=True) runs its code from the"
            " hub on the same compiled model.",
        )
    if (chunk := generation_config.prefill_chunk_size) is not None and (not isinstance(chunk, int) or chunk < 1):
        raise GenerateError(f"prefill_chunk_size is {chunk!r}: it is a number of tokens, 1 or more")
    reason = _left_to_transformers(model, mode, input_ids, generation_config, model_kwargs)
    if reason is None and stopping_criteria.max_length is None:
        reason = "nothing limits the number of tokens"
    if reason and generator is not None:
        raise GenerateError(f"generator has no effect here: transformers' {method} decodes ({reason})")
    _warn_if_uncompiled(model, generation_config)
    if reason:
        log.debug("transformers' %s decodes: %s", method, reason)
        decoding = getattr(type(model), method)
        mode_kwargs = {k: v for k, v in mode_kwargs.items() if k in inspect.signature(decoding).parameters}
        return decoding(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **{k: v for k, v in mode_kwargs.items() if v is not None},
            **model_kwargs,
        )
    return _decode(
        model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, generator, model_kwargs
    )


def refuse(model: Any, synced_gpus: bool | None) -> None:
    """Raises GenerateError for a model or a setting that no part of this module can serve."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise GenerateError(
            f"{type(model).__name__} is an encoder-decoder model: only decoders are generated from here",
            where="fu_compile.generate",
            advice="Call model.generate(...) without custom_generate.",
        )
    if synced_gpus:
        raise GenerateError(
            "synced_gpus=True makes every process run until the slowest is done, which this loop does not do",
            where="fu_compile.generate",
            advice="Call model.generate(...) without custom_generate, or keep the model whole on each device.",
        )


def _alone(model: Any, given: dict[str, Any]) -> Any:
    if not callable(getattr(model, "generate", None)):
        raise GenerateError(
            f"{type(model).__name__} has no generate method: it is no generating model of transformers",
            where="fu_compile.generate",
            advice="Pass the model first: fu_compile.generate(model, input_ids, ...).",
        )
    if "custom_generate" in given:
        raise GenerateError("fu_compile.generate is the custom_generate: another one cannot be given to it")
    refuse(model, given.get("synced_gpus"))
    return model.generate(custom_generate=generate, **given)


def _left_to_transformers(
    model: Any, mode: GenerationMode, input_ids: Tensor, config: Any, model_kwargs: dict[str, Any]
) -> str | None:
    """Why this call is decoded by transformers' own method; none: it is decoded by ours."""
    if mode not in OWN_MODES:
        return mode.value.replace("_", " ")
    if config.is_assistant:
        return "the model drafts for another one"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states are returned"
    if not model_kwargs.get("use_cache") or not isinstance(model_kwargs.get(CACHE), Cache):
        return "there is no cache"
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        if getattr(type(model), name) is not getattr(GenerationMixin, name):
            return f"{type(model).__name__} has its own {name}"
    extra = [k for k in ("token_type_ids", "mm_token_type_ids") if model_kwargs.get(k) is not None]
    if extra:
        return f"{extra[0]} grow with the text"
    if input_ids.device != model.device:
        return "the prompt is on another device than the model"
    return None


# ---- the loop --------------------------------------------------------------------------------------------------------


def _decode(
    model: Any,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: Any,
    streamer: Any,
    generator: torch.Generator | None,
    kwargs: dict[str, Any],
) -> Any:
    batch, length = input_ids.shape
    room = slots(kwargs[CACHE])
    outputs = prefill(model, input_ids, config, kwargs, room)
    kwargs = model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
    # A copy, because the prefill's logits may be those of the whole prompt.
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    del outputs
    cache = kwargs[CACHE]
    past = int(cache.get_seq_length())

    kept = bool(config.return_dict_in_generate)
    all_scores: list[Tensor] | None = [] if kept and config.output_scores else None
    all_logits: list[Tensor] | None = [] if kept and config.output_logits else None
    stop = Stop(criteria, batch, input_ids.device)
    if streamer is None and can_take_back(cache, kept):
        stop.every = CHECK_EVERY.get(input_ids.device.type, CHECK_OTHERWISE)
    states = RandomStates(input_ids.device, generator) if config.do_sample and stop.every > 1 else None
    process = Processors(processors)
    plain = process.plain and stop.plain
    padded = any(hasattr(c, "eos_token_id") for c in criteria)
    # Room for every token, or to begin with: a limit of millions may be meant as none.
    ids = torch.cat((input_ids, input_ids.new_empty(batch, min(max(stop.limit - length, 1), ROOM))), dim=1)
    so_far = input_ids
    step: Step | None = None

    with model._optimize_model_for_decode():
        while True:
            scores = process(so_far, logits)
            if all_scores is not None:
                all_scores.append(scores)
            if all_logits is not None:
                all_logits.append(logits)
            if config.do_sample:
                if states is not None:
                    states.remember()
                probabilities = torch.softmax(scores, dim=-1)
                tokens = torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(1)
            else:
                tokens = torch.argmax(scores, dim=-1)
            if padded:
                tokens = torch.where(stop.alive, tokens, config._pad_token_tensor)
            if length == ids.shape[1]:
                ids = torch.cat((ids, torch.empty_like(ids)), dim=1)
            ids.select(1, length).copy_(tokens)
            length += 1
            so_far = ids[:, :length]
            if not plain:  # code of others may want to view or to keep it
                so_far = so_far.clone(memory_format=torch.contiguous_format)
            done = stop(so_far, tokens, length, all_scores)
            if streamer is not None:
                streamer.put(tokens.cpu())
            if done:
                break
            if states is not None and stop.looked:
                states.forget()
            if room is not None and past >= room:
                if stop.everybody_done():
                    break
                raise too_short(room, past, 1, "fu_compile.generate")
            past += 1
            if step is None:
                step = Step(model, _call(model, config, kwargs), tokens, kwargs, past - 1)
            logits = step(tokens).to(torch.float32)

    surplus = stop.surplus()
    if surplus:
        length -= surplus
        for recorded in (all_scores, all_logits):
            if recorded is not None:
                del recorded[-surplus:]
        if states is not None:
            states.restore(surplus)
        if outlives(cache, kept):
            cache.crop(-surplus)
    if streamer is not None:
        streamer.end()
    sequences = ids[:, :length].contiguous()
    if not kept:
        return sequences
    make: Any = GenerateDecoderOnlyOutput
    return make(
        sequences=sequences,
        scores=None if all_scores is None else tuple(all_scores),
        logits=None if all_logits is None else tuple(all_logits),
        **{CACHE: cache},
    )


def prefill(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], room: int | None) -> Any:
    """The model's output for what the cache does not hold yet, in chunks of ``prefill_chunk_size``; fills the cache.

    Where the prompt is as long as the mask it is the whole conversation, and what the cache holds is left out; a
    shorter prompt is new text only.

    Raises:
        GenerateError: the cache holds the whole prompt already.
        CacheLengthError: the new tokens do not fit into ``room`` slots. Nothing was written.
    """
    embeds, mask, positions = (kwargs.get(k) for k in ("inputs_embeds", "attention_mask", "position_ids"))
    source = input_ids if embeds is None else embeds
    given, past = source.shape[1], int(kwargs[CACHE].get_seq_length())
    width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    known = past if embeds is not None or width == given else 0
    new = given - known
    if new < 1:
        raise GenerateError(
            f"the prompt has {given} tokens and the cache holds {past} already: nothing is left to run",
            where="prefill",
            advice="Pass the whole conversation, or the new tokens with an attention_mask of the whole conversation.",
        )
    if room is not None and past + new > room:
        raise too_short(room, past, new, "fu_compile.generate")
    chunk = config.prefill_chunk_size or new
    part = dict(kwargs)
    outputs = None
    for start in range(0, new, chunk):
        size = min(chunk, new - start)
        later = new - start - size
        if later:  # contiguous: strides are guarded too, and chunks of all sizes share a graph
            if mask is not None:
                part["attention_mask"] = mask[:, : mask.shape[1] - later].contiguous()
            if positions is not None:  # transformers cuts the positions of these tokens out of them
                part["position_ids"] = positions[..., : positions.shape[-1] - later]
        else:
            part |= {k: kwargs[k] for k in ("attention_mask", "position_ids") if k in kwargs}
        piece = source[:, known + start : known + start + size]
        if embeds is not None:
            part["inputs_embeds"] = piece
        inputs = model.prepare_inputs_for_generation(
            input_ids if embeds is not None else piece, is_first_iteration=True, **part
        )
        outputs = model(**inputs, return_dict=True)
        part[CACHE] = outputs.get(CACHE, part[CACHE])
    return outputs


class Step:
    """One decode step: input tensors that stay where they are, moved on in place by one token, and the model's logits.

    The first inputs are those that transformers prepares for the first decode step: whatever a model wants beside
    tokens, positions and masks is in them and stays. Calling a step

    - writes ``tokens``: [batch] int64 into the fixed [batch, 1] input and adds 1 to the positions;
    - opens one more column of the mask. With a static cache the mask is [batch, 1, 1, slots] and a column is set in
      place, at an index that lies on the device; with a growing cache a [batch, tokens] mask is cut from one of full
      width; where a column moves (sliding windows) or the mask is no such tensor, transformers makes it anew;
    - calls the model and returns the last position's logits: [batch, vocabulary] in the model's dtype.
    """

    def __init__(
        self,
        model: Any,
        call: Callable[..., Any],
        tokens: Tensor,
        kwargs: dict[str, Any],
        past: int,
    ) -> None:
        self.call = call
        self.inputs = model.prepare_inputs_for_generation(tokens[:, None], next_sequence_length=1, **kwargs)
        self.inputs["return_dict"] = True
        self.tokens = self.inputs["input_ids"].view(-1)
        self.position = self.inputs.get("position_ids")
        if self.position is not None:
            # One behind, as everything here: a call moves on before it runs.
            self.position = self.inputs["position_ids"] = self.position - 1
        self._open: Callable[[], None] | None = None
        mask, cache = self.inputs.get("attention_mask"), kwargs[CACHE]
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        sliding = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
        padding = kwargs.get("attention_mask")
        self._seen = past if padding is None else padding.shape[1] - 1
        self._padding: Tensor | None = padding  # of the text so far or wider
        if not cache.is_compileable:
            if isinstance(mask, Tensor):
                self._open = self._cut
        elif not sliding and all(isinstance(m, Tensor) and m.ndim == 4 and m.shape[-1] > past for m in masks):
            # A mask that is not contiguous may share memory between rows. A contiguous one stays the view that it is:
            # Dynamo's guards see that, and both loops share a graph.
            own = [m if m.is_contiguous() else m.clone(memory_format=torch.contiguous_format) for m in masks]
            self.inputs["attention_mask"] = dict(zip(mask, own, strict=True)) if isinstance(mask, dict) else own[0]
            self._masks = [(m, True if m.dtype == torch.bool else 0.0) for m in own]
            self._slot = torch.full((1,), past - 1, dtype=torch.int64, device=tokens.device)
            self._open = self._set
        else:
            self._model, self._kwargs = model, kwargs
            self._open = self._remake

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits after ``tokens``: [batch] int64."""
        self.tokens.copy_(tokens)
        if self.position is not None:
            self.position.add_(1)
        if self._open is not None:
            self._open()
        return self.call(**self.inputs).logits[:, -1]

    def _set(self) -> None:
        self._slot.add_(1)
        for mask, allowed in self._masks:
            mask.index_fill_(-1, self._slot, allowed)

    def _padding_so_far(self) -> Tensor | None:
        if self._padding is None:
            return None
        if self._seen > self._padding.shape[1]:
            self._padding = torch.cat((self._padding, torch.ones_like(self._padding)), dim=1)
        # Contiguous, as transformers' own growing mask: the same graph serves both.
        return self._padding[:, : self._seen].clone(memory_format=torch.contiguous_format)

    def _cut(self) -> None:
        self._seen += 1
        self.inputs["attention_mask"] = self._padding_so_far()

    def _remake(self) -> None:
        self._seen += 1
        kwargs = {**self._kwargs, "position_ids": self.position, "attention_mask": self._padding_so_far()}
        made = self._model.prepare_inputs_for_generation(self.inputs["input_ids"], next_sequence_length=1, **kwargs)
        if "attention_mask" in made:
            self.inputs["attention_mask"] = made["attention_mask"]


class Processors:
    """transformers' logits processors, without the look at each one's signature that its list takes at every token."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        self._list: Any = processors
        self._run: list[Any] | None = None
        self.plain = all(type(p).__module__ == logits_process.__name__ for p in processors)
        """Whether all are transformers' own, which neither view nor keep the ids they are given."""

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Scores: [batch, vocabulary] float32 for input_ids: [batch, tokens]."""
        if self._run is None:
            scores = self._list(input_ids, logits)  # raises for one that wants more arguments
            self._run = list(self._list) if type(self._list) is LogitsProcessorList else [self._list]
            return scores
        for run in self._run:
            logits = run(input_ids, logits)
        return logits


class Stop:
    """When to stop: what transformers' criteria say, the usual ones without their tensors of equal values.

    The limits on tokens and time are compared on the host. Who has met an end token or another criterion is kept in
    ``alive``: [batch] bool on the device, and looked at every ``every`` steps; :meth:`surplus` tells how many steps
    were too many.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int, device: torch.device) -> None:
        self.limit: int = criteria.max_length  # type: ignore[assignment]  # without a limit transformers' loop decodes
        self.every = 1
        self.looked = True
        """Whether the last call knew who is alive."""
        self.eos: Tensor | None = None
        self._length: MaxLengthCriteria | None = None
        self._times: list[MaxTimeCriteria] = []
        self._others = StoppingCriteriaList()
        for c in criteria:
            if type(c) is MaxLengthCriteria and c.max_length == self.limit:
                self._length = c
            elif type(c) is MaxTimeCriteria:
                self._times.append(c)
            elif type(c) is EosTokenCriteria and self.eos is None:
                self.eos = c.eos_token_id.to(device)
            else:
                self._others.append(c)
        self.plain = all(type(c).__module__ == stopping_criteria.__name__ for c in self._others)
        self.alive = torch.ones(batch, dtype=torch.bool, device=device)
        self._tracked = self.eos is not None or bool(self._others)
        self._calls = 0
        self._needed = torch.zeros((), dtype=torch.int64, device=device)
        self._positions = None if self._length is None else self._length.max_position_embeddings

    def __call__(self, input_ids: Tensor, tokens: Tensor, length: int, scores: list[Tensor] | None) -> bool:
        """Whether to stop after ``tokens``: [batch], the last of input_ids: [batch, length]."""
        self._calls += 1
        if self._length is not None and self._positions is not None and length > self._positions:
            self._positions = None
            self._length(input_ids, None)  # warns
        done = length >= self.limit
        for c in self._times:
            done = done or time.time() - c.initial_timestamp > c.max_time
        if not self._tracked:
            return done
        if self.every > 1:
            self._needed += self.alive.any()
        if self.eos is not None:
            self.alive &= torch.isin(tokens, self.eos, invert=True)
        if self._others:
            self.alive &= ~self._others(input_ids, None if scores is None else tuple(scores))
        self.looked = done or self._calls % self.every == 0
        return done or (self.looked and self.everybody_done())

    def everybody_done(self) -> bool:
        """Whether no sequence is alive. Waits for the device."""
        return self._tracked and not bool(self.alive.any())

    def surplus(self) -> int:
        """Steps made after the last sequence had ended."""
        return self._calls - int(self._needed) if self._tracked and self.every > 1 else 0


class RandomStates:
    """States of a random number generator before each of the last steps, so that steps can be taken back."""

    def __init__(self, device: torch.device, generator: torch.Generator | None) -> None:
        self._get: Callable[[], Tensor]
        self._set: Callable[[Tensor], Any]
        if generator is not None:
            self._get, self._set = generator.get_state, generator.set_state
        elif device.type == "cpu":
            self._get, self._set = torch.get_rng_state, torch.set_rng_state
        else:
            module = torch.get_device_module(device)
            self._get = functools.partial(module.get_rng_state, device)
            self._set = functools.partial(module.set_rng_state, device=device)
        self._states: list[Tensor] = []

    def remember(self) -> None:
        """Call before a step takes numbers."""
        self._states.append(self._get())

    def forget(self) -> None:
        """The steps so far stay."""
        self._states.clear()

    def restore(self, steps: int) -> None:
        """Takes the last ``steps`` steps back."""
        self._set(self._states[-steps])


def slots(cache: Cache) -> int | None:
    """Tokens that fit into the shortest layer that neither grows nor forgets; none where there is no such layer."""
    limits = [s.max_cache_len for s in cache.layers if isinstance(s, StaticLayer) and not s.is_sliding]
    return min(limits, default=None)


def outlives(cache: Cache, returned: bool) -> bool:
    """Whether somebody sees the cache after this call: it is returned, or the user made it."""
    return returned or bool(getattr(cache, "_is_user_defined", False))


def can_take_back(cache: Cache, returned: bool) -> bool:
    """Whether tokens decoded beyond the end leave no trace: nobody sees the cache, or it can forget them."""
    if not outlives(cache, returned):
        return True
    sliding = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    return bool(getattr(cache, "is_croppable", False)) and not sliding


# ---- who compiles ----------------------------------------------------------------------------------------------------

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def is_compiled(model: Any) -> bool:
    """Whether calls of ``model``, or of a part of it, reach the backend: compiled in place, or its ``forward``."""
    parts = itertools.chain((vars(model).get("forward"),), (m._compiled_call_impl for m in model.modules()))
    return any(backend_of(part) == BACKEND for part in parts if part is not None)


def _by_config(config: Any) -> bool:
    return getattr(config.compile_config, "backend", None) == BACKEND


def _warn_if_uncompiled(model: Any, config: Any) -> None:
    if model in _warned or _by_config(config) or is_compiled(model):
        return
    _warned.add(model)
    warnings.warn(
        f"{type(model).__name__} was never compiled with {BACKEND!r}: this generates uncompiled."
        f' Call model.compile(backend="{BACKEND}") first.',
        FuWarning,
        stacklevel=3,
    )


def _call(model: Any, config: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What a decode step calls: the model, or what ``CompileConfig(backend="futransformer")`` makes of it."""
    if _by_config(config) and not is_compiled(model) and model._valid_auto_compile_criteria(kwargs, config):
        return model.get_compiled_call(config.compile_config)
    return model


# ---- called by transformers ------------------------------------------------------------------------------------------


def _is_ours(custom_generate: Any) -> bool:
    while isinstance(custom_generate, functools.partial):
        custom_generate = custom_generate.func
    return custom_generate is generate or custom_generate is sys.modules[__name__]


def take_mode_arguments() -> None:
    """Lets ``model.generate`` hand its streamer, tokenizer and assistant to this module. Idempotent.

    transformers (5.17 to 5.24) drops them when ``custom_generate`` is a function, before it builds the stopping
    criteria: a stop string would fail for want of the tokenizer. Other functions get what they got.
    """
    original = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    if original is None:
        raise MissingDependencyError(
            "this version of transformers calls a custom_generate in another way",
            where="fu_compile.generate",
            advice="Use a version from 5.17 to 5.24; model.generate(...) without custom_generate works as well.",
        )
    if getattr(original, "_fu_extended", False):
        return

    @functools.wraps(original)
    def extract(
        self: Any, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        if not _is_ours(custom_generate):
            return original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        refuse(self, synced_gpus)  # before transformers prepares anything
        own = {"generator": kwargs.pop("generator")} if "generator" in kwargs else {}
        return original(self, None, kwargs, synced_gpus, assistant_model, streamer) | own

    extract._fu_extended = True  # type: ignore[attr-defined]
    GenerationMixin._extract_generation_mode_kwargs = extract  # type: ignore[method-assign]


take_mode_arguments()


class _CallableModule(types.ModuleType):
    """Lets ``fu_compile.generate`` be the function and the module at once."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return generate(*args, **kwargs)


_CallableModule.__call__.__doc__ = generate.__doc__
__signature__ = inspect.signature(generate)  # transformers asks which arguments it takes
sys.modules[__name__].__class__ = _CallableModule
