"""Fixtures of several test modules; what they share besides is in the modules here that are no tests."""

import pytest
from matplotlib.figure import Figure

from .runs import save_no_picture


@pytest.fixture(scope='module')
def no_pictures():
    """Figures become files without a picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, 'savefig', save_no_picture)
        yield
