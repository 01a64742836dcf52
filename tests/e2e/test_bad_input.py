"""Bad input: a named error before any state changes, or the general path with a warning; the model goes on working."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import config, model
from torch import nn

import fu_compile
from fu_compile import errors

IDS = torch.arange(3, 9)[None]
EAGER = {"rest": "eager"}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def llama():
    return model(config("llama", num_hidden_layers=1))


def still_works(m: nn.Module, expected: torch.Tensor) -> None:
    """The uncompiled forward gives what it gave before."""
    with torch.no_grad():
        assert torch.equal(m.forward(IDS, use_cache=False).logits, expected)


def logits(m: nn.Module, **kwargs: object) -> torch.Tensor:
    with torch.no_grad():
        return m(IDS, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("options", [{"prefil": "fp8"}, {"decode": "int3"}, {"overrides": [("*", "int5")]}])
def test_unknown_options(llama, options):
    expected = logits(llama)
    with pytest.raises(errors.OptionError):
        fu_compile.compile(llama, **options)
    assert llama._compiled_call_impl is None
    llama.compile(backend="futransformer", options=options)
    with pytest.raises(errors.OptionError):
        logits(llama)
    still_works(llama, expected)


def test_training_mode_is_refused(llama):
    llama.train()
    with pytest.raises(errors.TrainingModeError):
        fu_compile.compile(llama)
    assert llama._compiled_call_impl is None


def test_gradients_are_left_to_the_general_path(llama):
    expected = logits(llama)
    llama.compile(backend="futransformer", options=EAGER)
    with pytest.warns(errors.FuWarning, match="require"):
        out = llama(IDS, use_cache=False).logits
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert llama.lm_head.weight.grad is not None
    assert fu_compile.report(llama).counters["fallbacks"] == 1
    torch._dynamo.reset()
    llama.compile(backend="futransformer", options={**EAGER, "strict": True})
    with pytest.raises(errors.GradientError):
        llama(IDS, use_cache=False)
    still_works(llama, expected)


def test_parameters_without_values():
    with torch.device("meta"):
        m = model(config("llama", num_hidden_layers=1))
    with pytest.raises(errors.MetaParameterError, match="embed_tokens"):
        fu_compile.compile(m)
    m.compile(backend="futransformer", options=EAGER)
    with torch.no_grad(), pytest.raises(errors.MetaParameterError):
        m(IDS.to("meta"), use_cache=False)


def test_a_model_without_a_llama_block():
    m = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    x = torch.randn(3, 8)
    compiled = torch.compile(m, backend="futransformer", options=EAGER)
    with torch.no_grad():
        with pytest.warns(errors.FuWarning, match="no attention of a Llama block"):
            torch.testing.assert_close(compiled(x), m(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(x)
    torch._dynamo.reset()
    strict = torch.compile(m, backend="futransformer", options={**EAGER, "strict": True})
    with torch.no_grad(), pytest.raises(errors.NoLlamaBlockError):
        strict(x)


def test_wrong_dtypes(llama):
    with pytest.raises(errors.DtypeError, match="float64"):
        fu_compile.compile(llama.double())


def test_odd_head_dim():
    m = model(config("llama", num_hidden_layers=1))
    m.config.head_dim = 15
    with pytest.raises(errors.HeadDimError, match="15"):
        fu_compile.compile(m)


def test_a_lowering_that_does_not_exist_here(llama):
    expected = logits(llama)
    llama.compile(backend="futransformer", options={**EAGER, "lowering": "triton"})
    with pytest.raises(errors.LoweringError, match="triton"):
        logits(llama)
    still_works(llama, expected)


def test_what_has_no_implementation_yet_is_said():
    """The only such option needs a GPU, so it is asked here and not run."""
    from fu_compile.backend import not_in_this_release

    (missing,) = not_in_this_release(fu_compile.Options(cuda_graphs=True), "cuda")
    assert "cuda_graphs=True has no implementation yet" in str(missing)
    for options in (fu_compile.Options(cuda_graphs=True), fu_compile.Options(kv_cache="int4-channel")):
        assert not not_in_this_release(options, "cpu")
