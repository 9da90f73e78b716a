"""Fixtures of several test modules; what they share besides is in the modules here that are no tests."""

import gc

import pytest
import torch.utils.data._utils as data_utils
from matplotlib.figure import Figure

from .runs import save_no_picture

gc.disable()  # what importing makes is no garbage; see the end of collection


def pytest_collection_finish(session):
    """Modules stay: looking through them for garbage took a tenth of all the time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope='module')
def no_pictures():
    """Figures become files without a picture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, 'savefig', save_no_picture)
        yield


@pytest.fixture(scope='session', autouse=True)
def brief_farewells():
    """A loader that an error ends waits half a second for workers that do not, in place of torch's five."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_utils, 'MP_STATUS_CHECK_INTERVAL', 0.5)
        yield
