"""Real models with SDPA: every piece of every layer is found in each phase, and the rewritten graph is eager's."""

import pytest
from families import check
from models import FAMILIES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", list(FAMILIES))
def test_family(family):
    check(family, "sdpa", [("static", True), ("dynamic", False), ("none", True)])


def test_more_layers():
    check("llama", "sdpa", [("static", False)], layers=3)
