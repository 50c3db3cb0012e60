"""Tests of the project."""

import pytest

pytest.register_assert_rewrite("tests.data.runtime_contract", "tests.e2e.laboratory")
