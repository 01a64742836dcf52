"""Real models with spelled-out attention: every piece is found, and the rewritten graph is eager's."""

import pytest
from families import check
from models import FAMILIES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", list(FAMILIES))
def test_family(family):
    check(family, "eager", [("static", False), ("dynamic", True), ("none", False)])
