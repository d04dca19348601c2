"""The defaults that a configuration may leave out are those of the installed transformers."""

from __future__ import annotations

import pytest

from support import sizing_defaults


def test_the_defaults_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    written = sizing_defaults.TARGET.read_text()
    assert written == sizing_defaults.text(), "run `python -m support.sizing_defaults` in tests/"
