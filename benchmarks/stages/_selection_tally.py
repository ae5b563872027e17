"""Counts right answers by checkpoint, method and budget, and turns them into records."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.records import Record, record
from benchmarks.stages import _selection_cost as cost
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.roboscene.evaluate import wilson
from qwen_vl_ros.roboscene.geometry import UNITS
from qwen_vl_ros.share import share

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.stages._selection_methods import Shown
    from qwen_vl_ros.saliency.head import SaliencyHead

#: Checkpoint, method, units kept a slice.
Key = tuple[str, str, int]


class Tally:
    """Which items were right; every method sees the same items in the same order."""

    def __init__(self) -> None:
        self._hits: dict[Key, list[np.ndarray]] = defaultdict(list)
        self._families: dict[Key, list[np.ndarray]] = defaultdict(list)
        self._recall: dict[Key, list[np.ndarray]] = defaultdict(list)
        self._words: list[float] = []
        self._above: list[float] = []

    def look(self, shown: Shown) -> None:
        """Take note of the length of the questions and of what a fixed threshold keeps."""
        self._words.append(float((shown.group.labels >= 0).int().argmax(1).float().mean()))
        self._above.append(float(shown.maps['threshold'].mean()))

    def count(self, model: str, method: str, kept: int, shown: Shown, good: Tensor,
              seen: Tensor | None = None) -> None:
        """
        Count a batch.

        :param good: bool [N].
        :param seen: evidence units that were kept, [N].
        """
        key = (model, method, kept)
        self._hits[key].append(good.cpu().numpy())
        self._families[key].append(np.array([i.question.family for i in shown.items]))
        if seen is not None:
            total = shown.evidence.sum(1)
            self._recall[key].append((seen / total.clamp(min=1))[total > 0].cpu().numpy())

    def _by_family(self, key: Key) -> dict[str, np.ndarray]:
        hits, names = np.concatenate(self._hits[key]), np.concatenate(self._families[key])
        return {name: hits[names == name] for name in dict.fromkeys(names.tolist())}

    def records(self, args: argparse.Namespace, head: SaliencyHead, prefix: int, seeds: int
                ) -> list[Record]:
        """
        Return one record for each checkpoint, method and budget.

        :param prefix: tokens before the picture.
        :param seeds: that were counted.
        """
        config = load_config(share('models', 'tiny'))
        text = prefix + 2 + round(float(np.mean(self._words)))
        full = cost.encoder(config, [UNITS]) + cost.prefill(config, UNITS, text)
        found = []
        for key in self._hits:
            model, method, kept = key
            kept = kept or round(float(np.mean(self._above)) * UNITS)
            own = self._by_family(key)
            whole = {f: x for f, x in self._by_family((model, 'full', UNITS)).items() if f in own}
            below, error = _paired(own, whole)
            seen = self._recall.get(key)
            flops = cost.question(config, head, method, kept, text)
            found.append(record(
                'selection', {'model': model, 'method': method, 'kept': kept}, 'accuracy',
                float(np.mean([x.mean() for x in own.values()])), 'share',
                runs=sum(map(len, own.values())), higher_is_better=True,
                baseline=('all tokens', float(np.mean([x.mean() for x in whole.values()]))),
                items=args.items, seeds=seeds, flops_share=round(flops / full, 4),
                below_full=round(below, 5), below_full_95=round(1.96 * error, 5),
                evidence_recall=None if seen is None else round(
                    float(np.concatenate(seen).mean()), 4),
                where_downsampling_fails=self._rescued(key, own),
                families={f: _with_interval(x) for f, x in own.items()}))
        return found

    def _rescued(self, key: Key, own: dict[str, np.ndarray]) -> list[float] | None:
        """Return the accuracy, with interval, on items that downsampling gets wrong."""
        for method in ('downsample_trained', 'downsample'):
            other = (key[0], method, key[2])
            if other in self._hits:
                coarse = self._by_family(other)
                return _with_interval(np.concatenate(
                    [x[~coarse[f]] for f, x in own.items() if f in coarse]))
        return None


def _with_interval(right: np.ndarray) -> list[float]:
    low, high = wilson(int(right.sum()), len(right))
    return [round(float(right.mean()) if len(right) else 0.0, 4), round(low, 4), round(high, 4),
            len(right)]


def _paired(own: dict[str, np.ndarray], whole: dict[str, np.ndarray]) -> tuple[float, float]:
    """Return how far the mean of families lies below the full frame's, and its standard error."""
    gaps = [whole[f].astype(float) - own[f] for f in own]
    error = np.sqrt(sum(g.var() / len(g) for g in gaps)) / len(gaps)
    return float(np.mean([g.mean() for g in gaps])), float(error)
