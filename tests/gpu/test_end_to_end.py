"""Models on the GPU: the backend takes the CUDA lowerings, agrees with the reference, and decodes in a CUDA graph.

With ``FU_SMOLLM2`` set to a folder or GGUF file of SmolLM2-135M-Instruct its text is compared with the CPU's as well.
"""

from __future__ import annotations

import os

import pytest
import torch
from fu_compile.lowerings import cublas_prefill, reference_attention, reference_block, reference_linear, rms_norm_sm90
from models import cache_kwarg, config, model

import fu_compile
from fu_compile import formats
from fu_compile.errors import CacheLengthError, CacheMismatchError, CaptureError, WeightsChangedError
from fu_compile.models import load, static_cache

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64, "num_hidden_layers": 2}


def logits(m: torch.nn.Module, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 131, (3, 70), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    out = m.generate(
        ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    return torch.stack(out.logits).float(), out.sequences[:, 70:]


@pytest.mark.parametrize("rest", ["eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generate(dtype, rest):
    runs = {}
    for lowering, kind in (("auto", dtype), ("reference", dtype), ("reference", torch.float32)):
        torch._dynamo.reset()
        m = model(config("llama", **SHAPE), kind).to("cuda")
        m.compile(backend="futransformer", options={"rest": rest, "lowering": lowering})
        runs[lowering, kind] = logits(m, cache_implementation="static")
        assert fu_compile.report(m).counters["decode_calls"] == 7
        used = {name for g in fu_compile.report(m).graphs for name, _ in g.lowerings.values()}
        if lowering == "auto" and torch.cuda.get_device_capability() == (9, 0):
            assert "cuda" in used
    assert torch.isfinite(runs["auto", dtype][0]).all()
    # Random weights amplify every rounding (and FP8's and INT4's most), so the measure is the reference itself: the
    # kernels may part from it by no more than it parts from its own float32 run, whose activations are not rounded.
    reference = runs["reference", dtype]
    assert apart(runs["auto", dtype], reference) < apart(reference, runs["reference", torch.float32])


def apart(a, b) -> float:
    """Relative distance of the logits, up to the first token that differs: later ones have another input."""
    (a, tokens), (b, expected) = a, b
    same = (tokens == expected).cumprod(1).bool()
    steps = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), 1).T
    return float((a - b)[steps].norm() / b[steps].norm())


def filled(m, length=60, slots=140, batch=2):
    """A cache with random tokens."""
    torch.manual_seed(3)
    cache = static_cache(m, slots, batch)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(length)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_captured_step_is_the_step(rest):
    """Over a page end, bit for bit; then calls without the graph go on where the replays ended."""
    torch._dynamo.reset()
    m = model(config("llama", **SHAPE), torch.bfloat16).to("cuda")
    fu_compile.compile(m, rest=rest)
    ids = torch.randint(3, 131, (80, 2, 1), device="cuda")
    plain, replayed = filled(m), filled(m)
    want = [m(input_ids=i, use_cache=True, **cache_kwarg(plain)).logits for i in ids[:70]]

    now = ids[0].clone()
    step = lambda: m(input_ids=now, use_cache=True, **cache_kwarg(replayed)).logits  # noqa: E731
    fresh = filled(m)
    with pytest.raises(CacheMismatchError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        m(input_ids=now, use_cache=True, **cache_kwarg(fresh))
    torch.cuda.synchronize()
    step()  # imports the cache; its row is written again by the first replay
    for layer in replayed.layers:
        layer.cumulative_length.fill_(60)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for i, expected in zip(ids[:70], want, strict=True):
        now.copy_(i)
        graph.replay()
        assert torch.equal(logits, expected)
    for a, b in zip(plain.layers, replayed.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        assert int(a.cumulative_length) == int(b.cumulative_length) == 130
    for i in ids[70:]:
        a, b = (m(input_ids=i, use_cache=True, **cache_kwarg(c)).logits for c in (plain, replayed))
        assert torch.equal(a, b)
    with pytest.raises(CacheLengthError, match="140"):  # the replays are counted
        step()
    keys = replayed.layers[0].keys.clone()
    graph.replay()  # past the end: nothing is written, nothing looks right
    assert logits.isnan().all()
    assert torch.equal(replayed.layers[0].keys, keys)


@torch.no_grad()
@pytest.mark.parametrize("rest", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["static", "int4"])
def test_a_captured_prefill_is_the_prefill(kind, rest):
    """Into a cache that is emptied in the graph, bit for bit; elsewhere NaN; a position nobody knows is an error."""
    torch._dynamo.reset()
    m = model(config("llama", **SHAPE), torch.bfloat16).to("cuda")
    fu_compile.compile(m, rest=rest, prefill="bf16")  # FP8 scales move from call to call
    texts = torch.randint(3, 131, (3, 2, 70), device="cuda")
    made = lambda: (  # noqa: E731
        filled(m, 0) if kind == "static" else fu_compile.Int4Cache(m.config, 140, 2, device="cuda", dtype=m.dtype)
    )
    step = lambda ids, cache: m(input_ids=ids, use_cache=True, **cache_kwarg(cache)).logits  # noqa: E731
    plain, cache, now = made(), made(), texts[0].clone()
    step(now, cache), step(now[:, :1], cache)
    for layer in cache.layers:
        layer.cumulative_length.zero_()  # by hand: nobody knows
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(now, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.reset()
        logits = step(now, cache)
    for ids in texts:
        plain.reset()
        now.copy_(ids)
        graph.replay()
        assert torch.equal(logits, step(ids, plain))
        # What follows finds what the replay has written. A page that is imported from its rows may get the code beside
        # the kernel's for a key on a rounding tie; another text's keys would move the logits by more than their size.
        a, b = (step(ids[:, :1], c).float() for c in (cache, plain))
        assert float((a - b).norm() / b.norm()) < 2e-2
    elsewhere = torch.cuda.CUDAGraph()
    cache.reset()
    with torch.cuda.graph(elsewhere):
        logits = step(now, cache)
    step(now[:, :5], cache)
    elsewhere.replay()
    assert logits.isnan().all()


@torch.no_grad()
def test_weights_are_not_packed_during_capture():
    torch._dynamo.reset()
    m = model(config("llama", **SHAPE), torch.bfloat16).to("cuda")
    fu_compile.compile(m, rest="eager")
    cache = filled(m)
    now = torch.randint(3, 131, (2, 1), device="cuda")
    m(input_ids=now, use_cache=True, **cache_kwarg(cache))
    m.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    with pytest.raises(WeightsChangedError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        m(input_ids=now, use_cache=True, **cache_kwarg(cache))
    torch.cuda.synchronize()
    m(input_ids=now, use_cache=True, **cache_kwarg(cache))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [512, 576, 4096, 8192, 14344])
def test_rms_norm(dtype, k):
    for rows in (1, 3, 64):
        x = (torch.randn(rows, 1, k, device="cuda") * 3).to(dtype)
        w = torch.rand(k, device="cuda").to(dtype) + 0.5
        assert rms_norm_sm90.accepts(x, w, 1e-5) is None
        y, want = rms_norm_sm90.launch(x, w, 1e-5), reference_block.rms_norm(x, w, 1e-5)
        # Another order of summation may move a value across a rounding, which is 2^-7 of a bfloat16 at most; the two
        # products with the gain are then rounded themselves, half of that each.
        torch.testing.assert_close(y, want, rtol=2 * 2 ** (-7 if dtype == torch.bfloat16 else -10), atol=0)
        assert float((y != want).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", ["", "bias", "residual", "swiglu"])
def test_fp8_prefill(dtype, epilogue):
    n, k = 512, 384
    codes, scales = formats.quantize_fp8(torch.randn(n, k, device="cuda") / k**0.5)
    bias = torch.randn(n, device="cuda").to(dtype) if epilogue == "bias" else None
    for tokens in (1, 17, 300):
        x = torch.randn(1, tokens, k, device="cuda").to(dtype)
        residual = torch.randn(1, tokens, n, device="cuda").to(dtype) if epilogue == "residual" else None
        states = [torch.zeros(formats.FP8_STATE, device="cuda") for _ in range(2)]
        args = (bias, residual, 1e-5, 0.5, "rms", epilogue, "delayed")
        assert cublas_prefill._accepts_linear(x, codes, scales, states[0], *args) is None
        y = cublas_prefill.linear_fp8(x, codes, scales, states[0], *args)
        want = reference_linear.linear_fp8(x, codes, scales, states[1], *args)
        assert torch.equal(states[0], states[1])
        # The tensor cores keep about 14 bits of each FP8 product sum.
        assert float((y.float() - want.float()).norm() / want.float().norm()) < 4e-3


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_fresh_prefill_attention(heads):
    q, k, v = (torch.randn(2, h, 150, 64, device="cuda", dtype=torch.bfloat16) for h in (*heads, heads[1]))
    rest = (None,) * 9 + (None, 0.125, True)
    assert cublas_prefill._accepts_attention(q, k, v, *rest) is None
    y = cublas_prefill.attention_prefill(q, k, v, *rest)
    want = reference_attention.attention_prefill(q, k, v, *rest)
    # Weights in bfloat16 and one rounding of the output.
    assert float((y.float() - want.float()).norm() / want.float().norm()) < 4e-3


if os.environ.get("FU_SMOLLM2"):

    @torch.no_grad()
    def test_smollm2_says_the_same_as_on_the_cpu():
        """Greedy text of real weights, up to ties: where it parts, the CPU's own logits are nearly equal."""
        m, tokenizer = load(os.environ["FU_SMOLLM2"], torch.bfloat16)
        fu_compile.compile(m, rest="eager")
        prompts = ("What is the capital of France?", "Write one sentence about the sea.")
        runs = {}
        for device in ("cpu", "cuda"):
            torch._dynamo.reset()
            m.to(device)
            for prompt in prompts:
                text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)
                ids = tokenizer(text + "<|im_start|>assistant\n", return_tensors="pt").input_ids.to(device)
                out = m.generate(
                    ids, max_new_tokens=24, do_sample=False, cache_implementation="static", output_logits=True,
                    return_dict_in_generate=True,
                )  # fmt: skip
                runs[device, prompt] = (
                    out.sequences[0, ids.shape[1] :].cpu(),
                    torch.stack(out.logits)[:, 0].cpu().float(),
                )
        for prompt in prompts:
            (a, expected), (b, got) = runs["cpu", prompt], runs["cuda", prompt]
            count = min(len(a), len(b))
            part = next((i for i in range(count) if a[i] != b[i]), count)
            error = (
                (got[: part + 1] - expected[: part + 1]).abs().max() if part < count else (got - expected).abs().max()
            )
            print(prompt, tokenizer.decode(b), f"same for {part} of {count} tokens, logits apart by {float(error):.3f}")
            if part < count:
                gap = float(expected[part, a[part]] - expected[part, b[part]])
                assert gap <= 2 * float(error), gap
            assert part >= 8
