from __future__ import annotations

from pathlib import Path

import pytest

from helpers import demo_over


@pytest.mark.timeout(400)
def test_the_demo_runs(library: str, tmp_path: Path) -> None:
    demo_over("fabric", tmp_path, DISSOCIATED_FABRIC_LIBRARY=library)
