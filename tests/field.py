"""The models, calls and measures of the field cases (tests/cases, tests/e2e): tiny, random, no download.

Two judges. *J1*: ``mode="exact"`` in float32 must give eager's tokens and its logits to ``EXACT``. *J2*: the quantised
path against itself in another call style must stay within a stated fraction of E, the error that quantisation itself
makes on the same input (:func:`rms` of quantised minus eager logits), which the test measures first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    StaticCache,
)  # fmt: skip

import fu_compile

EXACT = 1e-4
"""Largest logit difference of the exact mode: float32 sums of up to 1,000 terms of size 1 in another order."""

_COMMON = {
    "num_hidden_layers": 2, "vocab_size": 1003, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
FIELD: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (
        LlamaConfig,
        {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "smol": (
        LlamaConfig,
        {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
         "tie_word_embeddings": True},
    ),
    "qwen2": (
        Qwen2Config,
        {"hidden_size": 896, "intermediate_size": 1152, "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "phi-dim": (
        LlamaConfig,
        {"hidden_size": 384, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 4,
         "head_dim": 96},
    ),
}  # fmt: skip
"""The fixtures of the field cases: F-llama, F-smol, F-qwen2 (biases on q, k, v), F-phi-dim (head_dim 96)."""


def build(cls: type[PretrainedConfig] = LlamaConfig, seed: int = 0, **sizes: Any) -> nn.Module:
    """A float32 model of any sizes on the CPU, with weights under which a lost gain or a wrong mask shows."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(cls(**{**_COMMON, **sizes})).eval().requires_grad_(False)
    for path, p in made.named_parameters():
        if path.endswith("bias"):
            p.normal_(0, 0.3)
        elif "norm" in path:
            p.uniform_(0.5, 1.5)  # a lost or doubled gain shows
        elif "embed" in path or "head" in path:
            p.normal_(0, 0.5)  # logits spread over tens: the largest one stands out
        else:
            p.normal_(0, p.shape[1] ** -0.5)  # rows of norm 1: attention is neither flat nor a single key
    return made


@functools.cache
def _master(name: str, seed: int) -> nn.Module:
    cls, sizes = FIELD[name]
    return build(cls, seed, **sizes)


def model(name: str = "llama", seed: int = 0) -> nn.Module:
    """A fresh copy of a fixture, float32 on the CPU, not compiled."""
    return copy.deepcopy(_master(name, seed))


def compiled(made: nn.Module, **options: Any) -> nn.Module:
    """``made`` compiled in place; what is not ours runs in eager unless ``rest`` says otherwise."""
    return fu_compile.compile(made, **{"rest": "eager", **options})


def counters(made: nn.Module) -> dict[str, int]:
    """The counters of the report that are not zero, without sizes; 0 for every other name."""
    return fu_compile.report(made).counters


def operators(made: nn.Module, phase: str) -> set[str]:
    """Names of the final operators of all graphs of one phase."""
    return {name for graph in fu_compile.report(made).graphs if graph.phase == phase for _, name, _ in graph.fused}


def prompt(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids without the padding token."""
    return torch.randint(1, 1003, shape, generator=torch.Generator().manual_seed(seed))


def static_cache(made: nn.Module, length: int, batch: int | None = None) -> StaticCache:
    """A static cache; with ``batch`` its tensors exist already, as after an eager prefill."""
    cache = StaticCache(config=made.config, max_cache_len=length)
    if batch is not None:
        config = made.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache.early_initialization(batch, config.num_key_value_heads, head_dim, made.dtype, made.device)
    return cache


CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What this transformers calls the cache."""


def step(made: nn.Module, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    """One forward call; the logits of all its tokens, [B, S, V]."""
    with torch.no_grad():
        return made(ids, **{CACHE: cache}, use_cache=True, **more).logits


def steps(made: nn.Module, ids: Tensor, cache: Any) -> Tensor:
    """The tokens of ``ids``: [B, T] one by one; logits [B, T, V]."""
    return torch.cat([step(made, ids[:, i : i + 1], cache) for i in range(ids.shape[1])], 1)


def generate(made: nn.Module, ids: Tensor, new: int, **more: Any) -> tuple[Tensor, Tensor]:
    """Greedy unless ``more`` says otherwise: (new tokens [B, new], raw logits [B, new, V])."""
    if "cache" in more:
        more[CACHE] = more.pop("cache")
    more = {"attention_mask": torch.ones_like(ids), "do_sample": False, **more}
    out = made.generate(ids, max_new_tokens=new, output_logits=True, return_dict_in_generate=True, **more)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def forced(made: nn.Module, ids: Tensor, tokens: Tensor) -> Tensor:
    """The logits that lead to each of ``tokens``: [B, new] after ``ids``, [B, new, V], from one call without a cache.

    What E is measured against: generated texts part where two logits are close, and then differ by more than E.
    """
    with torch.no_grad():
        return made(torch.cat((ids, tokens), 1)[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :]


def left_pad(rows: list[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of different length as one left-padded batch: (ids, attention mask)."""
    width = max(len(r) for r in rows)
    ids = torch.stack([torch.cat((r.new_full((width - len(r),), pad), r)) for r in rows])
    mask = torch.stack([torch.cat((r.new_zeros(width - len(r)), torch.ones_like(r))) for r in rows])
    return ids, mask


@contextlib.contextmanager
def dynamo_warnings() -> Iterator[list[str]]:
    """What Dynamo logs as a warning inside, such as that it gives up recompiling."""
    logged: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)


def crop(cache: StaticCache, tokens: int) -> None:
    """Takes the last ``tokens`` tokens off a static cache (transformers 5.17 leaves that to the user)."""
    if hasattr(cache.layers[0], "crop"):
        cache.crop(-tokens)
        return
    for layer in cache.layers:
        layer.cumulative_length.sub_(tokens)


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.double().square().mean().sqrt())


def dynamic_cache(made: nn.Module) -> DynamicCache:
    """A cache that grows by concatenation."""
    return DynamicCache(config=made.config)


def caches(made: nn.Module, length: int) -> dict[str, Any]:
    """One new cache of each kind."""
    return {"dynamic": dynamic_cache(made), "static": static_cache(made, length)}
