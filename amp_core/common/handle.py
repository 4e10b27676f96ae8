"""The base of what changes a program until it is removed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from typing_extensions import Self


class Handle(ABC):
    """Something that `remove` undoes, and so does leaving it as a context."""

    @abstractmethod
    def remove(self) -> None:
        """Undo it. Calling it again has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
