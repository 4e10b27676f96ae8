"""All areas of the kit, and the class that has them all."""

from __future__ import annotations

from amp_core.testing.suite.add import AddConformance
from amp_core.testing.suite.cast import CastConformance
from amp_core.testing.suite.contexts import ContextConformance
from amp_core.testing.suite.contract import AvailabilityConformance, DtypeConformance, PolicyConformance
from amp_core.testing.suite.effects import EffectsConformance
from amp_core.testing.suite.grad_stats import GradStatsConformance
from amp_core.testing.suite.layouts import LayoutConformance
from amp_core.testing.suite.memory import MemoryConformance
from amp_core.testing.suite.multiply import MultiplyConformance
from amp_core.testing.suite.quantize import QuantizeConformance
from amp_core.testing.suite.regions import FunctionConformance, RegionConformance
from amp_core.testing.suite.scaler import ScalerConformance
from amp_core.testing.suite.storage import StorageConformance
from amp_core.testing.suite.update import UpdateConformance


class BackendConformance(
    AvailabilityConformance,
    DtypeConformance,
    PolicyConformance,
    RegionConformance,
    FunctionConformance,
    LayoutConformance,
    ContextConformance,
    MemoryConformance,
    CastConformance,
    AddConformance,
    GradStatsConformance,
    MultiplyConformance,
    UpdateConformance,
    StorageConformance,
    QuantizeConformance,
    ScalerConformance,
    EffectsConformance,
):
    """Everything that a backend must do. Inherit, set ``device_type``, and let pytest collect it."""


AREAS: dict[str, type] = {vars(base)["AREA"]: base for base in BackendConformance.__bases__}
"""Area to its class, in the order in which they are run."""

__all__ = ["AREAS", "BackendConformance"]
