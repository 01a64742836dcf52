"""Int4Cache: an ordinary transformers cache that stores rotated, centred INT4 pages and one exact, unfinished page.

::

    tokens     0 ........ 64 | 64 ....... 128 | 128 ... length        (max_cache_len slots)
    stored     INT4 page 0   | INT4 page 1    | exact rows, slot = position % 64

With ``kv_cache="int4-channel"`` keys are not rotated: each channel of a page has a range of its own.
Every operation of a transformers cache acts on this store or raises a named error. Eager works by dequantising; under
the backend the reads are fused into attention (passes/redirect_kv.py). What a query sees is one rule everywhere: pages
that were complete before its call as they decode, the unfinished page and the tokens of the call exactly. Cropping into
a quantised page reopens it: its rows come back as they decode. Formats: docs/numerics.md, decisions 3 to 5.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticLayer

from . import formats, lowerings, ops
from .caches import LENGTHS, difference, refuse, too_short
from .errors import CacheLengthError, CacheMismatchError, FuWarning, GradientError, HeadDimError, OptionError
from .keys import KeyTables, tables_of
from .lowerings.pages import calling, capturing
from .models import heads_of
from .weights import RISK

PAGE = ops.PAGE
_IMPLEMENTED = lowerings.TABLE  # importing the lowerings gives the operators their implementations
SUPPORTED = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types whose keys and values an Int4Cache can hold. All of them keep every token; the mask hides what is old."""

_TENSORS = ("key_rows", "value_rows", "k_codes", "k_scales", "v_codes", "v_scales")
"""What has a batch dimension, the first."""
_SHARED = ("key_mean", "key_balance", "cumulative_length")
"""What all sequences share."""


def rotate_values(model: nn.Module) -> nn.Module:
    """Rotates the values of every attention, and the columns of o_proj that read them: the model computes the same.

    v -> H v for every key/value head, W_o -> W_o H for every query head, H the block-diagonal Hadamard matrix that keys
    are rotated by (quant.md, R2). INT4 values then lose less, at no cost in a call. Computed in float32 and rounded
    once to the weights' dtype; calling it again undoes it, up to that rounding.

    Args:
        model: a model of transformers with q_proj, k_proj, v_proj, o_proj or qkv_proj, o_proj; changed in place.

    Returns:
        The model.

    Raises:
        CacheMismatchError: no attention of that kind, or one whose sizes do not fit. Nothing is changed.
    """
    config: Any = model.config
    _, kv_heads, head_dim = heads_of(config.get_text_config(decoder=True))
    kv_rows = kv_heads * head_dim
    pairs = []
    for name, module in model.named_modules():
        v = getattr(module, "v_proj", None) or getattr(module, "qkv_proj", None)
        o = getattr(module, "o_proj", None)
        if not isinstance(v, nn.Linear) or not isinstance(o, nn.Linear):
            continue
        if v.out_features < kv_rows or v.out_features % head_dim or o.in_features % head_dim:
            raise CacheMismatchError(f"{v.out_features} value rows do not fit heads of {head_dim}", where=name)
        pairs.append((v, o))
    if not pairs:
        raise CacheMismatchError("no attention with v_proj and o_proj was found", where=type(model).__name__)
    block = formats.hadamard_block(head_dim)
    with torch.inference_mode(False), torch.no_grad():
        for v, o in pairs:
            for rows in (v.weight[-kv_rows:], *(() if v.bias is None else (v.bias[-kv_rows:, None],))):
                heads = rows.float().unflatten(0, (-1, head_dim)).transpose(1, 2)
                rows.copy_(formats.hadamard(heads, block).transpose(1, 2).flatten(0, 1))
            o.weight.copy_(formats.hadamard(o.weight.float().unflatten(1, (-1, head_dim)), block).flatten(1))
    return model


class Int4Layer(StaticLayer):
    """One layer of an :class:`Int4Cache`.

    Args:
        max_cache_len: tokens that fit.
        batch_size: B.
        num_heads: key/value heads, Hkv.
        head_dim: D, even.
        dtype: of the keys and values of the model.
        device: where everything lives.
        tables: (mean, balance), [Hkv, D] each, or none: zero and one. Of keys per channel (mean, reads), zero both.
        exact_page: false: every token is rounded to INT4 when it is written; only its own call sees it exactly.
        kv_format: one of ``formats.KV_FORMATS``.

    Raises:
        HeadDimError: head_dim is odd. CacheLengthError: max_cache_len is not positive. FormatError: a format that does
            not exist. CacheMismatchError: tables of another size, or ``exact_page=False`` with keys per channel.
    """

    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(
        self,
        max_cache_len: int,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        tables: tuple[Tensor, Tensor] | None = None,
        exact_page: bool = True,
        kv_format: str = "int4",
    ) -> None:
        super().__init__(max_cache_len=max_cache_len)
        if kv_format == formats.CHANNEL and not exact_page:
            raise CacheMismatchError(
                f"{kv_format} has ranges of whole pages: the unfinished page is exact",
                where="exact_page=False",
            )
        self.exact_page = exact_page
        self.batch_size, self.num_heads = batch_size, num_heads
        self.k_head_dim = self.v_head_dim = head_dim
        self.dtype, self.device = dtype, device
        self.tables_given = tables is not None
        with torch.inference_mode(False):
            rows = (batch_size, num_heads, PAGE, head_dim)
            self.key_rows = torch.zeros(rows, dtype=dtype, device=device)
            self.value_rows = torch.zeros(rows, dtype=dtype, device=device)
            store = formats.kv_store(batch_size, num_heads, max_cache_len, head_dim, device, kv_format)
            self.k_codes, self.k_scales, self.v_codes, self.v_scales = store
            if tables is None:
                tables = formats.kv_tables(num_heads, head_dim, device, kv_format=kv_format)
            mean, balance = tables
            if mean.shape != (num_heads, head_dim) or balance.shape != (num_heads, head_dim):
                raise CacheMismatchError(
                    f"key tables {list(mean.shape)} and {list(balance.shape)} for {num_heads} heads of {head_dim}"
                )
            # Copies: a cache that is moved or copied never shares its tables.
            self.key_mean = mean.detach().to(device=device, dtype=torch.float32, copy=True)
            self.key_balance = balance.detach().to(device=device, dtype=torch.float32, copy=True)
            self.cumulative_length = torch.zeros((), dtype=torch.int64, device=device)
        self._know(0)
        self._mark()
        self.is_initialized = True

    def _mark(self) -> None:
        """Tells Dynamo that these tensors stay where they are, as StaticLayer does with its own."""
        for name in (*_TENSORS, *_SHARED):
            torch._dynamo.mark_static_address(getattr(self, name))

    def _know(self, tokens: int) -> None:
        """Remembers that the counter holds ``tokens``, so that nobody has to read it."""
        if not torch.compiler.is_compiling():
            LENGTHS.know(self.cumulative_length, tokens, capturing(self.cumulative_length))

    def _length(self) -> int:
        """Tokens in the cache: as the host knows it, else read."""
        counter = self.cumulative_length
        known = LENGTHS.known(counter, captured=True) if capturing(counter) else None
        return LENGTHS.read([counter])[0] if known is None else known

    def __repr__(self) -> str:
        size = f"{self.batch_size} x {self.max_cache_len} tokens, {self.num_heads} heads of {self.k_head_dim}"
        return f"{type(self).__name__}({size}, {self.nbytes} bytes)"

    # ---- contents --------------------------------------------------------------------------------------------------

    @property
    def kv_format(self) -> str:
        """``"int4"``, or ``"int4-channel"``: keys with a range per channel and page."""
        return formats.CHANNEL if formats.per_channel(self.k_scales) else "int4"

    @property
    def nbytes(self) -> int:
        """Bytes of everything the layer holds, tables included."""
        names = (*_TENSORS, *_SHARED)
        return sum(getattr(self, name).nbytes for name in names)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """[B, Hkv, max_cache_len, D] in the model's dtype, dequantised; zeros behind the last token. A new tensor."""
        return self._read("key_rows", "k_codes", "k_scales", self.key_mean, self.key_balance)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._assign("keys", value)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """As ``keys``."""
        return self._read("value_rows", "v_codes", "v_scales", None, None)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._assign("values", value)

    def _assign(self, what: str, value: Tensor | None) -> None:
        if value is not None:  # the base class says `self.keys = None` when it is made
            raise CacheMismatchError(
                f"the {what} of an Int4Cache are codes and cannot be assigned",
                where=type(self).__name__,
                advice="Write with update(); reset(), crop() and the batch operations change what is there.",
            )

    def _read(self, rows: str, codes: str, scales: str, mean: Tensor | None, balance: Tensor | None) -> Tensor:
        live = self._length()
        pages = live // PAGE
        exact = getattr(self, rows)
        out = exact.new_zeros((self.batch_size, self.num_heads, self.max_cache_len, exact.shape[-1]))
        decoded = ops.op("kv_dequantize")(getattr(self, codes), getattr(self, scales), mean, balance, pages)
        out[:, :, : pages * PAGE] = decoded
        out[:, :, pages * PAGE : live] = exact[:, :, : live % PAGE]
        return out

    # ---- the operations of a cache layer ---------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: an Int4Cache is whole from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends key_states and value_states: [B, Hkv, S, D]; a page that becomes complete is quantised.

        Returns:
            keys and values, [B, Hkv, max_cache_len, D], as attention sees them in this call.

        Raises:
            CacheMismatchError: another batch, head count, head_dim, dtype or device than the cache's.
            CacheLengthError: more tokens than fit. GradientError: gradients are wanted through the cache.
        """
        found = self._mismatch(key_states, value_states)
        if found is not None:
            refuse(type(self).__name__, *found)
        if not torch.compiler.is_compiling():
            used = self._check(key_states)
            with calling(used, capturing(self.cumulative_length)):
                seen = self._append(key_states, value_states)
            self._know(used + key_states.shape[2])
            return seen
        return self._append(key_states, value_states)

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`update` after all checks. Dynamo traces this."""
        tokens = key_states.shape[2]
        position = torch.arange(tokens, device=self.device) + self.cumulative_length
        store = (self.k_codes, self.k_scales, self.v_codes, self.v_scales, self.key_mean, self.key_balance)
        keys, values = torch.ops.futransformer.kv_update.default(
            key_states, value_states, self.key_rows, self.value_rows, *store, position, self.max_cache_len
        )
        if not self.exact_page:
            # Only the call itself sees its tokens exactly. Slots behind the last token take anything.
            last = min(tokens, PAGE)
            k, v = torch.ops.futransformer.kv_round.default(
                key_states[:, :, -last:], value_states[:, :, -last:], self.key_mean, self.key_balance
            )
            slots = position[-last:] % PAGE
            self.key_rows.index_copy_(2, slots, k)
            self.value_rows.index_copy_(2, slots, v)
        self.cumulative_length.add_(tokens)
        return keys, values

    def _mismatch(self, k: Tensor, v: Tensor) -> tuple[str, Any, Any] | None:
        """(what, the cache's, this call's) of the first thing that does not fit. Dynamo traces this."""
        if k.shape[2] > self.max_cache_len:
            return "slots", guard_scalar(self.max_cache_len), guard_scalar(k.shape[2])
        sizes = (
            ("batch size", self.batch_size, k.shape[0]),
            ("key/value heads", self.num_heads, k.shape[1]),
            ("head_dim", self.k_head_dim, k.shape[3]),
            ("head_dim of the values", self.v_head_dim, v.shape[3]),
        )
        others = (
            ("dtype", self.dtype, k.dtype),
            ("dtype of the values", self.dtype, v.dtype),
            ("device", self.key_rows.device, k.device),
        )
        return difference(sizes, others)

    def _check(self, k: Tensor) -> int:
        """What only an eager call can know: how full the cache is, whether a gradient is wanted, the kind of keys.

        Returns:
            Tokens in the cache.
        """
        if torch.is_grad_enabled() and k.requires_grad:
            raise GradientError("gradients are wanted through an Int4Cache", where=type(self).__name__)
        used, tokens = self._length(), k.shape[2]
        if used + tokens > self.max_cache_len:
            raise too_short(self.max_cache_len, used, tokens, type(self).__name__)
        if used == 0 and tokens >= PAGE and not self.tables_given and self.kv_format != formats.CHANNEL:
            rows = k.detach().float()
            constant = float((mean := rows.mean((0, 2))).abs().max())
            spread = float((rows - mean[:, None]).square().mean().sqrt())
            if constant > RISK * spread:
                warnings.warn(
                    f"one channel of the keys is {constant:.3g} on average, {constant / max(spread, 1e-12):.1f} times"
                    " their spread: INT4 keys lose the rest. Int4Cache(..., model=model) or tables=calibrate_keys(...)"
                    " subtracts it",
                    FuWarning,
                    stacklevel=4,
                )
        return used

    def get_seq_length(self) -> Any:
        """Tokens in the cache, a tensor on its device as in StaticLayer."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(slots, offset) of the mask."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.max_cache_len

    def get_max_cache_shape(self) -> int:
        """Tokens that fit (the name that older versions of transformers use)."""
        return self.max_cache_len

    def reset(self) -> None:
        """Forgets all tokens; the tables stay."""
        with torch.inference_mode(False):
            self.cumulative_length.zero_()
        self._know(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens: a negative number says how many, a positive one how many to keep.

        A quantised page that is cropped into becomes the unfinished page, with the values that its codes stand for.

        Raises:
            CacheLengthError: there are fewer tokens than that.
        """
        length, tokens_to_remove = self._length(), int(tokens_to_remove)  # assisted decoding may give a tensor
        left = length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, length)
        if left < 0:
            raise CacheLengthError(
                f"the cache holds {length} tokens, {-tokens_to_remove} cannot be removed", where=type(self).__name__
            )
        page, rows = left // PAGE, left % PAGE
        with torch.inference_mode(False), torch.no_grad():
            if rows and page < length // PAGE:
                one = slice(page, page + 1)
                dequantize = ops.op("kv_dequantize")
                k = dequantize(self.k_codes[:, :, one], self.k_scales[:, :, one], self.key_mean, self.key_balance, 1)
                v = dequantize(self.v_codes[:, :, one], self.v_scales[:, :, one], None, None, 1)
                self.key_rows.copy_(k)
                self.value_rows.copy_(v)
            self.cumulative_length.fill_(left)
        self._know(left)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was; beam_idx: [B] int. The tensors keep their addresses.

        Raises:
            CacheMismatchError: beam_idx is not one valid index for each sequence.
        """
        if beam_idx.dim() != 1 or beam_idx.shape[0] != self.batch_size:
            raise CacheMismatchError(
                f"the cache holds {self.batch_size} sequences, beam_idx is {list(beam_idx.shape)}",
                where=type(self).__name__,
            )
        index = self._indices(beam_idx)
        with torch.inference_mode(False), torch.no_grad():
            for name in _TENSORS:
                tensor = getattr(self, name)
                tensor.copy_(tensor.index_select(0, index))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these sequences, in this order; indices: [n] int, or [B] bool.

        Raises:
            CacheMismatchError: an index is out of range.
        """
        index = self._indices(indices)
        self._replace(lambda t: t.index_select(0, index))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, copies side by side.

        Raises:
            CacheMismatchError: repeats is not positive.
        """
        if repeats < 1:
            raise CacheMismatchError(f"a cache cannot be repeated {repeats} times", where=type(self).__name__)
        self._replace(lambda t: t.repeat_interleave(repeats, 0))

    def _indices(self, indices: Tensor) -> Tensor:
        """[n] int64 on the cache's device, checked."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool and indices.numel() == self.batch_size:
            indices = indices.flatten().nonzero()
        low, high = (int(indices.min()), int(indices.max())) if indices.numel() else (0, -1)
        if low < -self.batch_size or high >= self.batch_size:
            raise CacheMismatchError(
                f"the cache holds {self.batch_size} sequences, the indices go from {low} to {high}",
                where=type(self).__name__,
            )
        return indices.flatten().to(device=self.key_rows.device, dtype=torch.int64) % max(self.batch_size, 1)

    def _replace(self, change: Any) -> None:
        """Gives every tensor with a batch dimension another batch."""
        with torch.inference_mode(False), torch.no_grad():
            for name in _TENSORS:
                setattr(self, name, change(getattr(self, name)).contiguous())
        self.batch_size = self.key_rows.shape[0]
        self._mark()

    def offload(self) -> None:
        """Moves the contents to the CPU until ``prefetch``."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Brings offloaded contents back."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name in _TENSORS:
                setattr(self, name, getattr(self, name).to(device, non_blocking=True))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Int4Layer:
        """Moves the layer and/or gives its exact rows another floating dtype; returns itself.

        Raises:
            CacheMismatchError: dtype is not floating.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise CacheMismatchError(f"a cache cannot hold {dtype}", where=type(self).__name__)
        known = LENGTHS.known(self.cumulative_length)
        self.device = self.device if device is None else torch.device(device)
        self.dtype = self.dtype if dtype is None else dtype
        self._move(self.device)
        with torch.inference_mode(False), torch.no_grad():
            for name in ("key_rows", "value_rows"):
                setattr(self, name, getattr(self, name).to(self.dtype))
            for name in _SHARED:
                setattr(self, name, getattr(self, name).to(self.device))
        if known is not None:
            self._know(known)
        self._mark()
        return self


class Int4Cache(Cache):
    """A transformers cache in INT4: for ``past_key_values=`` of a model's forward and of ``generate``.

    Args:
        config: the model's configuration.
        max_cache_len: tokens per sequence that fit.
        batch_size: B; beams and returned sequences count.
        device: where it lives; default: torch's default device.
        dtype: of the model's activations; default: the configuration's, else torch's default.
        model: where given, key tables come from its k_proj biases (Qwen2-like models need them).
        tables: key tables of :func:`calibrate_keys`; before ``model``.
        exact_page: false: the unfinished page is rounded to INT4 too, as in formats that have no exact page, so that a
            call sees nothing exactly but its own tokens; for comparisons.
        offloading: keep layers on the CPU while other layers run, as transformers' caches do.
        kv_cache: ``"int4"``, or ``"int4-channel"``: keys with one range per channel and page, which lose nothing to
            large biases; of ``model`` or ``tables`` they only need the direction that queries share, and do without.
            No kernel of ours reads them on a GPU yet.

    Raises:
        CacheMismatchError: a layer type that keeps no keys and values, tables of another model, or offloading on a CPU.
        OptionError: another ``kv_cache``.
        HeadDimError: an odd head_dim. CacheLengthError: max_cache_len or batch_size is not positive.
    """

    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int,
        batch_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        model: nn.Module | None = None,
        tables: KeyTables | None = None,
        exact_page: bool = True,
        offloading: bool = False,
        kv_cache: str = "int4",
    ) -> None:
        text = config.get_text_config(decoder=True)
        for what, value in (("max_cache_len", max_cache_len), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise CacheLengthError(f"{what} is {value!r}: it has to be a positive number", where="Int4Cache")
        if kv_cache not in formats.KV_FORMATS:
            raise OptionError(
                f"an Int4Cache cannot be {kv_cache!r}",
                where="kv_cache",
                advice=f"Possible: {', '.join(formats.KV_FORMATS)}.",
            )
        types = layer_types(text)
        _, heads, head_dim = heads_of(text)
        if head_dim % 2:
            raise HeadDimError(f"head_dim is {head_dim}: the rotated cache needs an even one", where="Int4Cache")
        dtype = dtype or getattr(text, "dtype", None) or torch.get_default_dtype()
        place = torch.empty(0, device=device).device
        if offloading and place.type == "cpu":
            raise CacheMismatchError(
                "offloading moves layers to the CPU, and this cache is there already",
                where="Int4Cache",
                advice="Leave offloading out, or give the device on which the model runs.",
            )
        if tables is None and model is not None:
            tables = tables_of(model, heads, head_dim, kv_cache)
        if tables is not None and len(tables.means) != len(types):
            raise CacheMismatchError(
                f"tables for {len(tables.means)} layers, the model has {len(types)}", where="Int4Cache"
            )
        pairs: Sequence[Any] = [None] * len(types) if tables is None else tables.pairs(kv_cache)
        layers: list[Any] = [
            Int4Layer(max_cache_len, batch_size, heads, head_dim, dtype, place, pair, exact_page, kv_cache)
            for pair in pairs
        ]
        super().__init__(layers=layers, offloading=offloading)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache, tables included."""
        return sum(layer.nbytes for layer in self.layers)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Int4Cache:
        """Moves the cache and/or gives its exact rows another dtype; returns itself.

        Raises:
            CacheMismatchError: dtype is not floating.
        """
        for layer in self.layers:
            layer.to(device, dtype)
        return self


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The types of the layers that keep keys and values.

    Raises:
        CacheMismatchError: a layer keeps something else (linear attention, a state).
    """
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    types = (getattr(config, "layer_types", None) or ["full_attention"] * count)[:count]
    for i, kind in enumerate(types):
        if kind not in SUPPORTED:
            raise CacheMismatchError(
                f"layer {i} is {kind}: an Int4Cache holds {', '.join(SUPPORTED)}",
                where=f"{type(config).__name__}.layer_types",
                advice="Use transformers' DynamicCache or StaticCache for this model.",
            )
    return list(types)
