"""Keys and values of the positions seen so far, kept for the next request that starts alike."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.config import LanguageConfig

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

    def extend(self, tokens: np.ndarray) -> None:
        """Name the rows written after the present length."""
        self.tokens[self.length:self.length + tokens.size] = tokens
        self.length += tokens.size


class CachePool:
    """
    A few caches; a request gets the one that shares the longest prefix, or the least used.

    :param slots: how many sequences are kept; two serve a standing question and another one.
    """

    def __init__(
        self, config: LanguageConfig, capacity: int, device: torch.device, dtype: torch.dtype,
        slots: int = 2,
    ) -> None:
        self._make = lambda: KVCache(config, capacity, device, dtype)
        self._caches: list[KVCache] = []
        self._slots = slots
        self._clock = 0

    def acquire(self, tokens: np.ndarray) -> tuple[KVCache, int]:
        """
        Return a cache cut to the prefix that it shares with ``tokens``, and that length.

        At least the last token is left to compute: its logits are not stored. A prefix that is
        worth little (under half of a stored sequence's length) leaves that sequence alone while a
        slot is free.

        :param tokens: int64 [n], names as in :class:`KVCache`.
        """
        self._clock += 1
        shared = [cache.match(tokens) for cache in self._caches]
        best = int(np.argmax(shared)) if shared else -1
        fits = best >= 0 and 2 * shared[best] >= self._caches[best].length
        if not fits and len(self._caches) < self._slots:
            self._caches.append(self._make())
            cache, reuse = self._caches[-1], 0
        elif fits:
            cache, reuse = self._caches[best], shared[best]
        else:
            cache = min(self._caches, key=lambda c: c.used)
            reuse = cache.match(tokens)
        reuse = min(reuse, tokens.size - 1)
        cache.length = reuse
        cache.used = self._clock
        return cache, reuse

    @property
    def used_bytes(self) -> int:
        """Return the bytes that the caches hold."""
        return sum(cache.rows.nbytes for cache in self._caches)

    def rewind(self) -> None:
        """Forget what the caches hold, but keep their memory."""
        for cache in self._caches:
            cache.length = 0

    def forget(self) -> None:
        """Drop all rows and give their memory back."""
        self._caches.clear()
