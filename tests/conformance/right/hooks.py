"""Backends whose hooks answer right, but unusually; `passes` are areas and checks."""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
import sys
import warnings
from contextlib import contextmanager

from amp_core.kernels import Portable, ScaledProducts
from amp_core.plugin import Availability, Refusal
from amp_core.testing import Loopback

ALL = (("availability", "dtypes", "policy", "regions", "effects"), "")


class NumbersInEveryReason(Loopback):
    """Tells in all words how many bytes are free, which no two calls agree on."""

    passes = ALL
    free = itertools.count(10**9)

    def availability(self):
        return Availability(True, f"{next(self.free)} bytes free")

    def dtype_reason(self, dtype):
        return f"{dtype} needs more than the {next(self.free)} bytes that are free"

    def autocast_refusal(self, dtype):
        refusal = super().autocast_refusal(dtype)
        return refusal and Refusal(f"{refusal.message} ({next(self.free)} bytes free)")


class Kind(str, enum.Enum):
    CPU = "cpu"


class NamedByAnEnum(Loopback):
    """Its device type is a string of a class of its own."""

    passes = ALL

    def __init__(self):
        super().__init__(Kind.CPU)


class ImportsLate(Loopback):
    """Makes its kernels when they are first asked for: imports a module, warns once."""

    passes = ALL

    @functools.cached_property
    def _made(self):
        sys.modules.pop("colorsys", None)
        importlib.import_module("colorsys")
        warnings.warn("the kernels are being compiled, once", stacklevel=2)
        return Portable()

    def kernels(self):
        return self._made


class ComesAndGoes(Loopback):
    """Its device can be pulled out, and is then missing in the next answer."""

    passes = (("availability",), "")
    there = True

    def availability(self):
        return Availability(self.there, "one card" if self.there else "no card")

    @contextmanager
    def device_taken_away(_fixtures):
        ComesAndGoes.there = False
        try:
            yield
        finally:
            ComesAndGoes.there = True

    declares = {"device_taken_away": device_taken_away}  # noqa: RUF012


class MakesProductsAnew(Loopback):
    """Its products are another object each time."""

    passes = (("effects",), "hooks")

    def scaled_products(self):
        return ScaledProducts("it has no units for them")
