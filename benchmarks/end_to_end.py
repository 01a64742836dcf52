"""A whole Llama-3.1-8B on one GPU beside compiled transformers: decode steps in a CUDA graph, prefill, error.

    python benchmarks/end_to_end.py
    python benchmarks/end_to_end.py --layers 2 --no-peer --seconds 0.1      # a quick look

Random bfloat16 weights of the real shapes, made on the device; a StaticCache with ``--context`` random tokens. A step:
logits of one token per sequence, argmax, the next token's id, all in one CUDA graph (ours, and transformers compiled
with mode="reduce-overhead", which makes its own). Cases run interleaved (A B A B), each for ``--seconds`` in all; ms:
the median over rounds. The counters are set back between rounds, so the context grows by less than 10 %.

floor: bytes that a step must read (packed weights, head, pages, exact rows) over the copy bandwidth of the same run.
error: relative difference of the logits from those of the reference lowering, from the same cache. In prefill: from the
uncompiled bfloat16 model's.
host: microseconds that the CPU needs per step without a graph.
Writes benchmarks/results/end_to_end-<date>-<commit>.json.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from decode_linears import Card, copy_bandwidth
from fu_compile.lowerings.dense import forget
from overhead import LLAMA_8B, ROOT, commit, machine

import fu_compile
from fu_compile import lowerings
from fu_compile.models import cache_kwarg
from fu_compile.report import record_of

STEPS = 64
"""Steps between two settings of the counters."""


class Decode:
    """One way to run decode steps: a forward, its own cache and its own token ids."""

    def __init__(self, forward: Callable[..., Any], model: Any, batch: int, context: int) -> None:
        from transformers import StaticCache

        config, self.kwarg = model.config, cache_kwarg(model)
        self.forward, self.context = forward, context
        self.cache = StaticCache(config=config, max_cache_len=context + 2 * STEPS)
        heads = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(batch, *heads, torch.bfloat16, torch.device("cuda"))
        torch.manual_seed(7)  # every way reads the same tokens
        for layer in self.cache.layers:
            layer.keys.normal_(), layer.values.normal_()
        self.ids = torch.randint(0, config.vocab_size, (batch, 1), device="cuda")
        self.start = self.ids.clone()
        self.keep: list[Any] = []  # what a captured graph reads and does not own
        self.graph: torch.cuda.CUDAGraph | None = None

    def back(self) -> None:
        """The counters and the token as they were at first."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)
        self.ids.copy_(self.start)

    def logits(self) -> Tensor:
        """[B, vocabulary] of the next step; the cache grows by it."""
        torch.compiler.cudagraph_mark_step_begin()
        return self.forward(input_ids=self.ids, use_cache=True, **{self.kwarg: self.cache}).logits[:, -1]

    def step(self) -> None:
        """One step without a graph of ours."""
        self.ids.copy_(self.logits().argmax(-1, keepdim=True))

    def capture(self) -> None:
        """One step as a CUDA graph."""
        self.back()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.back()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def run(self) -> None:
        """One step, as a graph where there is one."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()

    def ms(self, seconds: float) -> float:
        """Milliseconds per step over that long."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        total, count = 0.0, 0
        while total < seconds * 1e3:
            self.back()
            self.run()
            torch.cuda.synchronize()
            start.record()
            for _ in range(STEPS - 2):
                self.run()
            end.record()
            end.synchronize()
            total += start.elapsed_time(end)
            count += STEPS - 2
        return total / count

    def host_us(self) -> float:
        """Microseconds of the CPU per step without a graph; few at a time, so that the queue never fills."""
        found = []
        for _ in range(8):
            self.back()
            self.step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                self.step()
            found.append((time.perf_counter() - start) / 3e-6)
            torch.cuda.synchronize()
        return statistics.median(found)

    def kernels(self) -> list[tuple[str, int, float]]:
        """(name, launches, microseconds) of one step, most time first."""
        from torch.profiler import ProfilerActivity, profile

        self.back()
        self.run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            self.run()
            torch.cuda.synchronize()
        count: Counter[str] = Counter()
        us: dict[str, float] = defaultdict(float)
        for e in p.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                count[e.name] += 1
                us[e.name] += e.time_range.elapsed_us()
        return [(name, count[name], us[name]) for name in sorted(us, key=lambda n: -us[n])]


def floor_bytes(model: torch.nn.Module, config: Any, batch: int, context: int, head: str) -> int:
    """What a decode step of ours must read."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    dim = hidden // config.num_attention_heads
    kv = config.num_key_value_heads
    rows = (config.num_attention_heads + 2 * kv) * dim
    weights = layers * (rows * hidden + hidden * hidden + 3 * inner * hidden)
    packed = lambda n: n * 1072 // 2048  # noqa: E731  a tile of 2048 weights
    vocabulary = config.vocab_size * hidden
    pages, exact = context // 64 * 64, context % 64
    cache = batch * layers * kv * (pages * (dim + 4) + exact * dim * 4)
    return packed(weights) + (packed(vocabulary) if head == "int4" else 2 * vocabulary) + cache


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@torch.no_grad()
def measure(args: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Everything; prints as it goes and saves what there is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    clock = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - clock:6.1f} s] {what}", flush=True)

    if args.only_prefill:
        prefill(args, say, found := {}, save)
        save(found)
        return
    config = LlamaConfig(**LLAMA_8B, num_hidden_layers=args.layers)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    card, copy = Card(), copy_bandwidth()
    say(f"model on the device; copy {copy:.0f} GB/s")
    out: dict[str, Any] = {"copy GB/s": copy, "batch": args.batch, "context": args.context, "layers": args.layers}
    out["rows"] = []
    ways: dict[str, Decode] = {}
    eager = Decode(model.forward, model, args.batch, args.context)
    eager.back()
    plain = eager.logits().clone()
    for head in args.heads:
        fu_compile.compile(model, lm_head=head)
        way = Decode(model, model, args.batch, args.context)
        name = f"ours, head {head}"
        way.back()
        logits = way.logits().clone()
        torch.cuda.synchronize()
        way.keep = list(record_of(model).alive)
        say(f"{name}: first step")
        way.back()
        again = way.logits().clone()
        row: dict[str, Any] = {"case": name, "repeat identical": bool(torch.equal(again, logits))}
        row["host us"] = way.host_us()
        way.capture()
        way.back()
        with torch.no_grad():
            way.run()
        torch.cuda.synchronize()
        say(f"{name}: captured")
        captured = int(way.ids[0]) == int(logits[0].argmax())
        if not args.no_error:
            way.back()
            with lowerings.using("reference"):
                reference = way.logits().clone()
            row["error"] = relative(logits, reference)
            row["same argmax"] = bool((logits.argmax(-1) == reference.argmax(-1)).all())
            row["quantisation error"] = relative(reference, plain)
            _free_dense(model)
            say(f"{name}: error {row['error']:.2e}, quantisation {row['quantisation error']:.2e}")
        kernels = way.kernels()
        row |= {"replay gives the same token": captured, "launches": sum(k[1] for k in kernels)}
        row["kernels"] = [f"{n} x {c}: {us:.0f} us" for n, c, us in kernels[:14]]
        for line in row["kernels"]:
            print("   ", line[:150], flush=True)
        row["bytes"] = floor_bytes(model, config, args.batch, args.context, head)
        row["report"] = {n: v for g in fu_compile.report(model).graphs for n, v in g.lowerings.items()}
        out["rows"].append(row)
        ways[name] = way
    if not args.no_peer:
        compiled = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
        peer = Decode(compiled, model, args.batch, args.context)
        peer.back()
        for _ in range(4):
            peer.step()
        torch.cuda.synchronize()
        ways["transformers, reduce-overhead"] = peer
        out["rows"].append({"case": "transformers, reduce-overhead"})
        say("peer compiled")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            times[name].append(way.ms(args.seconds / args.rounds))
    for row in out["rows"]:
        ms = statistics.median(times[row["case"]])
        row |= {"ms": ms, "tokens/s": args.batch * 1e3 / ms}
        if "bytes" in row:
            row["of floor"] = row["bytes"] / copy / 1e6 / ms
            row["card"] = card.read(ways[row["case"]].graph)
    base = next((r["ms"] for r in out["rows"] if r["case"].startswith("transformers")), None)
    for row in out["rows"]:
        if base is not None:
            row["x transformers"] = base / row["ms"]
        shown = {k: v for k, v in row.items() if k not in ("kernels", "report", "bytes")}
        print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in shown.items()}), flush=True)
    save(out)
    ways.clear()
    if not args.no_prefill:
        del model, eager
        torch.cuda.empty_cache()
        prefill(args, say, out, save)


class Fp8Linear(torch.nn.Module):
    """What compiled PyTorch has for a linear in FP8: dynamic scales, torch._scaled_mm."""

    def __init__(self, linear: torch.nn.Linear, per_row: bool) -> None:
        super().__init__()
        w = linear.weight.detach()
        amax = w.abs().amax(1, keepdim=True) if per_row else w.abs().amax()
        self.scale = (amax / 448.0).float()
        self.weight = (w / self.scale).to(torch.float8_e4m3fn)
        self.per_row = per_row

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., K] -> [..., N]."""
        flat = x.reshape(-1, x.shape[-1])
        amax = flat.abs().amax(1, keepdim=True) if self.per_row else flat.abs().amax()
        scale = amax.float().clamp(min=1e-12) / 448.0
        codes = (flat.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(
            codes, self.weight.t(), scale_a=scale, scale_b=self.scale.t() if self.per_row else self.scale,
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
        return y.view(*x.shape[:-1], -1)


def in_fp8(model: torch.nn.Module, per_row: bool) -> torch.nn.Module:
    """The model with every projection of its layers in FP8, in place."""
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Fp8Linear(child, per_row))
    return model


class Prefill:
    """One way to prefill a prompt: everything up to the logits of its last token, as a CUDA graph."""

    def __init__(self, forward: Callable[..., Any], model: Any, ids: Tensor, cached: bool) -> None:
        from transformers import StaticCache

        self.forward, self.ids, self.kwargs = forward, ids, {"use_cache": cached, "logits_to_keep": 1}
        self.cache = None
        if cached:
            config = model.config
            self.cache = StaticCache(config=config, max_cache_len=ids.shape[1] + 64)
            heads = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
            self.cache.early_initialization(ids.shape[0], *heads, torch.bfloat16, torch.device("cuda"))
            self.kwargs[cache_kwarg(model)] = self.cache
        self.keep: list[Any] = [model]
        for _ in range(3):
            self.logits = self.once()
        torch.cuda.synchronize()
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                self.logits = self.once()
        except RuntimeError as error:  # what cannot be captured is timed as it is, and the result says so
            print(f"not captured: {str(error).splitlines()[0]}", flush=True)
            self.graph = None
        torch.cuda.synchronize()

    def run(self) -> None:
        """One prefill, as a graph where there is one."""
        if self.graph is None:
            self.logits = self.once()
        else:
            self.graph.replay()

    def once(self) -> Tensor:
        """[B, vocabulary]; without a graph."""
        if self.cache is not None:
            self.cache.reset()  # not the counters by hand: during a capture the host must know that it is empty
        return self.forward(input_ids=self.ids, **self.kwargs).logits[:, -1]

    def host_ms(self) -> float:
        """Milliseconds that the CPU needs to enqueue a call without a graph."""
        self.once()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.once()
        host = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        return host


def prefill(
    args: argparse.Namespace, say: Callable[[str], None], out: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> None:
    """Prefill of ``--prompt`` tokens beside compiled transformers in BF16 and FP8 (per tensor, per row), interleaved.

    ``block``: without a cache, milliseconds of a layer. ``cached``: into a StaticCache, ours also into its INT4 store.
    A vocabulary of 1,024 keeps embedding and head out of the times.
    """
    from prefill_gemm import Watch, interleaved
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = args.prefill_layers
    config = LlamaConfig(**(LLAMA_8B | {"vocab_size": 1024}), num_hidden_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, config.vocab_size, (1, args.prompt), device="cuda")
    plain = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].clone()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # the default, said aloud
    out["prefill"] = {"tokens": args.prompt, "layers": layers, "rows": []}
    ways: dict[str, Prefill] = {}
    for cached in (False, True):
        for name, options in {"ours": {}, "ours, prefill bf16": {"prefill": "bf16"}}.items():
            own = copy.deepcopy(model)
            fu_compile.compile(own, **options)
            case = name + ", cached" * cached
            ways[case] = way = Prefill(own, own, ids, cached)
            way.keep += record_of(own).alive
            ran = {n: v for g in fu_compile.report(own).graphs for n, v in g.lowerings.items()}
            out["prefill"].setdefault("lowerings", {})[case] = ran
            say(f"{case}: { ({n: v[0] for n, v in ran.items()}) }")
        if not args.no_peer:
            for name, per_row in (("fp8 per tensor", False), ("fp8 per row", True), ("bf16", None)):
                if cached and per_row is not None:
                    continue
                peer = copy.deepcopy(model)
                if per_row is not None:
                    in_fp8(peer, per_row)
                case = f"transformers, {name}" + ", cached" * cached
                ways[case] = Prefill(torch.compile(peer.forward, dynamic=False), peer, ids, cached)
                say(f"{case}: compiled")
        hosts = {name: way.host_ms() for name, way in ways.items()}
        times = interleaved({n: w.run for n, w in ways.items()}, args.seconds, args.rounds, Watch())
        for name, way in ways.items():
            ms = times[name]["ms"]
            row = {
                "case": name, "ms": ms, "ms per layer": ms / layers, "host ms": hosts[name],
                "graph": way.graph is not None, "card": times[name]["card"], "error": relative(way.logits, plain),
            }  # fmt: skip
            out["prefill"]["rows"].append(row)
            say(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}))
        save(out)
        ways.clear()
    by_name = {row["case"]: row["ms"] for row in out["prefill"]["rows"]}
    fp8 = [ms for name, ms in by_name.items() if name.startswith("transformers, fp8")]
    if fp8:
        out["prefill"]["block against fp8"] = min(fp8) / by_name["ours"]
        out["prefill"]["block against bf16"] = by_name["transformers, bf16"] / by_name["ours, prefill bf16"]
        say(f"block: {min(fp8) / by_name['ours']:.3f} x compiled FP8")
    save(out)


def _free_dense(model: torch.nn.Module) -> None:
    """Frees the float32 weights that the reference lowering made."""
    for graph in record_of(model).alive:
        for binding in graph._bindings.values():
            for t in binding.constants:
                forget(t)
    torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--heads", nargs="*", default=["model", "int4"], help="values of the option lm_head")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--only-prefill", action="store_true")
    parser.add_argument("--prefill-layers", type=int, default=8, help="layers of the model that prefills")
    parser.add_argument("--no-error", action="store_true", help="leave the reference lowering out")
    parser.add_argument("--commit", default=None, help="what was measured, where there is no git")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON file")
    args = parser.parse_args(argv)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    version = args.commit or commit()
    about = {"date": date, "commit": version, "gpu": torch.cuda.get_device_name()} | machine()
    path = args.out / f"end_to_end-{date}-{version}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args, lambda found: path.write_text(json.dumps(about | found, indent=1) + "\n") and None)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
