"""What holds for the test process itself."""

from __future__ import annotations

import gevent.monkey


def test_no_test_patches_the_standard_library_for_all_others() -> None:
    # Collected before this runs: every test module has been imported. Under a patched library grpc hangs.
    assert not gevent.monkey.is_module_patched("threading")
