"""What a backend says of itself: availability, dtypes, op policy."""

from __future__ import annotations

import difflib
import warnings

import pytest
import torch

from amp_core._torch.autocast import is_device_type
from amp_core.kernels import Portable
from amp_core.plugin import API_VERSION, Availability, Refusal
from amp_core.plugin.default_manager import backends
from amp_core.plugin.results import wrong_attribute
from amp_core.policy import OpPolicy
from amp_core.policy.native_rules import native_rules
from amp_core.regions.region import autocast
from amp_core.testing.fixtures import BackendFixtures
from amp_core.testing.suite import data

_SMALLEST_BUCKET = 1 << 16


class AvailabilityConformance(BackendFixtures):
    """Whether the device is there, why, and that asking costs nothing."""

    AREA = "availability"

    def test_availability_gives_a_reason_in_words(self) -> None:
        """``amp backends`` shows it; a bool alone helps nobody."""
        found = self.backend.availability()
        assert isinstance(found, Availability), f"availability() returned {found!r}"
        assert isinstance(found.usable, bool), f"usable is {found.usable!r}, not a bool"
        assert isinstance(found.reason, str), f"the reason is {found.reason!r}, not a string"
        assert len(found.reason.strip()) >= 3, f"the reason is {found.reason!r}"

    def test_availability_is_true_of_the_device(self) -> None:
        """The kit runs on the device, so the backend must say that it is usable."""
        torch.ones(2, device=self.device).add_(1)
        assert self.backend.availability().usable, self.backend.availability().reason

    def test_availability_follows_the_device(self) -> None:
        """A cached answer is stale once the device goes, and so is its reason."""
        before = self.backend.availability()
        with self.device_taken_away():
            gone = self.backend.availability()
        assert not gone.usable, "the device is gone, but availability() still says usable"
        assert gone.reason != before.reason, f"the reason is stale: {gone.reason!r}"
        assert self.backend.availability().usable, "the device is back, but availability() changed"

    def test_hooks_answer_without_the_device(self) -> None:
        """On a login node a disabled region is built, and ``amp backends`` lists the backend, without it."""
        there = self.backend.op_policy()
        with self.device_taken_away():
            for name, ask in data.queries(self.backend).items():
                try:
                    ask()
                except Exception as error:
                    raise AssertionError(f"{name} raises where the device is absent: {error!r}") from error
            with autocast(self.device_type, enabled=False):
                torch.ones(2, 2) @ torch.ones(2, 2)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                default, policy = self.backend.default_dtype(), self.backend.op_policy()
                assert default in self.backend.supported_dtypes(), f"the default dtype is {default}"
                assert self.backend.availability().reason.strip(), "the absent device has no reason"
            assert policy == there, "the op policy is another one where the device is absent"
            status = backends()[self.device_type]
            assert status.status == "absent", f"amp backends lists the device as {status.status}"

    def test_backend_names_its_device_and_contract(self) -> None:
        """The registry files it under these. The word "no" counts as yes; a misspelt name as none at all."""
        names = self.backend.device_type, self.device_type, self.device.type
        assert len({*names}) == 1, f"backend, fixtures and device have the device types {names}"
        version = self.backend.api_version
        assert type(version) is int, f"api_version is {version!r}, not {API_VERSION}, a literal int"
        assert version == API_VERSION, f"api_version is {version}, that of this amp-core {API_VERSION}"
        wrong = wrong_attribute(self.backend, read=True)
        assert not wrong, wrong
        self._judge_attributes()
        for made in (self.backend, self.kernels, self.backend.scaled_products(), self):
            for name, near in _near_names(made).items():
                raise AssertionError(
                    f"{type(made).__name__}.{name} overrides nothing. Did you mean {near}? If not, begin the "
                    f"name with an underscore"
                )
        if not self.supports_float64:
            assert not self.backend.has_float64, "the device lacks float64: set has_float64 = False"
            wide = isinstance(self.kernels, Portable) and self.kernels._has_float64
            assert not wide, "the device lacks float64: build the kernels with has_float64=False"

    def _judge_attributes(self) -> None:
        """A name that nothing has, or a number in another unit, has no effect or a costly one."""
        backend, served = self.backend, {*backends()} - {self.device_type}
        for name in backend.also_casts:
            assert is_device_type(name), f"also_casts has {name!r}, which is no device type in torch"
        for alias in backend.aliases:
            assert alias not in served, f"aliases has {alias!r}, which is the device type of another backend"
            assert alias == alias.lower() != "", f"aliases has {alias!r}; names are looked up in lower case"
        nbytes = backend.grad_bucket_nbytes
        assert nbytes >= _SMALLEST_BUCKET, (
            f"grad_bucket_nbytes is {nbytes}, so a kernel reads nearly each gradient alone. It is a number "
            f"of bytes: {_SMALLEST_BUCKET} or more, such as the default, 32 << 20"
        )

    def test_questions_do_no_work_on_the_device(self) -> None:
        """Regions ask when they are built; a device context must not come from asking."""
        with data.device_work(self.device) as seen:
            for ask in data.queries(self.backend).values():
                ask()
        assert not seen, f"a hook works on the device: {seen[0]}"

    def test_known_failures_name_checks_that_exist(self) -> None:
        """A mistyped name would excuse no check, or one day the wrong one."""
        from amp_core.testing.suite import AREAS

        # A run of one area leaves out the checks of the others.
        every = [name for made in (self, *AREAS.values()) for name in dir(made)]
        names = {name.removeprefix("test_") for name in every if name.startswith("test_")}
        assert set(self.known_failures) <= names, f"no such checks: {set(self.known_failures) - names}"


def _near_names(made: object) -> dict[str, str]:
    """Return the names of `made` that are not amp-core's but nearly, each with the one that it resembles."""
    own = [cls for cls in type(made).__mro__ if cls.__module__.startswith("amp_core.")]
    known = {name for cls in own for name in vars(cls) if not name.startswith(("_", "test_"))}
    others = [name for name in dir(made) if name not in known and not name.startswith(("_", "test_"))]
    return {name: near for name in others for near in difflib.get_close_matches(name, known, 1, 0.8)}


class DtypeConformance(BackendFixtures):
    """Default and supported dtypes, and the refusal of others."""

    AREA = "dtypes"

    def test_supported_dtypes_are_floating_and_distinct(self) -> None:
        """Anything else cannot be an autocast dtype."""
        found = self.backend.supported_dtypes()
        assert isinstance(found, tuple), f"supported_dtypes() returned {type(found).__name__}"
        assert found, "supported_dtypes() is empty"
        assert len(set(found)) == len(found), f"supported_dtypes() has one twice: {found}"
        assert all(isinstance(d, torch.dtype) and d.is_floating_point for d in found), found
        assert torch.float64 not in found, "autocast never casts float64"

    def test_default_dtype_is_supported(self) -> None:
        """A region that names no dtype would warn and be disabled."""
        default, supported = self.backend.default_dtype(), self.backend.supported_dtypes()
        assert default in supported, f"default_dtype() is {default}, supported_dtypes() is {supported}"

    def test_default_dtype_is_a_lower_precision(self) -> None:
        """With a default of float32, autocast would silently do nothing."""
        default = self.backend.default_dtype()
        assert default.itemsize < 4, f"default_dtype() is {default}: return a dtype of 16 bits"

    def test_default_dtype_is_torchs_where_torch_has_one(self) -> None:
        """Code that moves from torch.amp must compute the same."""
        self.requires("default_dtype_is_torchs")
        found, right = self.backend.default_dtype(), torch.get_autocast_dtype(self.device_type)
        assert found is right, f"default_dtype() is {found}, torch's is {right}"

    def test_default_dtype_follows_torchs_setting(self) -> None:
        """``torch.set_autocast_dtype`` changes the default of every region."""
        self.requires("default_dtype_is_torchs")
        before = torch.get_autocast_dtype(self.device_type)
        try:
            for dtype in self.backend.supported_dtypes():
                torch.set_autocast_dtype(self.device_type, dtype)
                found = self.backend.default_dtype()
                assert found is dtype, f"default_dtype() is {found} after set_autocast_dtype({dtype})"
        finally:
            torch.set_autocast_dtype(self.device_type, before)

    def test_supported_dtypes_compute_on_the_device(self) -> None:
        """A dtype that the device cannot multiply in is not supported."""
        for dtype in self.backend.supported_dtypes():
            a = torch.full((4, 4), 2.0).to(self.device).to(dtype)
            results = [("a @ a", a @ a, 16), ("a * a", a * a, 4), ("a + a", a + a, 4)]
            for name, result, expected in (*results, ("relu", a.relu(), 2), ("sum", a.sum(0), 8)):
                assert bool((result.float().cpu() == expected).all()), f"{name} in {dtype}"

    def test_supported_dtypes_are_admitted_and_others_refused_in_words(self) -> None:
        """A refusal says what is wrong with the dtype; for one that is supported the answer is None."""
        supported = self.backend.supported_dtypes()
        for dtype in supported:
            assert self.backend.autocast_refusal(dtype) is None, f"{dtype} is supported, yet refused"
        for dtype in (torch.float64, torch.int32, torch.bool):
            assert self.backend.dtype_reason(dtype).strip(), f"dtype_reason({dtype}) is empty"
            if data.torch_admits(self.device_type, dtype):  # on CUDA, any; code that moves here must run
                continue
            refusal = self.backend.autocast_refusal(dtype)
            assert isinstance(refusal, Refusal), f"{dtype} is not supported, yet admitted"
            assert refusal.message.strip(), f"the refusal of {dtype} has no message"
            assert isinstance(refusal.error, bool), f"Refusal.error is {refusal.error!r}"

    def test_float32_is_admitted(self) -> None:
        """``autocast(device, dtype=torch.float32)`` is a region on every device: low-precision ops widen."""
        refusal = self.backend.autocast_refusal(torch.float32)
        assert refusal is None, f"float32 is refused: {refusal}"


class PolicyConformance(BackendFixtures):
    """The op policy as data: complete, for this device, and torch's unless said otherwise."""

    AREA = "policy"

    def test_policy_is_for_the_device(self) -> None:
        """A policy for another device type cannot be put into force."""
        policy = self.backend.op_policy()
        assert isinstance(policy, OpPolicy), f"op_policy() returned {policy!r}"
        found = policy.device_type
        assert found == self.device_type, f"the op policy is for {found}, not {self.device_type}"
        assert len(policy), "the op policy is empty: autocast would do nothing"
        if self.backend.op_lists:
            assert native_rules(self.device_type), (
                f"op_lists has no effect: {self.device_type} has no C++ autocast kernels; override op_policy"
            )

    def test_policy_is_stable(self) -> None:
        """Two regions must not compute differently."""
        first, second = self.backend.op_policy(), self.backend.op_policy()
        assert first == second, f"op_policy() differs from call to call in {[*first.diff(second)]}"

    def test_policy_has_torchs_rules_but_for_stated_departures(self) -> None:
        """An op whose rule was forgotten runs in the wrong dtype, and nobody notices."""
        expected = OpPolicy.default(self.device_type)
        if expected == OpPolicy.uniform(self.device_type):
            pytest.skip(f"torch has no rules for {self.device_type}")
        found = expected.diff(self.backend.op_policy())
        undeclared = {op: pair for op, pair in found.items() if op not in self.policy_departures}
        assert not undeclared, f"(torch's rule, the backend's): {undeclared}"
        unneeded = set(self.policy_departures) - set(found)
        assert not unneeded, f"policy_departures names ops that do not differ: {sorted(unneeded)}"

    def test_policy_runs_products_in_low_precision(self) -> None:
        """Matrix products are what mixed precision is for."""
        policy = self.backend.op_policy()
        for op in ("aten::mm.default", "aten::addmm.default", "aten::bmm.default", "aten::linear.default"):
            assert policy.rule(op) == "lower_precision_fp", policy.explain(op)
