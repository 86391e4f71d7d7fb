"""Importing Lightning in half the time, for the command line."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("scipy", "transformers>=4.4.0")  # by torchmetrics' metrics of sound and text


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import Lightning without the metrics of sound and text of torchmetrics, and without collecting garbage meanwhile.

    These metrics import scipy.signal and transformers, which takes seconds. Within the block torchmetrics finds neither;
    after it, both are there for whoever asks.
    """
    from lightning_utilities.core import imports

    requirement_met, package_available = imports.RequirementCache.__bool__, imports.package_available

    def used_and_met(self: imports.RequirementCache) -> bool:
        return self.requirement not in UNUSED and requirement_met(self)

    collecting = gc.isenabled()
    gc.disable()
    imports.RequirementCache.__bool__ = used_and_met  # type: ignore[method-assign]
    imports.package_available = lambda name: name not in UNUSED and package_available(name)  # type: ignore[assignment]
    try:
        yield
    finally:
        imports.RequirementCache.__bool__ = requirement_met  # type: ignore[method-assign]
        imports.package_available = package_available
        gc.freeze()  # modules stay: no need to look through them again
        if collecting:
            gc.enable()
