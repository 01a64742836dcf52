"""Full-size configurations on the meta device: everything is found, in time that grows linearly with the layers."""

import time

import pytest
import torch
from families import PLUMBING, expected, left_of_layers
from fu_compile.passes import RECOGNISE, Context, run
from graphs import misses
from models import LLAMA3, Recorder, cache_kwarg, compiled, static_cache
from transformers import AutoModelForCausalLM, LlamaConfig

ROPE = {**LLAMA3, "original_max_position_embeddings": 8192}
COMMON = {
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
    "rope_parameters": ROPE,
}  # fmt: skip
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}


def recognise(sizes: dict, tokens: int) -> tuple:
    """(capture, context, seconds of the passes) of one call with a StaticCache."""
    cfg = LlamaConfig(**COMMON, **sizes)
    with torch.device("meta"):
        m = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    found = []

    def rewrite(captured):
        ctx = Context(inputs=captured.inputs)
        start = time.perf_counter()
        run(captured.gm, ctx, RECOGNISE)
        found.append((captured, ctx, time.perf_counter() - start))

    compiled(m, Recorder(rewrite))
    cache = static_cache(m, 256, 1)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad():
        m(input_ids=ids, position_ids=ids.clone(), **cache_kwarg(cache))
    return found[0]


def check(sizes: dict, tokens: int) -> tuple[float, float]:
    layers = sizes["num_hidden_layers"]
    captured, ctx, seconds = recognise(sizes, tokens)
    assert {n: ctx.count(n) for n in RECOGNISE} == expected("llama", layers, "static")
    assert [misses(ctx, n) for n in RECOGNISE] == [[]] * len(RECOGNISE)
    assert left_of_layers(captured.gm) <= PLUMBING
    assert [r.index for r in ctx.data["kv_write"]] == list(range(layers))
    return captured.seconds, seconds


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 16])
def test_llama_8b(tokens):
    import torch._inductor.pattern_matcher  # noqa: F401  (its import is not the passes' time)

    capture, passes = check(LLAMA_8B, tokens)
    # The bars of the issue: 10 s together, 3 s for the passes.  Measured on 2 shared cores: 4.5 s and 0.6 s.
    assert passes <= 3
    assert capture + passes <= 10


@pytest.mark.slow
def test_llama_70b():
    check(LLAMA_70B, 1)


@pytest.mark.slow
def test_linear_in_layers():
    """Four times the layers take about four times as long; a quadratic pass would take sixteen."""
    times = [min(recognise({**LLAMA_8B, "num_hidden_layers": n}, 1)[2] for _ in range(2)) for n in (4, 16)]
    assert times[1] <= 7 * times[0]  # 4, with room for the noise of a shared machine
