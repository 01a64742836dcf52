"""What FuTransformer itself costs, against the bars that the project set: import, capture and passes, each decode call,
decode with quantised weights on a CPU, memory while packing.

    python benchmarks/overhead.py                      # everything, some minutes on two cores
    python benchmarks/overhead.py import graph         # some parts
    python benchmarks/overhead.py --model FOLDER

Prints a table with bars and writes ``benchmarks/results/overhead-<date>-<commit>.json``. Exit code 1: a bar was missed.
No GPU is used.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]

# Meta's configuration of Llama-3.1-8B, without the checkpoint.
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@dataclass
class Row:
    """One number and its bar."""

    part: str
    what: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = False
    detail: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the bar is met; none where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar


# ---- import --------------------------------------------------------------------------------------------------------


def measure_import(args: argparse.Namespace) -> Iterator[Row]:
    """Median of 5 fresh interpreters each, alternating, so that a busy moment hits both."""
    programs = {
        "torch": "import torch",
        "ours": "import torch; import fu_compile",
        "dynamo": "import torch; import torch._dynamo, torch._inductor.compile_fx, transformers, rich, tqdm",
        "backend": (
            "import torch; import torch._dynamo, torch._inductor.compile_fx, transformers, rich, tqdm;"
            " import fu_compile.backend"
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.repeat):
        for name, program in programs.items():
            clock = f"import time; t = time.perf_counter(); {program}; print(time.perf_counter() - t)"
            out = subprocess.run([sys.executable, "-c", clock], capture_output=True, text=True, check=True)
            seconds[name].append(float(out.stdout.split()[-1]))
    median = {name: statistics.median(s) for name, s in seconds.items()}
    detail = f"median of {args.repeat}; torch alone {median['torch']:.2f} s"
    yield Row("import", "import fu_compile, over torch's", median["ours"] - median["torch"], "s", 0.3, detail=detail)
    over = median["backend"] - median["dynamo"]
    detail = f"what the first compile imports; Dynamo, Inductor and transformers alone {median['dynamo']:.2f} s"
    yield Row("import", "import fu_compile.backend, over Dynamo's and Inductor's", over, "s", 0.3, detail=detail)


# ---- capture and passes --------------------------------------------------------------------------------------------


def measure_graph(args: argparse.Namespace) -> Iterator[Row]:
    """Whole Llama-3.1-8B on the meta device, prefill and decode graph, and how the passes grow with its layers."""
    import fu_compile

    passes_seconds: dict[int, float] = {}
    explain(8)  # warm: the first graph of a process also pays for imports and caches
    for layers in (8, 16, 32):
        start = time.perf_counter()
        graphs = explain(layers)
        wall = time.perf_counter() - start
        passes_seconds[layers] = sum(s for g in graphs for name, s in g.seconds.items() if name != "capture")
        if layers < 32:
            continue
        for g in graphs:
            passes = sum(s for name, s in g.seconds.items() if name != "capture")
            slow = ", ".join(
                f"{name} {s:.2f}" for name, s in sorted(g.seconds.items(), key=lambda x: -x[1])[:4] if name != "capture"
            )
            whole = g.seconds["capture"] + passes
            yield Row(
                "graph", f"8B, {g.phase}: capture + passes", whole, "s", 10.0, detail=f"capture {whole - passes:.2f}"
            )
            yield Row("graph", f"8B, {g.phase}: passes", passes, "s", 3.0, detail=slow)
        yield Row("graph", "8B: explain, both graphs, Dynamo included", wall, "s", detail=fu_compile.__version__)
    first = (passes_seconds[16] - passes_seconds[8]) / 8
    second = (passes_seconds[32] - passes_seconds[16]) / 16
    detail = f"ms a layer and two graphs: {1e3 * first:.1f} from 8 to 16, {1e3 * second:.1f} from 16 to 32; linear is 1"
    # A pass that were quadratic would double from one interval to the next; 1.5 leaves room for timer noise.
    yield Row("graph", "passes: growth of the cost of a layer", second / first, "x", 1.5, detail=detail)


def explain(layers: int) -> Any:
    """The graph reports of Llama-3.1-8B's shape with this many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import fu_compile

    torch.compiler.reset()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_8B, num_hidden_layers=layers)).to(torch.bfloat16).eval()
    return fu_compile.explain(model).graphs


# ---- the runtime's own work in a decode call -----------------------------------------------------------------------


def measure_call(args: argparse.Namespace) -> Iterator[Row]:
    """A 32-layer decode call whose compiled graph is replaced by a constant: what remains is ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fu_compile import backend, models

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, num_hidden_layers=32)).eval().requires_grad_(False)
    kept: list[tuple[Any, tuple[Any, ...]]] = []
    real = backend.CompiledGraph

    class Kept(real):  # type: ignore[misc, valid-type]
        def __call__(self, *a: Any) -> Any:
            kept.append((self, a))
            return super().__call__(*a)

    backend.CompiledGraph = Kept  # type: ignore[misc]
    try:
        with models.compiled(model, rest="eager"), torch.no_grad():
            cache = {models.cache_kwarg(model): models.static_cache(model, 4096)}
            for _ in range(3):
                model(input_ids=torch.tensor([[5]]), use_cache=True, **cache)
            graph, arguments = kept[-1]
            times = stub_calls(graph, arguments, args.calls)
    finally:
        backend.CompiledGraph = real  # type: ignore[misc]
    detail = f"median of {len(times)}, 90 % under {1e6 * statistics.quantiles(times, n=10)[-1]:.0f}"
    yield Row(
        "call", "runtime's work in a decode call, 32 layers", 1e6 * statistics.median(times), "us", 150.0, detail=detail
    )


def stub_calls(graph: Any, arguments: tuple[Any, ...], calls: int) -> list[float]:
    """Seconds of each call of ``graph`` with a constant in the place of its compiled function."""
    call, inner, outputs = type(graph).__mro__[1].__call__, graph.inner, []
    graph.inner = lambda *a: outputs.append(inner(*a)) or outputs[0]
    call(graph, *arguments)
    graph.inner = lambda *a: outputs[0]
    times = []
    gc.disable()
    try:
        for _ in range(calls):
            start = time.perf_counter()
            call(graph, *arguments)
            times.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times[calls // 10 :]


# ---- decode on a CPU -----------------------------------------------------------------------------------------------


def measure_decode(args: argparse.Namespace) -> Iterator[Row]:
    """Tokens per second of single-token calls through a StaticCache, eager and quantised in turn: A B A B ..."""
    from fu_compile import models

    model, tokenizer = models.load(args.model, dtype=torch.float32)
    ids = tokenizer("The history of the town begins with", return_tensors="pt").input_ids
    kwarg = models.cache_kwarg(model)
    rates: dict[str, list[float]] = {"eager": [], "int4": []}
    with models.compiled(model, prefill="exact"), torch.no_grad():
        compiled = model._compiled_call_impl
        for turn in range(args.rounds + 1):
            for name in rates:
                model._compiled_call_impl = compiled if name == "int4" else None
                cache = {kwarg: models.static_cache(model, 64 * ((ids.shape[1] + args.tokens) // 64 + 1))}
                token = model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache).logits[:, -1:].argmax(-1)
                start = time.perf_counter()
                for _ in range(args.tokens):
                    token = model(input_ids=token, use_cache=True, logits_to_keep=1, **cache).logits[:, -1:].argmax(-1)
                if turn:  # the first round compiles and packs
                    rates[name].append(args.tokens / (time.perf_counter() - start))
        model._compiled_call_impl = compiled
    ratio = statistics.median(b / a for a, b in zip(rates["eager"], rates["int4"], strict=True))
    threads = f"{torch.get_num_threads()} threads, {args.rounds} rounds of {args.tokens} tokens, A B A B"
    for name, values in rates.items():
        yield Row("decode", f"CPU decode, float32, {name}", statistics.median(values), "tok/s", detail=threads)
    yield Row("decode", "CPU decode, INT4 weights and cache / eager", ratio, "x", 0.9, True, "median of paired ratios")


# ---- memory while packing ------------------------------------------------------------------------------------------


def measure_memory(args: argparse.Namespace) -> Iterator[Row]:
    """Resident memory while the weights of a synthetic bf16 model are packed, sampled every 2 ms, in a fresh process.

    Resident memory sees every allocation of torch, temporaries inside operators included; the model is large enough
    (eight layers of 90 MB) that the interpreter's own noise is small beside one layer. glibc is told to give freed
    blocks of 1 MB and more back at once: otherwise resident memory shows what its heap keeps, too.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
    for precision in ("int4", "fp8"):
        program = [sys.executable, __file__, "--packing", precision]
        out = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found = json.loads(out.stdout.splitlines()[-1])
        over = (found["peak"] - found["before"]) / 1e6
        bar = (found["packed"] + found["layer"]) / 1e6
        detail = ", ".join(f"{k} {v / 1e6:.0f} MB" for k, v in found.items() if k not in ("before", "peak"))
        yield Row("memory", f"packing {precision}: peak over the originals", over, "MB", bar, detail=detail)


def packing(precision: str) -> dict[str, int]:
    """Packs one model and returns bytes: before, peak, originals, packed, one layer."""
    import psutil
    from transformers import LlamaConfig, LlamaForCausalLM

    from fu_compile import models, runtime

    torch.set_default_dtype(torch.bfloat16)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=1024, num_hidden_layers=8, max_position_embeddings=256)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    process = psutil.Process()
    found: dict[str, int] = {}
    real = runtime.Binding

    class Watched(real):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def __init__(self, *a: Any) -> None:
            gc.collect()
            before = peak = process.memory_info().rss
            stop = threading.Event()

            def watch() -> None:
                nonlocal peak
                while not stop.wait(0.002):
                    peak = max(peak, process.memory_info().rss)

            thread = threading.Thread(target=watch)
            thread.start()
            try:
                super().__init__(*a)
            finally:
                stop.set()
                thread.join()
            packed = sum(c.nbytes for c in self.constants)
            found.update(before=before, peak=max(peak, process.memory_info().rss), packed=packed)

    runtime.Binding = Watched  # type: ignore[misc]
    options = {"prefill": precision} if precision == "fp8" else {"decode": precision}
    tokens = torch.ones((1, 16 if precision == "fp8" else 1), dtype=torch.int64)
    with models.compiled(model, rest="eager", **options), torch.no_grad():
        cache = {models.cache_kwarg(model): models.static_cache(model, 64)}
        model(input_ids=tokens, use_cache=True, **cache)
    found["originals"] = sum(p.nbytes for p in model.parameters())
    found["layer"] = sum(p.nbytes for p in model.model.layers[0].parameters())
    return found


# ---- all of it -----------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "import": measure_import,
    "graph": measure_graph,
    "call": measure_call,
    "decode": measure_decode,
    "memory": measure_memory,
}


def commit() -> str:
    """Short hash of the tree, with ``-dirty`` where it differs from that commit; COMMIT where no repository is."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or os.environ.get("COMMIT", "unknown")


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    import transformers

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = next((li.split(":")[1].strip() for li in cpuinfo.read_text().splitlines() if "model name" in li), name)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {"cpu": name, "cores": os.cpu_count(), "load": os.getloadavg()[0], **versions}


def table(rows: Sequence[Row]) -> Any:
    """A ``rich`` table of the rows."""
    from rich.table import Table

    out = Table(title="Overhead", title_justify="left")
    for head in ("what", "value", "bar", "", "detail"):
        out.add_column(head, justify="right" if head in ("value", "bar") else "left")
    for r in rows:
        bar = "" if r.bar is None else f"{'≥' if r.at_least else '≤'} {r.bar:.4g} {r.unit}"
        verdict = {None: "", True: "[green]pass[/green]", False: "[red]fail[/red]"}[r.ok]
        out.add_row(
            r.what, f"{r.value:.3g} {r.unit}" if r.value < 1000 else f"{r.value:.0f} {r.unit}", bar, verdict, r.detail
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; 1 where a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--model", default="smollm2", help="model of the decode part")
    parser.add_argument("--repeat", type=int, default=5, help="fresh interpreters per import time")
    parser.add_argument("--calls", type=int, default=1000, help="calls of the runtime")
    parser.add_argument("--rounds", type=int, default=5, help="A B rounds of decode")
    parser.add_argument("--tokens", type=int, default=32, help="tokens a round")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON file")
    parser.add_argument("--packing", choices=("int4", "fp8"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.packing:
        print(json.dumps(packing(args.packing)))
        return 0
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    from rich.console import Console
    from tqdm.auto import tqdm

    info = machine()
    rows: list[Row] = []
    for part in tqdm(args.parts or list(PARTS), desc="measuring", unit="part"):
        rows += PARTS[part](args)
    Console().print(table(rows))
    args.out.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = args.out / f"overhead-{date}-{commit()}.json"
    content = {"date": date, "commit": commit(), "machine": info, "rows": [asdict(r) | {"ok": r.ok} for r in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {path}")
    return int(any(r.ok is False for r in rows))


if __name__ == "__main__":
    sys.exit(main())
