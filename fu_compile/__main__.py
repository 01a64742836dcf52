"""``python -m fu_compile doctor | explain | generate | perplexity | bench | quantize | warmup``, from a shell.

The options of the backend are switches made from the table in ``fu_compile/options.py``. A :class:`FuError` is printed
without a traceback and ends the program with exit code 2, as a wrong argument does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fu_compile import options as option_table
from fu_compile.errors import DataError, FuError, FuWarning, MissingDependencyError, OptionError

if TYPE_CHECKING:
    import torch

    from fu_compile.report import Report

DTYPES = ("auto", "bfloat16", "float16", "float32")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 (doctor found a problem), 2 (a named error) or 130 (interrupted)."""
    chosen = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn_in_one_line(warnings.showwarning)
            return chosen.run(chosen)
    except FuError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(prog="python -m fu_compile", description="FuTransformer from a shell.")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    one = commands.add_parser("doctor", help="what this machine can do")
    one.add_argument("--json", action="store_true", help="print JSON")
    one.set_defaults(run=_doctor)

    one = commands.add_parser("explain", help="what the backend would do with a model; compiles nothing")
    _add_model(one)
    one.add_argument("--meta", action="store_true", help="build the model from its configuration, without weights")
    one.add_argument("--attention", choices=("sdpa", "eager"), help="attn_implementation (with --meta)")
    one.add_argument("--repro", type=Path, metavar="FOLDER", help="write a script per graph that runs it on its own")
    _add_report(one, shown=True)
    _add_options(one)
    one.set_defaults(run=_explain)

    one = commands.add_parser("generate", help="generate text through the backend")
    _add_model(one)
    one.add_argument("prompt", help="the prompt; '-' reads it from standard input")
    one.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    one.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    one.add_argument("--temperature", type=float, default=0.8, metavar="T", help="with --sample")
    one.add_argument("--seed", type=int, default=0, help="with --sample")
    one.add_argument("--raw", action="store_true", help="leave the tokenizer's chat template out")
    one.add_argument("--eager", action="store_true", help="run the model uncompiled, for comparison")
    one.add_argument("--report", action="store_true", help="print the report at the end")
    _add_report(one, shown=False)
    _add_options(one)
    one.set_defaults(run=_generate)

    one = commands.add_parser("perplexity", help="perplexity of eager, exact, FP8 prefill and INT4 decode side by side")
    _add_model(one)
    paths = "comma-separated: eager, exact, fp8, int4, cache, cache4 (default: the first four)"
    one.add_argument("--paths", metavar="A,B", help=paths)
    one.add_argument("--windows", metavar="I,J", help="comma-separated window numbers (default: the gate's)")
    one.add_argument("--length", type=int, metavar="N", help="tokens in a window (default: 2048)")
    one.add_argument("--file", type=Path, help="a UTF-8 text instead of WikiText-2")
    one.add_argument("--dataset", metavar="NAME[:CONFIG[:SPLIT]]", help="a data set of the library datasets instead")
    one.add_argument("--layers", action="store_true", help="signal-to-noise of every layer; instead of perplexities,"
                     " unless --paths is given")  # fmt: skip
    one.add_argument("--accumulated", action="store_true", help="with --layers: errors along the layers, too")
    one.add_argument("--html", type=Path, metavar="FILE", help="with --layers: write heat maps as a page")
    one.add_argument("--save", type=Path, metavar="FILE", help="write everything as JSON")
    _add_options(one)
    one.set_defaults(run=_perplexity)

    one = commands.add_parser("bench", help="time to first token and tokens per second, eager beside the backend")
    _add_model(one)
    one.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    one.add_argument("--new-tokens", type=int, default=32, metavar="N")
    one.add_argument("--batch", type=int, default=1, metavar="N")
    one.add_argument("--repeat", type=int, default=3, metavar="N", help="timed runs; the best counts")
    _add_report(one, shown=False)
    _add_options(one)
    one.set_defaults(run=_bench)

    one = commands.add_parser("quantize", help="write a model with packed weights")
    _add_model(one)
    one.add_argument("out", metavar="OUT", type=Path, help="folder for the packed model and its tokenizer")
    one.add_argument("--method", choices=("rtn", "gptq"), default="rtn", help="round to nearest, or GPTQ with text")
    one.add_argument("--group-size", "--group", type=int, default=128, metavar="N", help="128, 64 or 32 (default: 128)")
    one.add_argument("--grid", choices=("sym8", "asym"), help="default: asym with calibration text, sym8 without")
    one.add_argument("--lm-head", choices=("model", "int4", "fp8"), default="model", help="the output head")
    one.add_argument("--overrides", metavar="PATTERN=CHOICE,...", default="",
                     help="of single linears: int4, int4:64 (group size), fp8, bf16, exact")  # fmt: skip
    one.add_argument("--calibration", type=Path, nargs="+", metavar="FILE", help="UTF-8 texts, or a folder of *.txt;"
                     " default for gptq: WikiText-2 if it is on this machine, else text of the model")  # fmt: skip
    one.add_argument("--dataset", metavar="NAME[:CONFIG[:SPLIT]]", help="calibration from the library datasets")
    one.add_argument("--samples", type=int, metavar="N", help="calibration sequences (default: 8)")
    one.add_argument("--length", type=int, metavar="N", help="tokens of each (default: 2048)")
    one.add_argument("--fp8-scales", action="store_true", help="store static activation scales of FP8 projections")
    one.add_argument("--quiet", action="store_true", help="no progress bars")
    one.set_defaults(run=_quantize)

    one = commands.add_parser("warmup", help="compile a model's CUDA kernels ahead; needs no GPU")
    one.add_argument("model", metavar="MODEL", help="a folder with config.json, or a hub id")
    one.add_argument("--dtype", choices=DTYPES, default="auto", help="of the activations (default: the checkpoint's)")
    one.add_argument("--tokens", default="1,8,32", metavar="M,N", help="tokens of a decode step (default: 1,8,32)")
    one.add_argument("--group-size", type=int, default=128, metavar="N", help="INT4 group size (default: 128)")
    one.add_argument(
        "--prefill", choices=("fp8", "bf16", "none"), default="fp8", help="kernels of prefill (default: fp8)"
    )
    one.add_argument("--quiet", action="store_true", help="no progress bar")
    one.set_defaults(run=_warmup)
    return top


def _add_model(to: argparse.ArgumentParser) -> None:
    to.add_argument("model", metavar="MODEL", help="a folder, a hub id, a .gguf file, or smollm2")
    to.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of the weights (default: the checkpoint's)")
    to.add_argument("--device", help="cpu, cuda, cuda:1... (default: cuda if there is one)")


def _add_report(to: argparse.ArgumentParser, shown: bool) -> None:
    to.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    to.add_argument("--json", action="store_true", help="print the report as JSON" + " instead of text" * shown)


def _add_options(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("options of the backend (docs/options.md)")
    group.add_argument("--mode", help=f"preset: {', '.join(option_table.PRESETS)}")
    for name, values, meaning in option_table.table():
        flag = "--" + name.replace("_", "-")
        if name == "overrides":
            group.add_argument(flag, metavar="PATTERN=PRECISION,...", help=f"{meaning}: {', '.join(values)}")
        elif isinstance(values[0], bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=meaning)
        else:
            group.add_argument(flag, metavar="X", help=f"{meaning}: {', '.join(map(str, values))}")


def options_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """The backend options given on the command line, ``mode`` included.

    Raises:
        OptionError: for a value that an option cannot take.
    """
    given = {} if chosen.mode is None else {"mode": chosen.mode}
    for name, _, _ in option_table.table():
        value = getattr(chosen, name)
        if value is not None:
            flag = "--" + name.replace("_", "-")
            given[name] = value if isinstance(value, bool) else option_table.parse(name, value, flag)
    option_table.Options.resolve(**given)  # a wrong mode is an error before a model is loaded
    return given


def _numbers(text: str | None, flag: str) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{text!r} is not a list of numbers", where=flag, advice="Write 14,56,98.") from None


def _positive(chosen: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(chosen, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"{getattr(chosen, name)} is not positive", where=flag, advice="Give 1 or more.")


def _device(chosen: argparse.Namespace) -> str:
    import torch

    if chosen.device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=chosen.device)
    except (RuntimeError, AssertionError) as error:
        what = f"device {chosen.device!r} cannot be used: {str(error).splitlines()[0]}"
        raise OptionError(what, where="--device", advice="python -m fu_compile doctor lists the devices.") from None
    return chosen.device


def _dtype(chosen: argparse.Namespace) -> torch.dtype | None:
    import torch

    return None if chosen.dtype == "auto" else getattr(torch, chosen.dtype)


def _load(chosen: argparse.Namespace) -> tuple[Any, Any]:
    if _missing("transformers"):
        raise MissingDependencyError("the package transformers is missing", advice="pip install transformers")
    device = _device(chosen)
    from fu_compile import models

    try:
        with _status(f"loading {chosen.model}"):
            return models.load(chosen.model, dtype=_dtype(chosen), device=device)
    except ValueError as error:  # transformers' word for a folder that holds another kind of model, or no tokenizer
        if isinstance(error, FuError):
            raise
        what = f"{chosen.model} cannot be loaded: {str(error).strip().splitlines()[0]}"
        raise DataError(what, where="MODEL", advice="Give a causal language model with its tokenizer.") from error


def _missing(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is None


def _status(text: str) -> Any:
    from rich.console import Console

    return Console(stderr=True).status(f"{text} ...")


def _show(report: Report, chosen: argparse.Namespace, text: bool) -> None:
    if chosen.json:
        print(json.dumps(report.as_dict(), indent=2))
    elif text:
        print(report)
    if chosen.html:
        print(f"wrote {report.to_html(chosen.html)}", file=sys.stderr)


# ---- the commands --------------------------------------------------------------------------------------------------


def _doctor(chosen: argparse.Namespace) -> int:
    from fu_compile.doctor import doctor

    found = doctor()
    print(json.dumps(found.as_dict(), indent=2) if chosen.json else found)
    return 0 if found.ok else 1


def _explain(chosen: argparse.Namespace) -> int:
    given = options_of(chosen)
    from fu_compile.report import explain

    model = _on_meta(chosen) if chosen.meta else _load(chosen)[0]
    mode = given.pop("mode", None)
    with _status("capturing and rewriting"):
        report = explain(model, mode=mode, options=given)
    _show(report, chosen, text=True)
    if chosen.repro:
        print("".join(f"wrote {path}\n" for path in report.repro(chosen.repro)), end="", file=sys.stderr)
    return 0


def _config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = f"no configuration in {name!r}: {str(error).strip().splitlines()[0]}"
        raise OptionError(what, where="MODEL", advice="Give a folder with config.json, or a hub id.") from None


def _warmup(chosen: argparse.Namespace) -> int:
    import torch

    from fu_compile import jit
    from fu_compile.formats import GROUPS
    from fu_compile.lowerings import gemm_sm90

    tokens = _numbers(chosen.tokens, "--tokens") or []
    most = jit.most_tokens()
    if not tokens or not all(1 <= t <= most for t in tokens):
        raise OptionError(f"--tokens {chosen.tokens}: numbers from 1 to {most}", where="--tokens")
    if chosen.group_size not in GROUPS:
        raise OptionError(f"there is no group size {chosen.group_size}; there are {GROUPS}", where="--group-size")
    config = _config(chosen.model)
    dtype = _dtype(chosen) or getattr(config, "dtype", None) or torch.bfloat16
    if dtype not in (torch.bfloat16, torch.float16):
        raise OptionError(f"CUDA kernels take 16-bit activations, and the model has {dtype}", where="--dtype",
                          advice="Give --dtype bfloat16, as you will load it.")  # fmt: skip
    half = dtype == torch.float16
    kernels = jit.kernels_of(config, tokens, chosen.group_size, half=half)
    if chosen.prefill != "none":
        kernels += gemm_sm90.kernels_of(config, chosen.prefill, half)
    done = jit.warmup(kernels, progress=not chosen.quiet)
    print(f"{done.compiled} kernels compiled, {done.from_disk} already in {jit.cache_folder()}, {done.seconds:.1f} s")
    return 0


def _on_meta(chosen: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(chosen.model)
    extra = {} if chosen.attention is None else {"attn_implementation": chosen.attention}
    dtype = _dtype(chosen) or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **extra).eval()


def _generate(chosen: argparse.Namespace) -> int:
    given = options_of(chosen)
    _positive(chosen, "max_new_tokens")
    prompt = sys.stdin.read() if chosen.prompt == "-" else chosen.prompt
    if not prompt.strip():
        raise OptionError(
            "the prompt is empty", where="prompt", advice="Give some text, or '-' to read standard input."
        )
    model, tokenizer = _load(chosen)
    import torch

    import fu_compile
    from fu_compile.report import report

    inputs = _tokens(tokenizer, prompt, chosen.raw, model.device)
    if not chosen.eager:
        fu_compile.compile(model, **given)
    torch.manual_seed(chosen.seed)
    sampling = {"do_sample": True, "temperature": chosen.temperature} if chosen.sample else {"do_sample": False}
    loop = {} if chosen.eager else {"custom_generate": fu_compile.generate}
    streamer = _streamer(tokenizer, _status("compiling the prefill graph" if not chosen.eager else "prefill"))
    with torch.no_grad():
        model.generate(
            **inputs,
            max_new_tokens=chosen.max_new_tokens,
            cache_implementation="static",
            streamer=streamer,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
            **loop,
        )
    print(streamer.summary(), file=sys.stderr)
    _show(report(model), chosen, text=chosen.report)
    return 0


def _tokens(tokenizer: Any, prompt: str, raw: bool, device: torch.device) -> dict[str, Any]:
    if raw or not getattr(tokenizer, "chat_template", None):
        return dict(tokenizer(prompt, return_tensors="pt").to(device))
    chat = [{"role": "user", "content": prompt}]
    made = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return dict(made.to(device))


def _streamer(tokenizer: Any, status: Any) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Prints the text as it comes and takes the times of the tokens."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.started = time.perf_counter()
            self.times: list[float] = []
            self.prompts = 0
            status.start()

        def put(self, value: Any) -> None:
            # The first call brings the prompt, every other one token.
            if self.prompts:
                self.times.append(time.perf_counter())
                status.stop()
            self.prompts += 1
            super().put(value)

        def end(self) -> None:
            status.stop()
            super().end()

        def summary(self) -> str:
            """``12 tokens; first after 1.50 s; the last half at 20.1 tokens/s``."""
            tokens = len(self.times)
            if not tokens:
                return "no tokens"
            text = f"\n{tokens} tokens; first after {self.times[0] - self.started:.2f} s, compiling included"
            # The second token still compiles the decode graph: the rate is that of the later half.
            late = self.times[tokens // 2 :]
            if len(late) > 1:
                text += f"; last {len(late) - 1} at {(len(late) - 1) / (late[-1] - late[0]):.1f} tokens/s"
            return text

    return Streamer()


def _perplexity(chosen: argparse.Namespace) -> int:
    given = options_of(chosen)
    windows = _numbers(chosen.windows, "--windows")
    for flag in ("accumulated", "html"):
        if getattr(chosen, flag) and not chosen.layers:
            raise OptionError(f"--{flag} belongs to the layer report", where=f"--{flag}", advice="Add --layers.")
    model, tokenizer = _load(chosen)
    from fu_compile import evaluate

    wanted: dict[str, Any] = {"paths": chosen.paths and chosen.paths.split(","), "windows": windows}
    wanted |= {"length": chosen.length, "file": chosen.file, "dataset": chosen.dataset}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    found: dict[str, Any] = {}
    if chosen.paths or not chosen.layers:
        result = evaluate.perplexity(model, tokenizer, options=given, **wanted)
        print(result)
        found = result.as_dict()
    if chosen.layers:
        from fu_compile.layers import text_report

        wanted.pop("paths", None)
        options = option_table.Options.resolve(**given)
        report = text_report(model, tokenizer, options=options, accumulated=chosen.accumulated, **wanted)
        print(report)
        found = found | {"layers": report.as_dict()} if found else report.as_dict()
        if chosen.html:
            print(f"wrote {report.to_html(chosen.html)}", file=sys.stderr)
    if chosen.save:
        chosen.save.write_text(json.dumps(found, indent=2) + "\n")
        print(f"wrote {chosen.save}", file=sys.stderr)
    return 0


def _bench(chosen: argparse.Namespace) -> int:
    given = options_of(chosen)
    _positive(chosen, "prompt_tokens", "new_tokens", "batch", "repeat")
    model, _ = _load(chosen)
    import torch
    from tqdm import tqdm

    import fu_compile
    from fu_compile.report import render, report, table

    generator = torch.Generator().manual_seed(0)
    shape = (chosen.batch, chosen.prompt_tokens)
    ids = torch.randint(model.config.get_text_config().vocab_size, shape, generator=generator).to(model.device)
    rows = []
    with tqdm(total=2 * (chosen.repeat + 1), file=sys.stderr, desc="eager", unit="run") as bar, torch.no_grad():
        for name in ("eager", "futransformer"):
            bar.set_description(name)
            if name != "eager":
                fu_compile.compile(model, **given)
            runs = []
            for _ in range(chosen.repeat + 1):
                runs.append(_timed(model, ids, chosen.new_tokens))
                bar.update()
            prefill, decode = (min(run[i] for run in runs[1:]) for i in (0, 1))
            tokens = (ids.numel() / prefill, chosen.batch * chosen.new_tokens / decode)
            rows.append((name, f"{sum(runs[0]):.2f}", f"{prefill:.3f}", f"{tokens[0]:.1f}", f"{tokens[1]:.1f}"))
    headings = ("path", "first run, s", "prefill, s", "prefill tokens/s", "decode tokens/s")
    title = f"{chosen.model}, {model.dtype}, {model.device}: batch {chosen.batch}, {chosen.prompt_tokens} prompt tokens"
    print(render([table(f"{title}, {chosen.new_tokens} new tokens", headings, rows)]))
    _show(report(model), chosen, text=False)
    return 0


def _quantize(chosen: argparse.Namespace) -> int:
    """With calibration every finished layer is kept in ``OUT.partial``: the same command goes on from there."""
    import shutil

    from fu_compile.options import Options

    sizes = {name: getattr(chosen, name) for name in ("samples", "length") if getattr(chosen, name) is not None}
    _positive(chosen, *sizes)
    overrides = _packed_overrides(chosen.overrides)
    Options(group_size=chosen.group_size)  # a wrong one is an error before a model is loaded
    if chosen.fp8_scales and "fp8" not in [chosen.lm_head, *(choice for _, choice in overrides)]:
        advice = "Add --overrides '*.layers.*=fp8', or a pattern of single projections."
        raise OptionError("there will be no FP8 projection to calibrate", where="--fp8-scales", advice=advice)
    if chosen.calibration and chosen.dataset:
        raise OptionError("both files and a data set are given", where="--calibration, --dataset", advice="Give one.")
    if chosen.out.exists() and (not chosen.out.is_dir() or any(chosen.out.iterdir())):
        raise DataError(f"{chosen.out} is there already", where="OUT", advice="Give a folder that does not exist.")
    calibrated = chosen.method == "gptq" or bool(chosen.calibration or chosen.dataset)
    compute = _device(chosen)
    if calibrated:
        chosen.device = "cpu"  # each layer visits the GPU
    model, tokenizer = _load(chosen)
    import fu_compile
    from fu_compile.calibration import dataset_rows, token_batches

    batches = None
    if calibrated or chosen.fp8_scales:
        source: Any = dataset_rows(chosen.dataset) if chosen.dataset else chosen.calibration
        batches = token_batches(source, tokenizer, model=model, **sizes)
        said = chosen.dataset or " ".join(map(str, chosen.calibration or ("the default text",)))
        print(f"calibration: {said}, {batches.shape[0]} x {batches.shape[1]} tokens", file=sys.stderr)
    before = sum(p.nbytes for p in model.parameters())
    partial = chosen.out.with_name(f"{chosen.out.name}.partial")
    start = time.perf_counter()
    fu_compile.quantize(
        model, chosen.method, group_size=chosen.group_size, grid=chosen.grid, lm_head=chosen.lm_head,
        overrides=overrides, calibration=batches if calibrated else None, resume=partial if calibrated else None,
        progress=not chosen.quiet, device=compute if calibrated and compute != "cpu" else None,
    )  # fmt: skip
    if chosen.fp8_scales and batches is not None:
        fu_compile.compile(model.to(compute), fp8_scaling="static", kv_cache="model", rest="eager")
        fu_compile.calibrate_fp8(model, batches, progress=not chosen.quiet)
    fu_compile.save(model, chosen.out)
    tokenizer.save_pretrained(chosen.out)
    shutil.rmtree(partial, ignore_errors=True)
    after = sum(t.nbytes for t in {t.data_ptr(): t for t in model.state_dict().values()}.values())
    print(f"{chosen.out}: {after / 1e6:.1f} MB ({before / 1e6:.1f} before), {time.perf_counter() - start:.1f} s")
    return 0


def _packed_overrides(text: str) -> list[tuple[str, Any]]:
    """``*.down_proj=fp8,*.v_proj=int4:64`` as fu_compile.quantize takes it."""
    pairs: list[tuple[str, Any]] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, choice = entry.rpartition("=")
        precision, colon, group = choice.partition(":")
        if not pattern or (colon and (precision != "int4" or not group.isdigit())):
            advice = "Write PATTERN=CHOICE,... with int4, int4:64, fp8, bf16 or exact."
            raise OptionError(f"{entry!r} is no override", where="--overrides", advice=advice)
        pairs.append((pattern, {"group_size": int(group)} if colon else precision))
    from fu_compile import gptq

    for _, entry in pairs:
        gptq.choice_of(entry, gptq.Choice("rtn", 128, "sym8"))
    return pairs


class _Clock:
    """A streamer that only takes the times at which tokens arrive on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then one token per sequence and call."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def _timed(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds from the prompt to the first token, and for ``new_tokens`` after it; greedy, static cache.

    ``ids``: [batch, tokens] int64. Tokens are on the host when the clock is read, so a GPU needs no other wait.
    """
    import torch

    clock = _Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens + 1,
        min_new_tokens=new_tokens + 1,
        do_sample=False,
        cache_implementation="static",
        streamer=clock,
        pad_token_id=0,
    )
    return clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1]


def _warn_in_one_line(otherwise: Callable[..., None]) -> Callable[..., None]:
    # In a shell, the line of code that warned says nothing to the reader.
    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, FuWarning):
            print(f"warning: {message}", file=sys.stderr)
        else:
            otherwise(message, category, *rest, **more)

    return show


if __name__ == "__main__":
    sys.exit(main())
