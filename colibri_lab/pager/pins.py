"""Pinning: an expert that every token uses stays, whatever the policy thinks of it."""

from __future__ import annotations

from collections import OrderedDict


class Pins:
    """Counts tokens in a row and says who is to be pinned and who is to be let go.

    A token is a decode step here: the tokens that the running sequences take together. Prompt steps, whose many rows
    use nearly every expert, neither count nor break a row. `after` tokens in a row pin; a pin goes only when `release`
    tokens in a row did without the expert (hysteresis: half of `after`), or when the cache shrinks.
    """

    def __init__(self, after: int, share: float, keys: int) -> None:
        """after: consecutive tokens; share: largest pinned part of the cache; keys: experts of all layers."""
        self.after, self.share = after, share
        self.release = max(1, after // 2)
        self.most = 0  # experts that may be pinned now
        self.held: OrderedDict[int, int] = OrderedDict()  # key -> token of its last use, longest ago first
        self._token = 0
        self._last, self._row = [-1] * keys, [0] * keys

    def limit(self, capacity: int, least: int) -> None:
        """How many may be pinned in a cache of `capacity` experts that must keep `least` free to change."""
        self.most = max(0, min(int(self.share * capacity), capacity - least))

    def next_token(self) -> list[int]:
        """A new token begins: the keys to unpin before it."""
        self._token += 1
        gone = []
        for key, last in self.held.items():
            if self._token - last <= self.release:
                break
            gone.append(key)
        for key in gone:
            del self.held[key]
        return gone

    def over(self) -> list[int]:
        """The keys to unpin because there are more than `most`, used longest ago first."""
        return [self.held.popitem(last=False)[0] for _ in range(len(self.held) - self.most)]

    def used(self, key: int) -> bool:
        """A token uses the expert; True when it is to be pinned from now on."""
        token = self._token
        row = self._row[key] = self._row[key] + 1 if self._last[key] >= token - 1 else 1
        self._last[key] = token
        if key in self.held:
            self.held[key] = token
            self.held.move_to_end(key)
            return False
        if row < self.after or len(self.held) >= self.most:
            return False
        self.held[key] = token
        return True
