"""The decision for one graph: what phase it is, and which precision everything in it gets, each with its reason.

Made once per graph, before any rewrite; printed in the report; every part can be overridden by an option.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from torch import fx

from . import formats, ops
from .options import Options

PRECISIONS = ("exact", "bf16", "fp8", "int4")
"""Of a linear's weight, from the most to the least faithful."""

_IN_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+(\.|$)")


@dataclass(frozen=True)
class Choice:
    """One decided value and the sentence that says why."""

    value: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """Everything decided for one graph."""

    options: Options
    phase: Choice
    """``prefill`` (several tokens, a cache is written), ``decode`` (one token per sequence) or ``score`` (no cache)."""
    batch: Choice
    query_length: Choice
    weights: Choice
    """Precision of the linears of the decoder layers; ``packed``: they came packed (fu_compile.quantize)."""
    activations: Choice
    cache: Choice
    """``int4``, ``int4-channel``, ``model`` (the cache stays as the model made it) or ``none``."""
    lm_head: Choice
    """Precision of the linears outside the decoder layers."""

    PARTS = ("phase", "batch", "query_length", "weights", "activations", "cache", "lm_head")

    def as_dict(self) -> dict[str, str]:
        """Part -> value."""
        return {p: getattr(self, p).value for p in self.PARTS}

    def reasons(self) -> dict[str, str]:
        """Part -> reason."""
        return {p: getattr(self, p).reason for p in self.PARTS}

    def precision(self, name: str) -> Choice:
        """Precision of the linear with this module path (``model.layers.0.mlp.gate_proj``)."""
        base = self.weights if in_decoder_layer(name) else self.lm_head
        if base.value == "packed":
            base = Choice("exact", "fu_compile.quantize left it as it is")
        chosen = self.options.precision_for(name, base.value)
        return base if chosen == base.value else Choice(chosen, f"option overrides: {name}")


def in_decoder_layer(name: str) -> bool:
    """Whether a module path lies in a decoder layer (``...layers.N...``)."""
    return _IN_LAYER.search(name) is not None


def attentions(gm: fx.GraphModule) -> list[fx.Node]:
    """The recognised attention nodes, in graph order."""
    return [n for n in gm.graph.nodes if ops.name_of(n.target) == "attention"]


def _caches(gm: fx.GraphModule) -> dict[str, fx.Node]:
    """The operators that write to a cache, each with its first node."""
    found: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        name = ops.name_of(node.target)
        if name in ("kv_write_", "kv_roll_", "kv_fill_", "kv_cat", "kv_update"):
            found.setdefault(name, node)
    return found


def has_int4_cache(gm: fx.GraphModule) -> bool:
    """Whether the graph works on the caller's own Int4Cache."""
    return "kv_update" in _caches(gm)


def _say(size: object) -> Choice:
    text = str(size)
    return Choice(text, "static size" if text.isdigit() else "symbolic: one graph serves every size")


def decide(gm: fx.GraphModule, options: Options) -> Decision:
    """Decides for a graph in which the Llama block has been recognised (at least one ``attention`` node)."""
    q = attentions(gm)[0].args[0].meta["val"]
    batch, query = q.shape[0], q.shape[2]
    caches = _caches(gm)
    one = isinstance(query, int) and query == 1
    if one:
        phase = Choice("decode", "one token per sequence: bound by reading weights and cache")
    elif not caches:
        phase = Choice("score", "no cache is written (use_cache=False): treated as prefill")
    else:
        phase = Choice("prefill", f"{query} tokens per sequence: weights are reused, bound by GEMMs")

    option = "decode" if phase.value == "decode" else "prefill"
    weights = Choice(getattr(options, option), f"option {option}")
    packed = Counter(n.args[1] for n in gm.graph.nodes if ops.name_of(n.target) == "packed_weight")
    if packed:
        have = " and ".join(f"{count} linears {precision}" for precision, count in sorted(packed.items()))
        weights = Choice("packed", f"packed with the model: {have}; other linears keep the model's dtype")
    activations = {
        "exact": Choice("model", "exact: the model's own dtype and roundings"),
        "bf16": Choice("16 bit", "16-bit weights"),
        "fp8": Choice("fp8", f"e4m3 with power-of-two scales, fp8_scaling={options.fp8_scaling}"),
        "int4": Choice("16 bit", "INT4 weights are dequantised into 16-bit MMA operands"),
        "packed": Choice("16 bit", "packed INT4 weights are dequantised into 16-bit operands, in prefill too"),
    }[weights.value]

    if not caches:
        cache = Choice("none", "no cache in this graph")
    elif "kv_update" in caches:
        scales = caches["kv_update"].args[5].meta["val"]
        cache = Choice(formats.CHANNEL if formats.per_channel(scales) else "int4", "the call's Int4Cache")
    elif options.kv_cache == "model":
        cache = Choice("model", "option kv_cache")
    elif caches.keys() != {"kv_write_"}:
        kind = "DynamicCache grows by concatenation" if "kv_cat" in caches else "a sliding window that has wrapped"
        cache = Choice("model", f"{kind}: attention stays on the model's own cache")
    else:
        keys = ", keys per channel and page" if options.kv_cache == formats.CHANNEL else ""
        cache = Choice(options.kv_cache, f"option kv_cache: StaticCache, redirected to its INT4 copy{keys}")
    head = (
        Choice("exact", "option lm_head=model: the head keeps the model's dtype")
        if options.lm_head == "model"
        else Choice(options.lm_head, "option lm_head")
    )
    return Decision(options, phase, _say(batch), _say(query), weights, activations, cache, head)
