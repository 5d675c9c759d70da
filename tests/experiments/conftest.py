import pytest

from experiments.network import NoNetworkError, check_possible


@pytest.fixture
def links():
    """Skips where this machine or user cannot have links of their own."""
    try:
        check_possible()
    except NoNetworkError as error:
        pytest.skip(str(error))
