"""Tiny models of every family, and the graphs that Dynamo captures from them."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)  # fmt: skip

from fu_compile.capture import Captured, capture

BASE = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip

FAMILIES: dict[str, tuple[type[PretrainedConfig], dict]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "smollm2": (
        LlamaConfig,
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "phi3": (Phi3Config, {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}),
    "granite": (
        GraniteConfig,
        {"attention_multiplier": 0.3, "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 3.0},
    ),
}  # fmt: skip
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": YARN,
}


def config(family: str, rope: str = "default", attn: str = "sdpa", **changes: object) -> PretrainedConfig:
    """A tiny configuration of a family."""
    cls, extra = FAMILIES[family]
    made = cls(**{**BASE, **extra, "rope_parameters": dict(ROPES[rope]), **changes})
    made._attn_implementation = attn
    return made


def model(cfg: PretrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A model with random weights; gains and biases are random too, so a lost one shows."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(cfg, dtype=dtype, attn_implementation=cfg._attn_implementation).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.3)
            else:
                p.normal_(0, 0.1)
    return made


class Recorder:
    """A backend that captures every graph, calls ``rewrite`` on it, and runs what that returns (eager by default)."""

    def __init__(self, rewrite=None) -> None:
        self.graphs: list[Captured] = []
        self.rewrite = rewrite

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list) -> object:
        captured = capture(gm, example_inputs)
        self.graphs.append(captured)
        if self.rewrite is None:
            return gm.forward
        return self.rewrite(captured) or gm.forward


def compiled(m: torch.nn.Module, recorder: Recorder, **kwargs: object) -> torch.nn.Module:
    """``m`` compiled in place through the recorder."""
    torch._dynamo.reset()
    m.compile(backend=recorder, **kwargs)
    return m


def static_cache(m: torch.nn.Module, length: int, batch: int) -> StaticCache:
    """A static cache whose tensors exist already, as after an eager prefill."""
    cache = StaticCache(config=m.config, max_cache_len=length)
    cfg = m.config
    head_dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    p = next(m.parameters())
    cache.early_initialization(batch, cfg.num_key_value_heads, head_dim, p.dtype, p.device)
    return cache


def cache_kwarg(cache: object) -> dict[str, object]:
    """The cache under the name that this transformers gives it."""
    import inspect

    from transformers import LlamaForCausalLM

    names = inspect.signature(LlamaForCausalLM.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}
