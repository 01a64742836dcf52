"""The options: one frozen dataclass, and the order in which its values are found.

A value comes from the first of these that names it:

1. a keyword (``fu_compile.compile(model, decode="bf16")``, ``torch.compile(..., options={"decode": "bf16"})``),
2. the environment (``FU_DECODE=bf16``),
3. the preset (``mode="exact"``),
4. the default.

A name or value that does not exist is an :class:`~fu_compile.errors.OptionError` that names the closest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from fu_compile.errors import OptionError

VERSION = 1
"""Version of the dictionary that :meth:`Options.as_dict` makes."""

ENVIRONMENT_PREFIX = "FU_"

PRECISIONS = ("int4", "fp8", "bf16", "exact")
"""Precisions that ``overrides`` can give to a layer."""

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"prefill": "exact", "decode": "exact", "kv_cache": "model", "lm_head": "model"},
    "reduce-overhead": {"cuda_graphs": True},
}
"""What ``mode=`` sets."""

OTHER_VARIABLES = {
    "FU_MODE": "the preset, as mode=",
    "FU_CACHE_DIR": "folder for compiled kernels and converted models (default: ~/.cache/futransformer)",
    "FU_DISABLE_JIT": "1: never compile a kernel; what is not in the cache is an error",
    "FU_WIKITEXT": "folder or file of WikiText-2 raw, for perplexity",
}
"""Environment variables that are no options."""


def _option(*values: Any, help: str) -> Any:
    return dataclasses.field(default=values[0], metadata={"values": values, "help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to do with a model. Hashable; validated when made; :meth:`resolve` is the usual way to get one.

    ``overrides`` is stored as a tuple of (pattern, precision); any iterable of pairs is accepted.
    """

    prefill: str = _option("fp8", "bf16", "exact", help="weights and activations of the projections in prefill")
    decode: str = _option("int4", "fp8", "bf16", "exact", help="weights of the projections in decode")
    kv_cache: str = _option(
        "int4", "int4-channel", "model", help="key/value cache: INT4, INT4 with keys per channel, or the model's own"
    )
    lm_head: str = _option("model", "fp8", "int4", help="precision of the output head")
    group_size: int = _option(128, 64, 32, help="input columns that share one INT4 scale")
    fp8_scaling: str = _option("delayed", "static", "dynamic", "row", help="where the FP8 activation scales come from")
    overrides: tuple[tuple[str, str], ...] = dataclasses.field(
        default=(),
        metadata={
            "values": PRECISIONS,
            "help": "precision per layer: (layer name pattern, precision), first match wins",
        },
    )
    lowering: str = _option("auto", "cuda", "triton", "reference", help="which implementation of the operators")
    rest: str = _option("inductor", "eager", help="what runs the part of a graph that is not ours")
    cuda_graphs: bool = _option(False, True, help="run decode steps as CUDA graphs")
    strict: bool = _option(False, True, help="raise where something would fall back")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "overrides":
                object.__setattr__(self, "overrides", _overrides(value))
            else:
                _check(field.name, value, field.metadata["values"])

    @classmethod
    def resolve(
        cls, mode: str | None = None, options: Options | Mapping[str, Any] | None = None, **keywords: Any
    ) -> Options:
        """The options after keywords, environment, preset and defaults.

        Args:
            mode: a key of :data:`PRESETS` or none; also possible as ``options={"mode": ...}``, as ``torch.compile``
                takes either ``mode`` or ``options``.
            options: a mapping, as ``torch.compile(options=...)`` hands it over; or an :class:`Options`, which is
                complete: environment and preset are not looked at.
            keywords: single options; they win over ``options``.

        Raises:
            OptionError: for an unknown name or value, with the closest match.
        """
        if isinstance(options, Options):
            if mode is not None:
                raise OptionError(
                    f"mode={mode!r} cannot be combined with a complete Options object",
                    advice="Pass mode= and single options, or dataclasses.replace(options, ...).",
                )
            return dataclasses.replace(options, **_known(keywords, "keyword"))
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options must be a mapping or an Options object, not {type(options).__name__}")
        given = dict(options or {})
        in_options = given.pop("mode", None)
        given = {**_known(given, "options="), **_known(keywords, "keyword")}
        chosen = mode if mode is not None else in_options
        chosen = os.environ.get("FU_MODE") or None if chosen is None else chosen
        if chosen is not None and (not isinstance(chosen, str) or chosen not in PRESETS):
            raise OptionError(
                f"there is no mode {chosen!r}", where="mode=", advice=_advice(chosen, PRESETS), code="FU-OPT-001"
            )
        return cls(**{**PRESETS[chosen or "default"], **_environment(), **given})

    def precision_for(self, name: str, default: str) -> str:
        """Precision of the layer called ``name`` (``model.layers.0.mlp.down_proj``): the first override that matches.

        Patterns are shell globs (``*``, ``?``, ``[...]``) over the whole name; ``*`` also matches dots.
        """
        for pattern, precision in self.overrides:
            if fnmatchcase(name, pattern):
                return precision
        return default

    @property
    def is_exact(self) -> bool:
        """Whether nothing at all is quantised."""
        exact = self.prefill == self.decode == "exact" and self.kv_cache == "model" and self.lm_head == "model"
        return exact and all(precision == "exact" for _, precision in self.overrides)

    def not_applicable(self, device_type: str) -> dict[str, str]:
        """Options that were set and mean nothing on this kind of device (``"cpu"``, ``"cuda"``), with the reason."""
        if self.cuda_graphs and device_type != "cuda":
            return {"cuda_graphs": f"not applicable: the model is on {device_type!r}, CUDA graphs need a CUDA device"}
        return {}

    def as_dict(self) -> dict[str, Any]:
        """A dictionary that JSON can hold, with its version."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"version": VERSION, **values, "overrides": [list(pair) for pair in self.overrides]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Options:
        """The inverse of :meth:`as_dict`. Missing options take their defaults; the environment is not looked at.

        Raises:
            OptionError: for another version, or an unknown name or value.
        """
        if not isinstance(saved, Mapping):
            raise OptionError(f"saved options must be a mapping, not {type(saved).__name__}", code="FU-OPT-004")
        values = dict(saved)
        version = values.pop("version", None)
        if version != VERSION:
            raise OptionError(
                f"saved options have version {version!r}; this release reads version {VERSION}",
                advice="Make the options again with this release.",
                code="FU-OPT-004",
            )
        return cls(**_known(values, "saved options"))

    def __str__(self) -> str:
        """What differs from the defaults, or ``"defaults"``."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ", ".join(changed) or "defaults"


def table() -> list[tuple[str, tuple[Any, ...], str]]:
    """Every option: name, values (default first), meaning. Documentation and command line are made from it."""
    return [(f.name, f.metadata["values"], f.metadata["help"]) for f in dataclasses.fields(Options)]


def parse(name: str, text: str, where: str) -> Any:
    """The value of option ``name`` written as text, as in the environment and on the command line.

    Switches are ``1/0``, ``true/false``, ``yes/no`` or ``on/off``; overrides are ``pattern=precision,...``.
    """
    values = {n: v for n, v, _ in table()}[name]
    if name == "overrides":
        pairs = [entry.rpartition("=")[::2] for entry in text.split(",") if entry.strip()]
        return _overrides([(pattern.strip(), precision.strip()) for pattern, precision in pairs], where)
    words: dict[str, Any] = {str(v): v for v in values}
    if isinstance(values[0], bool):
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
    key = text.strip().lower()
    if key not in words:
        raise OptionError(f"{name} cannot be {text!r}", where=where, advice=_advice(key, words))
    return words[key]


def _environment() -> dict[str, Any]:
    known = {ENVIRONMENT_PREFIX + name.upper(): name for name, _, _ in table()}
    found = {}
    for variable, text in os.environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text or variable in OTHER_VARIABLES:
            continue
        if variable in known:
            found[known[variable]] = parse(known[variable], text, f"environment variable {variable}")
        # Other programs may use the prefix: only what is nearly one of ours is taken for a spelling mistake.
        elif difflib.get_close_matches(variable, known, 1, 0.85):
            raise OptionError(
                f"there is no environment variable {variable}",
                where=f"environment: {variable}={text}",
                advice=_advice(variable, known),
                code="FU-OPT-001",
            )
    return found


def _known(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = [name for name, _, _ in table()]
    for key in values:
        if key not in names:
            raise OptionError(f"there is no option {key!r}", where=where, advice=_advice(key, names), code="FU-OPT-001")
    return dict(values)


def _check(name: str, value: Any, values: tuple[Any, ...]) -> None:
    # `1 == True`: the type is compared too, so that cuda_graphs=1 and group_size=True are told apart.
    if not any(type(value) is type(v) and value == v for v in values):
        raise OptionError(f"{name} cannot be {value!r}", where=f"option {name}", advice=_advice(value, values))


def _overrides(value: Any, where: str = "option overrides") -> tuple[tuple[str, str], ...]:
    def bad(what: str, advice: str) -> OptionError:
        return OptionError(what, where=where, advice=advice, code="FU-OPT-003")

    example = "Write overrides=[('model.layers.0.*', 'bf16'), ('*.down_proj', 'fp8')]."
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise bad(f"overrides must be a list of pairs, not {value!r}", example)
    pairs = []
    for entry in value:
        if isinstance(entry, (str, bytes)) or not isinstance(entry, Iterable) or len(pair := tuple(entry)) != 2:
            raise bad(f"overrides entry {entry!r} is not a pair (layer name pattern, precision)", example)
        pattern, precision = pair
        if not isinstance(pattern, str) or not pattern:
            raise bad(f"overrides entry {entry!r} has no layer name pattern", example)
        if precision not in PRECISIONS:
            raise bad(
                f"overrides entry {entry!r} has the unknown precision {precision!r}", _advice(precision, PRECISIONS)
            )
        pairs.append((pattern, precision))
    return tuple(pairs)


def _advice(given: Any, known: Iterable[Any]) -> str:
    choices = [str(k) for k in known]
    close = difflib.get_close_matches(str(given), choices, 1, 0.5)
    listed = f"Possible: {', '.join(choices)}."
    return f"Did you mean {close[0]!r}? {listed}" if close else listed
