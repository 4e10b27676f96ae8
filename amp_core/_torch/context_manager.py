"""What Dynamo must know of a context manager of ours to trace it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

Constants = tuple[Hashable, ...]
"""What can stand in compiled bytecode: numbers, strings, dtypes, None."""


class Step(NamedTuple):
    """One change of state that a graph makes and later takes back.

    Attributes:
        enter: called with `args`, while tracing and by the graph.
        args: constants.
        leave: takes back what `enter` did; called with `enter`'s result if `hands_over`, else with `args`.
        hands_over: see `leave`.
    """

    enter: Callable[..., Any]
    args: Constants
    leave: Callable[..., Any]
    hands_over: bool = False


class ContextManager(NamedTuple):
    """How Dynamo traces the instances of one class of context managers.

    Attributes:
        describe: an instance to the constants that say what it does.
        steps: those constants to what entering does, asked each time it is entered.
        rebuild: a function of those constants that returns an equal instance; named by its module, so that
            code after a graph break can enter it again.
        around_generator: an instance and a generator function to what the instance decorates it to; Dynamo
            must be able to trace it.
    """

    describe: Callable[[Any], Constants]
    steps: Callable[..., Sequence[Step]]
    rebuild: Callable[..., Any]
    around_generator: Callable[..., Any] | None = None
