"""Keys and values of the positions seen so far, kept for the next request that starts alike."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.config import LanguageConfig
from qwen_vl_ros.engine.errors import EngineError, ErrorCode

#: Names a row that no prompt can match.
NO_TOKEN = -1


class KVCache:
    """
    Static cache of one sequence.

    ``tokens[:length]`` names what the rows hold: a text token by its id, a merged visual token by
    a negative number made from the visual's content key (pixels, size, kept units) and its index.
    Equal names up to a row mean equal rows: positions follow from the same prefix.

    :param config: the decoder's shape.
    :param capacity: most positions.
    :param device: of the tensors.
    :param dtype: of the tensors.
    """

    def __init__(
        self, config: LanguageConfig, capacity: int, device: torch.device, dtype: torch.dtype,
    ) -> None:
        shape = (config.layers, 2, config.kv_heads, capacity, config.head_dim)
        self.rows = torch.empty(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.tokens = np.zeros(capacity, np.int64)
        self.length = 0
        #: Rows that the device is known to have written: others may read them.
        self.settled = 0
        self.used = 0

    @staticmethod
    def bytes_for(config: LanguageConfig, capacity: int, size: int) -> int:
        """Return the bytes of a cache whose elements take ``size`` bytes."""
        return 2 * config.layers * config.kv_heads * config.head_dim * capacity * size

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """
        Store rows and return all up to them.

        :param layer: index of the layer.
        :param start: first row to write.
        :param k: [kv_heads, n, D].
        :param v: [kv_heads, n, D].
        :return: views of keys and values, [kv_heads, start + n, D].
        """
        end = start + k.shape[1]
        keys, values = self.rows[layer]
        keys[:, start:end] = k
        values[:, start:end] = v
        return keys[:, :end], values[:, :end]

    def match(self, tokens: np.ndarray) -> int:
        """Return how many leading names of ``tokens`` [n] the cache holds."""
        n = min(self.length, tokens.size)
        differ = np.flatnonzero(self.tokens[:n] != tokens[:n])
        return int(differ[0]) if differ.size else n

    def copy(self, other: KVCache, tokens: np.ndarray) -> None:
        """
        Take over rows that another cache shares with ``tokens`` beyond this one's length.

        The last of the tokens is left out: it has to be computed for its logits.
        """
        end = min(other.match(tokens), other.settled, tokens.size - 1)
        if end > self.length:
            rows = slice(self.length, end)
            self.rows[..., rows, :] = other.rows[..., rows, :]
            self.extend(tokens[rows])

    def extend(self, tokens: np.ndarray) -> None:
        """Name the rows written after the present length."""
        self.tokens[self.length:self.length + tokens.size] = tokens
        self.length += tokens.size


class CachePool:
    """
    A few caches; a request gets the one that shares the longest prefix, or the least used.

    What another cache shares beyond that, also one in use, is copied: reading a row and writing it
    is cheaper than computing it.

    :param slots: how many sequences are kept or run at a time.
    """

    def __init__(
        self, config: LanguageConfig, capacity: int, device: torch.device, dtype: torch.dtype,
        slots: int = 2,
    ) -> None:
        self._make = lambda: KVCache(config, capacity, device, dtype)
        self._caches: list[KVCache] = []
        self._in_use: list[KVCache] = []
        self.slots = slots
        self._clock = 0

    @property
    def available(self) -> bool:
        """Say whether :meth:`acquire` has a cache to give."""
        return len(self._in_use) < self.slots

    def acquire(self, tokens: np.ndarray) -> tuple[KVCache, int]:
        """
        Take a cache cut to the prefix that it shares with ``tokens``, and that length.

        At least the last token is left to compute: its logits are not stored. A prefix that is
        worth little (under half of a stored sequence's length) leaves that sequence alone while a
        slot is free.

        :param tokens: int64 [n], names as in :class:`KVCache`.
        :raises EngineError: OUT_OF_MEMORY when all caches are in use.
        """
        self._clock += 1
        idle = [cache for cache in self._caches if cache not in self._in_use]
        shared = [cache.match(tokens) for cache in idle]
        best = int(np.argmax(shared)) if shared else -1
        fits = best >= 0 and 2 * shared[best] >= idle[best].length
        if not fits and len(self._caches) < self.slots:
            self._caches.append(self._make())
            cache, reuse = self._caches[-1], 0
        elif fits:
            cache, reuse = idle[best], shared[best]
        elif idle:
            cache = min(idle, key=lambda c: c.used)
            reuse = cache.match(tokens)
        else:
            raise EngineError(
                ErrorCode.OUT_OF_MEMORY, f'all {self.slots} caches are in use')
        cache.length = min(reuse, tokens.size - 1)
        for other in self._caches:
            if other is not cache:
                cache.copy(other, tokens)
        cache.used = self._clock
        cache.settled = cache.length
        self._in_use.append(cache)
        return cache, cache.length

    def release(self, cache: KVCache, keep: bool = True) -> None:
        """
        Give a cache back; the device has done all work on it.

        :param keep: what it holds can serve later requests; otherwise its memory goes.
        """
        self._in_use.remove(cache)
        cache.settled = cache.length
        if not keep:
            self._caches.remove(cache)

    @property
    def used_bytes(self) -> int:
        """Return the bytes that the caches hold."""
        return sum(cache.rows.nbytes for cache in self._caches)

    def rewind(self) -> None:
        """Forget what the caches hold that are not in use, but keep their memory."""
        for cache in self._caches:
            if cache not in self._in_use:
                cache.length = cache.settled = 0

    def forget(self) -> None:
        """Give the memory of all caches back that are not in use."""
        self._caches = list(self._in_use)
