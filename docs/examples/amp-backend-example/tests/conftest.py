import pytest

pytest.register_assert_rewrite("amp_core.testing")
