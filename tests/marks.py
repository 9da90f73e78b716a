"""Which cases of a test are fast."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(*fast: Any, of: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or of several as tuples, of which all others than these are slow."""
    values = list(of)
    assert set(fast) <= set(values)
    return [
        value
        if value in fast
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
