"""Call a kernel, and check what it does to its arguments and what it keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from amp_core.kernels import GradStats
from amp_core.testing.suite import data
from amp_core.testing.suite.comparisons import Comparisons
from amp_core.testing.suite.manners import References
from amp_core.testing.suite.tensors import Memory, described, host

Tensors = Sequence[Tensor]


class Calls(Comparisons):
    """Calls of kernels that the judges share."""

    _context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context in which kernels are called."""

    @contextmanager
    def _calls_in(self, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Call kernels in `context` inside the block."""
        self._context = context
        try:
            yield
        finally:
            del self._context

    def _call(
        self, name: str, call: Callable[[], Any], read: Tensors, written: Tensors, **options: Any
    ) -> Any:
        """Call the kernel `name`; check what it does to its arguments, and that it keeps nothing."""
        try:
            return self._checked_call(name, call, read, written, **options)
        except AssertionError as error:
            error.args = (f"{name} of {described([*read, *written])}: {error}",)
            raise
        except Exception as error:
            what = f"{name} of {described([*read, *written])} raises {type(error).__name__}"
            raise AssertionError(f"{what}: {error}") from error

    def _checked_call(
        self,
        name: str,
        call: Callable[[], Any],
        read: Tensors,
        written: Tensors,
        *,
        wrote: bool = True,
        given: Tensors = (),
        flags: Tensors = (),
    ) -> Any:
        memory, references = Memory(read, written, flags), References([*read, *flags, *written])
        with self._quietly(), self._context():
            inference = torch.is_inference_mode_enabled()
            boxed = [call()]
        _assert_kind(name, boxed[0], into_out=bool(written))
        if type(given) in (list, tuple):  # a prepared list may keep its tensors from its first use on
            if boxed[0] is None or boxed[0] is written:
                references.assert_as_before([], 0)
            else:
                references.assert_as_before(boxed, len(written))
        result = boxed[0]
        results = list(data.statistics(result)) if isinstance(result, GradStats) else result or []
        if not (written and results):
            # Without a tensor, a kernel does not know the device.
            self._assert_own(results, inference, read[0].device if read else None)
            if not memory.is_apart_from(results):
                self._assert_apart(results, inference)
        memory.check(wrote=wrote)
        return result

    def _assert_own(self, results: Tensors, inference: bool, device: torch.device | None) -> None:
        """Check that results are plain tensors outside of autograd."""
        for result in results:
            assert type(result) is Tensor, f"a result is a {type(result).__name__}"
            assert device in (None, result.device), f"a result is on {result.device}, not {device}"
            assert not result.requires_grad, "autograd recorded the call"
            assert result.is_inference() == inference, "inference tensors come from inference mode alone"

    def _assert_apart(self, results: Tensors, inference: bool) -> None:
        """Check that results share memory with nothing else, by writing to them; keep their values."""
        values = [host(r) for r in results]
        for i, result in enumerate(results):
            with torch.inference_mode(inference):
                result.fill_(i % 5 + 1)
        for i, (result, kept) in enumerate(zip(results, values, strict=True)):
            overwritten = bool((host(result).float() != i % 5 + 1).any())
            assert not overwritten, f"result {i} shares memory with another one"
            with torch.inference_mode(inference):
                result.copy_(kept)

    @contextmanager
    def _refused(
        self, what: str, arguments: Tensors = (), error: type[Exception] = ValueError
    ) -> Iterator[None]:
        """Check that the call in the block is refused before it writes to any of its arguments."""
        memory = Memory(arguments)
        try:
            yield
        except error:
            memory.check()
        except Exception as other:
            raise AssertionError(
                f"{what} raises {type(other).__name__}, not {error.__name__}: {other}"
            ) from other
        else:
            raise AssertionError(f"{what} is accepted: raise {error.__name__} before anything is written")


def _assert_kind(name: str, result: object, *, into_out: bool) -> None:
    """Check that the kernel `name` returned an object of the kind that the interface says."""
    if name.endswith("_"):
        right, kind = result is None, "None: what it writes is its result"
    elif name == "grad_stats":
        right, kind = isinstance(result, GradStats), "an amp_core.kernels.GradStats"
    elif name == "cast" and into_out:
        right, kind = not (result is None or isinstance(result, Tensor)), "the tensors of out="
    else:
        right, kind = name != "cast" or isinstance(result, list), "a list"
    assert right, f"it returned a {type(result).__name__}, and must return {kind}"
