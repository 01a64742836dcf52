"""Fixtures of the field cases: a fresh copy of each model, a fresh Dynamo, and no silent fallback."""

import warnings

import pytest
import torch
from field import dynamo_warnings, model

from fu_compile.errors import FuWarning


@pytest.fixture(autouse=True)
def no_silent_path():
    """Each test starts with an empty Dynamo; a fallback of ours or of Dynamo fails it unless the test expects it."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), dynamo_warnings() as logged:
        warnings.simplefilter("error", FuWarning)
        yield
    torch._dynamo.reset()
    assert not [text for text in logged if "recompile_limit" in text]


@pytest.fixture
def llama():
    """F-llama."""
    return model("llama")


@pytest.fixture
def smol():
    """F-smol: tied head, 9 query and 3 key/value heads."""
    return model("smol")


@pytest.fixture
def qwen2():
    """F-qwen2: biases on q, k and v."""
    return model("qwen2")


@pytest.fixture
def phi_dim():
    """F-phi-dim: head_dim 96."""
    return model("phi-dim")
