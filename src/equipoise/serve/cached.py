"""A bounded number of values that are dear to make, each kept until what it was made from changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Cached:
    """Values by key, the most recently used of them, each with a mark of what it was made from."""

    most: int
    kept: OrderedDict[Any, tuple[Any, Any]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: Any, mark: Any, make: Callable[[], T]) -> T:
        """The value of a key; made again if its mark has changed."""
        with self.lock:
            if key in self.kept and self.kept[key][0] == mark:
                self.kept.move_to_end(key)
                found: T = self.kept[key][1]
                return found
        made = make()
        with self.lock:
            self.kept[key] = (mark, made)
            self.kept.move_to_end(key)
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)
        return made
