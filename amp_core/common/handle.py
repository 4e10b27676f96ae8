"""The base of what changes a program until it is removed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NoReturn, SupportsIndex

from typing_extensions import Self


class Handle(ABC):
    """Something that `remove` undoes, and so does leaving it as a context, which it is once."""

    _entered = False

    @abstractmethod
    def remove(self) -> None:
        """Undo it. Calling it again has no effect."""

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError(
                f"This {type(self).__name__} has been entered before, and the end of that block undoes it: "
                f"it would have no effect in another one. Make a new one for each `with` block."
            )
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Local:
    """Something whose copy could not act on the copied model."""

    _INSTEAD: ClassVar[str] = ""
    """What to copy or save instead, as a sentence."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to one model in this process. Neither it, nor a model that has "
            f"it as an attribute, can be copied or pickled. Keep it outside of the model, or delete the "
            f"attribute before you copy or save the model.{self._INSTEAD}"
        )


class LocalHandle(Local, Handle):
    """A handle of that kind."""
