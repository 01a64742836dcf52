"""Checkpoints of other projects: written here by the letter of each format, read back bit for bit.

Every expected weight is computed from the unpacked numbers by the format's own formula, never by the code under test;
GGUF files are written, and dequantised, by the package ``gguf``.
"""

import json
import warnings

import gguf
import numpy as np
import pytest
import torch
from models import config, model
from safetensors.torch import load_file, save_file

import fu_compile
from fu_compile import checkpoints, formats
from fu_compile.errors import DataError, FormatError, FuWarning
from fu_compile.quantize import PackedLinear

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


def pack(values, order=range(8)):
    """[.., 8 m] -> [.., m] int32, value order[i] of each eight in bits 4i .. 4i+3, one after the other."""
    v = np.asarray(values, dtype=np.uint32)
    out = np.zeros((*v.shape[:-1], v.shape[-1] // 8), dtype=np.uint32)
    for i, column in enumerate(order):
        out |= v[..., column::8] << np.uint32(4 * i)
    return torch.from_numpy(out.view(np.int32).copy())


def numbers(n, k, group, low=0, high=16, dtype=torch.float16):
    """Random codes [N, K], zeros [N, G], scales [N, G]; and the group of every column."""
    g = -(-k // group)
    codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(low, high, (n, g))
    scales = (torch.rand(n, g) * 0.02 + 0.001).to(dtype)
    return codes, zeros, scales, torch.arange(k) // group


def dense(codes, zeros, scales, of):
    """scale * (code - zero), exact in float64."""
    return ((codes - zeros[:, of]).double() * scales.double()[:, of]).float()


def gptq(n, k, group, v2=False, act_order=False, **more):
    codes, zeros, scales, of = numbers(n, k, group, *((0, 16) if v2 else (1, 16)), **more)
    of = of[torch.randperm(k)] if act_order else of
    parts = {
        "qweight": pack(codes.t().reshape(k // 8, 8, n).transpose(1, 2)).squeeze(-1),
        "qzeros": pack((zeros - (0 if v2 else 1)).t()), "scales": scales.t().contiguous(), "g_idx": of.int(),
    }  # fmt: skip
    return parts, dense(codes, zeros, scales, of)


def awq(n, k, group):
    codes, zeros, scales, of = numbers(n, k, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": pack(codes.t(), order), "qzeros": pack(zeros.t(), order), "scales": scales.t().contiguous()}
    return parts, dense(codes, zeros, scales, of)


def compressed(n, k, group, symmetric=True, packed_zeros=True, dtype=torch.float16):
    codes, zeros, scales, of = numbers(n, k, group, dtype=dtype)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros
    wide = torch.nn.functional.pad(codes, (0, -k % 8))  # stored values are signed, plus 8
    parts = {"weight_packed": pack(wide), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
    if not symmetric:
        tall = torch.nn.functional.pad(zeros, (0, 0, 0, -n % 8))
        parts["weight_zero_point"] = pack(tall.t()).t().contiguous() if packed_zeros else (zeros - 8).to(torch.int8)
    return parts, dense(codes, zeros, scales, of)


def fp8(n, k, group, per_tensor=False):
    codes = (torch.randn(n, k)).to(torch.float8_e4m3fn)
    scale = torch.rand(1 if per_tensor else (n, 1)).bfloat16() if per_tensor else torch.rand(n, 1) * 0.01
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
    return parts, codes.float() * scale.float()


def torchao(n, k, group, shift=0):
    """Int4Tensor: two's complement nibbles, and a value that is added: here a whole number of steps, plus ``shift``."""
    codes, zeros, scales, of = numbers(n, k, group, dtype=torch.bfloat16)
    offset = ((8 - zeros + shift).float() * scales.float()).bfloat16()
    offset = offset if shift else torch.where(offset.float() == (8 - zeros).float() * scales.float(), offset, 0)
    q = (codes - 8).to(torch.int8)
    parts = {"_weight_qdata": (q[:, ::2] & 15) | (q[:, 1::2] << 4), "_weight_scale": scales.t().contiguous(),
             "_weight_zero_point": offset.t().contiguous()}  # fmt: skip
    said = {"_type": "Int4Tensor", "_data": {"block_size": [1, group], "shape": [n, k]},
            "_tensor_data_names": ["qdata", "scale", "zero_point"]}  # fmt: skip
    return parts, q.float() * scales.float()[:, of] + offset.float()[:, of], said


def torchao_fp8(n, k, group):
    parts, weight = fp8(n, k, group)
    said = {"_type": "Float8Tensor", "_data": {"block_size": [1, k]}, "_tensor_data_names": ["qdata", "scale"]}
    return {"_weight_qdata": parts["weight"], "_weight_scale": parts["weight_scale"]}, weight, said


def blocks(n, k, group):
    codes, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(-(-n // 128), -(-k // 128)) * 0.1
    wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def ct(fmt="pack-quantized", **weights):
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": {"weights": weights}}}


def ints(group, symmetric=True, strategy="group"):
    return ct(num_bits=4, type="int", symmetric=symmetric, strategy=strategy, group_size=group)


FORMATS = {
    "gptq": (lambda n, k: gptq(n, k, 64), {"quant_method": "gptq", "bits": 4, "group_size": 64}),
    "gptq-row": (lambda n, k: gptq(n, k, k), {"quant_method": "gptq", "bits": 4, "group_size": -1}),
    "gptq_v2": (
        lambda n, k: gptq(n, k, 32, v2=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (
        lambda n, k: awq(n, k, 64),
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    ),
    "ct": (lambda n, k: compressed(n, k, 128), ints(128)),
    "ct-asym": (lambda n, k: compressed(n, k, 32, symmetric=False), ints(32, symmetric=False)),
    "ct-asym-int8": (
        lambda n, k: compressed(n, k, 64, symmetric=False, packed_zeros=False, dtype=torch.bfloat16),
        ints(64, symmetric=False),
    ),
    "ct-channel": (lambda n, k: compressed(n, k, k), ints(None, strategy="channel")),
    "ct-fp8": (lambda n, k: fp8(n, k, 0), ct("float-quantized", num_bits=8, type="float", strategy="channel")),
    "ct-fp8-static": (
        lambda n, k: fp8(n, k, 0, per_tensor=True),
        ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "torchao": (lambda n, k: torchao(n, k, 64), {"quant_method": "torchao", "quant_type": {"default": {}}}),
    "torchao-fp8": (lambda n, k: torchao_fp8(n, k, 0), {"quant_method": "torchao", "quant_type": {"default": {}}}),
    "fbgemm": (lambda n, k: fp8(n, k, 0), {"quant_method": "fbgemm_fp8"}),
}


def written(folder, make, settings, family="llama", dtype=torch.float32):
    """A model folder in the format; the float model with the weights that it stands for."""
    m = model(config(family, **SIZES), dtype=dtype)
    state = {n: t.clone() for n, t in m.state_dict().items()}
    metadata = {"format": "pt"}
    for name, module in m.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            parts, weight, *said = make(*module.weight.shape)
            metadata |= {f"{name}.weight": json.dumps(one) for one in said}
            del state[f"{name}.weight"]
            state |= {f"{name}.{part}": t.contiguous() for part, t in parts.items()}
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
    folder.mkdir(exist_ok=True)
    m.config.save_pretrained(folder)
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, "quantization_config": settings}))
    save_file(state, folder / "model.safetensors", metadata=metadata)
    return m


def same_weights(got, want):
    linears = {n: mod for n, mod in got.named_modules() if isinstance(mod, PackedLinear)}
    assert len(linears) == 7
    for name, linear in linears.items():
        assert torch.equal(linear.weight, want.get_submodule(name).weight), name
    ids = torch.randint(3, 131, (2, 7))
    with torch.no_grad():
        # the same products in float32, in another order at most
        torch.testing.assert_close(got(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_compatible_grids_are_repacked_bit_for_bit(name, tmp_path):
    want = written(tmp_path, *FORMATS[name], family="qwen2" if name in ("gptq", "awq") else "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuWarning)
        got = checkpoints.load(tmp_path)
    same_weights(got, want)
    attention = got.model.layers[0].self_attn
    assert attention.q_proj.block is attention.v_proj.block


def test_a_repacked_model_can_be_saved_compiled_and_loaded(tmp_path):
    want = written(tmp_path / "gptq", *FORMATS["gptq"])
    m = fu_compile.load(tmp_path / "gptq")  # recognised
    fu_compile.save(m, tmp_path / "packed")
    again = fu_compile.load(tmp_path / "packed")
    same_weights(again, want)
    assert again.config.quantization_config.method == "gptq"
    again.compile(backend="futransformer", options={"rest": "eager", "kv_cache": "model", "strict": True})
    with torch.no_grad():
        ids = torch.randint(3, 131, (1, 5))
        torch.testing.assert_close(again(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (lambda n, k: compressed(n, k, 48), ints(48), "groups of 48"),
        (lambda n, k: torchao(n, k, 32, shift=0.3), {"quant_method": "torchao"}, "no integer"),
        (lambda n, k: blocks(n, k, 0), {"quant_method": "fp8", "weight_block_size": [128, 128]}, "along the columns"),
    ],
)
def test_other_grids_are_quantised_again_with_a_warning(make, settings, reason, tmp_path):
    want = written(tmp_path, make, settings)
    with pytest.warns(FuWarning, match=reason) as caught:
        got = checkpoints.load(tmp_path)
    # every projection, or (blocks of 128 columns) the one that has more than one block
    assert ("(1)" if "columns" in reason and settings["quant_method"] == "fp8" else "(7)") in str(caught[0].message)
    for name, linear in ((n, mod) for n, mod in got.named_modules() if isinstance(mod, PackedLinear)):
        weight = want.get_submodule(name).weight
        error = (linear.weight - weight).norm() / weight.norm()
        # uniform codes over one step: 1 / (15 * sqrt(12)) of the range, which is 3.5 times the rms here; e4m3: 2^-4 / 2
        assert error < 0.12, name


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_activation_order_is_kept_where_the_inputs_can_be_put_in_order(family, tmp_path):
    want = written(tmp_path, lambda n, k: gptq(n, k, 64, act_order=True), FORMATS["gptq"][1], family=family)
    with pytest.warns(FuWarning, match="activation order") as caught:
        got = checkpoints.load(tmp_path)
    assert "(6)" in str(caught[0].message)  # q, k, v, o, gate, up
    mine, theirs = got.model.layers[0].mlp, want.model.layers[0].mlp
    order = checkpoints_order(tmp_path)
    assert torch.equal(mine.down_proj.weight, theirs.down_proj.weight[:, order])
    twin = theirs.up_proj.weight[order]
    for name, a, b in (
        ("up", mine.up_proj.weight, twin),
        ("gate", mine.gate_proj.weight, theirs.gate_proj.weight[order]),
    ):
        # to the nearest of 16 levels in groups of 32 of a uniform distribution
        assert (a - b).norm() / b.norm() < 0.1, name
    attention = got.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        a, b = getattr(attention, name).weight, getattr(want.model.layers[0].self_attn, name).weight
        assert (a - b).norm() / b.norm() < 0.1, name


def checkpoints_order(folder):
    """Columns of down_proj by group, and by number within a group."""
    g_idx = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.g_idx"].tolist()
    return sorted(range(len(g_idx)), key=lambda column: (g_idx[column], column))


def test_only_the_grid_of_down_proj_moves_the_rows_of_gate_and_up(tmp_path):
    """down_proj in activation order, everything else in order: nothing is quantised again, the logits are the same."""
    want = written(tmp_path, lambda n, k: gptq(n, k, 64, act_order=k == 192), FORMATS["gptq"][1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuWarning)
        got = checkpoints.load(tmp_path)
    ids = torch.randint(3, 131, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(got(ids).logits, want(ids).logits, rtol=1e-4, atol=1e-5)


def test_zero_points_beyond_the_grid_are_quantised_again(tmp_path):
    parts, weight = gptq(32, 128, 64)
    zeros = checkpoints.unpack_nibbles(parts["qzeros"], 1)
    zeros[0, 3] = 15  # v1 stores zero - 1: a zero point of 16
    parts["qzeros"] = pack(zeros)
    from collections import Counter

    found = checkpoints.gptq(parts, FORMATS["gptq"][1], Counter())
    assert isinstance(found, checkpoints.Again)
    assert "0..15" in found.reason
    others = torch.arange(32) != 3
    assert torch.equal(found.weight[others], weight[others])
    assert torch.equal(found.weight[3, 64:], weight[3, 64:])


def test_scales_that_float16_does_not_hold_are_named():
    from collections import Counter

    parts, weight = compressed(16, 64, 32, dtype=torch.bfloat16)
    parts["weight_scale"] = parts["weight_scale"].clone()
    parts["weight_scale"][2, 1] = 1.0078125 * 2**-20  # bfloat16 has it, float16's step there is 2^-24
    notes = Counter()
    found = checkpoints.compressed_tensors(parts, {"weights": ints(32)["config_groups"]["group_0"]["weights"]}, notes)
    assert list(notes.values()) == [1]
    got = formats.dequantize_int4(found)
    assert torch.equal(got[:2], weight[:2])
    parts["weight_scale"][0, 0] = 1e6
    again = checkpoints.compressed_tensors(parts, {"weights": ints(32)["config_groups"]["group_0"]["weights"]}, notes)
    assert "beyond float16" in again.reason


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"a": {}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        (ct("nvfp4-pack-quantized", num_bits=4), "nvfp4"),
        ({}, "None"),
    ],
)
def test_variants_that_cannot_be_read_are_named(settings, match, tmp_path):
    written(tmp_path, *FORMATS["gptq"][:1], settings)
    with pytest.raises(FormatError, match=match):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda parts, said: said.update(_type="Int4TilePackedTo4dTensor"), "Int4TilePackedTo4dTensor"),
        (lambda parts, said: parts.update(_weight_act_pre_scale=torch.ones(4)), "act_pre_scale"),
        (lambda parts, said: parts.pop("_weight_scale"), "_weight_scale"),
    ],
)
def test_torchao_variants_that_cannot_be_read_are_named(change, match, tmp_path):
    def make(n, k):
        parts, weight, said = torchao(n, k, 32)
        change(parts, said)
        return parts, weight, said

    written(tmp_path, make, {"quant_method": "torchao"})
    with pytest.raises(FormatError, match=match):
        checkpoints.load(tmp_path)


def test_torchao_constant_groups_keep_their_value():
    """A group of one value has no step: torchao stores the value as what is added."""
    from collections import Counter

    parts, weight, said = torchao(4, 64, 32)
    parts["_weight_scale"][0, 2] = 0.0
    parts["_weight_zero_point"][0, 2] = 0.25
    found = checkpoints.torchao(parts, {"tensor": said}, Counter())
    assert (found.weight[2, :32] == 0.25).all()
    assert torch.equal(found.weight[[0, 1, 3]], weight[[0, 1, 3]])


def test_damaged_and_missing(tmp_path):
    with pytest.raises(DataError):
        checkpoints.load(tmp_path)
    with pytest.raises(DataError, match="no file"):
        checkpoints.load(tmp_path / "x.gguf")
    written(tmp_path, *FORMATS["gptq"])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        checkpoints.load(tmp_path)


# ---- GGUF ----------------------------------------------------------------------------------------------------------


def interleave_halves(w, heads):
    """Rows of q and k as llama.cpp stores them: the two halves of every head, row by row."""
    dim = w.shape[0] // heads
    rows = [h * dim + half * dim // 2 + i for h in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return w[rows]


def gguf_file(path, kind, family="llama"):
    """Writes a model; returns the float model with the weights that the package gguf reads from it."""
    cfg = config(family, **SIZES)
    m = model(cfg)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(1)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_feed_forward_length(cfg.intermediate_size)
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(cfg.vocab_size)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    for name, p in m.named_parameters():
        base, _, last = name.rpartition(".")
        own = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.get(base)
        own = own or "blk.0." + names[base.removeprefix("model.layers.0.")]
        w = p.detach()
        heads = {"attn_q": 4, "attn_k": 2}.get(own.rpartition(".")[2]) if family == "llama" else None
        stored = (interleave_halves(w, heads) if heads else w).numpy()
        if p.dim() == 2 and own.startswith("blk"):
            if kind == gguf.GGMLQuantizationType.Q4_1:  # minima on the grid, so that the integer zero is exact
                stored = on_grid(stored)
            data = gguf.quantize(stored, kind)
            back = torch.from_numpy(gguf.dequantize(data, kind).copy())
            if heads:
                order = interleave_halves(torch.arange(w.shape[0])[:, None], heads)[:, 0]
                back = back[torch.argsort(order)]
            p.data.copy_(back)
            writer.add_tensor(f"{own}.{last}", data, raw_dtype=kind)
        else:
            writer.add_tensor(f"{own}.{last}", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return m


def on_grid(w):
    """Each block of 32: step * (code - 7) with codes 0..15 both present, and a step that float16 holds."""
    codes = np.random.default_rng(0).integers(0, 16, (w.size // 32, 32))
    codes[:, 0], codes[:, 1] = 0, 15
    step = np.float32(2.0**-6) * (1 + np.arange(w.size // 32) % 8 / 8)[:, None]
    return (step * (codes - 7)).astype(np.float32).reshape(w.shape)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_is_repacked_bit_for_bit(kind, family, tmp_path):
    path = tmp_path / "model.gguf"
    want = gguf_file(path, gguf.GGMLQuantizationType[kind], family)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FuWarning)
        got = checkpoints.load(path)
    same_weights(got, want)


def test_gguf_minima_between_the_steps_are_quantised_again():
    from collections import Counter

    w = np.random.default_rng(3).normal(size=(16, 64)).astype(np.float32)
    data = gguf.quantize(w, gguf.GGMLQuantizationType.Q4_1)
    raw = torch.from_numpy(data.reshape(16, 2, 20).copy())
    found = checkpoints.gguf_block(raw, 1, Counter())
    assert isinstance(found, checkpoints.Again)
    want = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_1).copy())
    torch.testing.assert_close(found.weight, want, rtol=0, atol=1e-6)  # -min / scale * scale: one float32 rounding
    constant = np.full((1, 32), 0.25, dtype=np.float32)
    data = gguf.quantize(constant, gguf.GGMLQuantizationType.Q4_1)
    found = checkpoints.gguf_block(torch.from_numpy(data.reshape(1, 1, 20).copy()), 1, Counter())
    assert torch.equal(found.weight, torch.full((1, 32), 0.25))
    with pytest.raises(FormatError, match="no place"):
        checkpoints.gguf_name("blk.0.ffn_gate_inp.weight")
