"""
Prefill of a prompt with a picture in it, beside transformers' decoder.

Both have the same random weights of an official shape and start from the same embeddings: the
picture's tokens and 37 of text. Times are wall clock, from the call to the result on the device.
Also: errors against float32, and how long a chunk keeps a cancel waiting.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import CannotRun, Record, median, record
from benchmarks.stages._halves import (
    COMPILED,
    EAGER,
    Halves,
    in_float32,
    product_rate,
    relative,
    wall_ms,
)
from benchmarks.stages._reference import compile_blocks
from qwen_vl_ros.engine.costs import decoder_cost
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.layers import rms_norm
from qwen_vl_ros.engine.options import Options
from qwen_vl_ros.engine.patches import smart_resize
from qwen_vl_ros.measure.roofline import TEXT_TOKENS

#: What a cancel may have to wait for.
CANCEL_MS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--shape', choices=('2b', '7b'), default='2b')
    parser.add_argument('--dtype', choices=('bfloat16', 'float16'), default='bfloat16')
    parser.add_argument('--size', nargs='+', default=['640x480', '1280x720'])
    parser.add_argument('--keep', type=float, nargs='+', default=[1.0, 0.5, 0.33])
    parser.add_argument('--chunk', type=int, default=Options().prefill_chunk,
                        help='tokens between looks at cancel at most')
    parser.add_argument('--seconds', type=float, default=1.0, help='for each thing that is timed')
    parser.add_argument('--no-compiled', action='store_true', help='leave torch.compile out')


def run(args: argparse.Namespace) -> list[Record]:
    """Measure errors, then times."""
    bench = Bench(args)
    with torch.inference_mode():
        found = bench.errors()
        counts: dict[tuple[str, float], int] = {}
        for size in args.size:
            width, height = map(int, size.split('x'))
            h, w = smart_resize(height, width, 56 * 56, 1280 * 784, 28)
            for keep in args.keep:
                counts[size, keep] = TEXT_TOKENS + round(keep * h * w / 784)
        for (size, keep), n in counts.items():
            found += bench.times(size, keep, n, counts[size, 1.0])
        if not args.no_compiled:
            compile_blocks(*bench.theirs.layers)
            for size in args.size:
                found += bench.against_compiled(size, counts[size, 1.0])
    return found


class Bench:
    """What all measurements share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.halves = Halves(args.shape, getattr(torch, args.dtype))
        self.model = self.halves.language
        if self.model.fused is None:
            raise CannotRun('the fused prefill is not there: see the log')
        self.theirs: Any = self.halves.their_language
        self.rate = product_rate(self.halves.dtype)
        self.cache = KVCache(self.halves.shape.language, 4096, self.halves.device,
                             self.halves.dtype)
        self.ours: dict[str, list[float]] = {}
        self.eager: dict[int, float] = {}

    def case(self, **more: Any) -> dict[str, Any]:
        """Return the keys that name a measurement."""
        return {'model': self.args.shape, 'dtype': self.args.dtype, **more}

    def inputs(self, n: int) -> tuple[Tensor, Tensor]:
        """Return random embeddings [n, width] and positions [3, n], a picture in the middle."""
        ids = torch.randint(0, self.halves.shape.language.vocab, (n,), device='cuda')
        at = torch.arange(n, device='cuda').repeat(3, 1)
        inside = slice(15, n - 22)
        side = max(1, int((n - TEXT_TOKENS) ** 0.5))
        number = torch.arange(n - TEXT_TOKENS, device='cuda')
        at[0, inside], at[1, inside], at[2, inside] = 15, 15 + number // side, 15 + number % side
        return self.model.embed(ids), at

    def chunked(self, x: Tensor, at: Tensor) -> Tensor:
        """Run our prefill as the engine does, chunk by chunk; the last hidden state [1, width]."""
        start, hidden = 0, x
        while start < x.shape[0]:
            end = min(x.shape[0], start + self.model.chunk(self.args.chunk))
            hidden = self.model.prefill(x[start:end], at[:, start:end], self.cache, start,
                                        1 if end == x.shape[0] else 0)
            start = end
        return hidden

    def theirs_of(self, n: int) -> Callable[[int], Any]:
        """Return their prefill of n rotating embeddings, filling a cache."""
        sets = [self.inputs(n) for _ in range(4)]
        return lambda i: self.theirs(
            inputs_embeds=sets[i % 4][0][None], position_ids=sets[i % 4][1][:, None],
            use_cache=True)

    def errors(self) -> list[Record]:
        """Hold final hidden states against float32, in one piece and in chunks after a prefix."""
        exact = in_float32(self.theirs)
        rows = []
        for n in (38, 101, 428, 700, 1233):
            x, at = self.inputs(n)
            expected = exact(inputs_embeds=x.float()[None], position_ids=at[:, None],
                             use_cache=False).last_hidden_state[0]
            there = self.theirs(inputs_embeds=x[None], position_ids=at[:, None],
                                use_cache=False).last_hidden_state[0]
            other = relative(there, expected)
            self.cache.rows.fill_(float('nan'))
            parts, start = [], 0
            for part in x.split(259):
                parts.append(self.model.prefill(
                    part, at[:, start:start + part.shape[0]], self.cache, start))
                start += part.shape[0]
            own = relative(rms_norm(torch.cat(parts), self.model.norm,
                                    self.halves.shape.language.eps), expected)
            rows.append((own / other, own, other, n))
            # As the engine runs it: of the last layer, the last row alone.
            last = rms_norm(self.chunked(x, at), self.model.norm,
                            self.halves.shape.language.eps)
            own, other = relative(last, expected[-1:]), relative(there[-1:], expected[-1:])
            rows.append((own / other, own, other, n))
        worst = max(rows)
        return [record('prefill', self.case(path='cuda', variant='worst of a sweep'),
                       'relative_error', worst[1], '', baseline=(EAGER, worst[2]), runs=len(rows),
                       note='Frobenius norm of final hidden states, chunks of uneven length after '
                            f'each other; of {[r[3] for r in rows]} tokens, the worst ratio is '
                            f'at {worst[3]}')]

    def times(self, size: str, keep: float, n: int, full: int) -> list[Record]:
        """Time a prompt of n tokens, and the capture that it costs."""
        args, fused = self.args, self.model.fused
        assert fused is not None
        if full not in self.eager:
            self.eager[full] = median(wall_ms(self.theirs_of(full), args.seconds))
        sets = [self.inputs(n) for _ in range(4)]

        def work(i: int) -> None:
            self.chunked(*sets[i % 4])

        before = len(fused.graphs.captured)
        work(0)
        captured = fused.graphs.captured[before:]
        times = wall_ms(work, args.seconds)
        if keep == 1:
            self.ours[size] = times
        flops = decoder_cost(self.halves.shape.language, n, 0, 0, 0, 2)['flops']
        rate = flops / median(times) / 1e9
        case = self.case(size=size, keep=keep, tokens=n, path='cuda', variant='fused')
        note = 'the baseline sees all' if keep < 1 else ''
        found = [
            record('prefill', case, 'ms', median(times), 'ms', times=times,
                   baseline=(EAGER, self.eager[full]), note=note),
            record('prefill', case, 'tflop_s', rate, 'TFLOP/s'),
            record('prefill', case, 'share_of_limit', rate / self.rate, '',
                   note=f'of {self.rate:.0f} TFLOP/s, a large product in the same run')]
        if keep == 1:
            most = self.model.chunk(args.chunk)
            x, at = sets[0][0][:most], sets[0][1][:, :most]
            chunk = wall_ms(lambda i: self.model.prefill(x, at, self.cache, 0), args.seconds / 2)
            found.append(record(
                'prefill', {**case, 'variant': f'a chunk of {x.shape[0]}'}, 'ms', median(chunk),
                'ms', times=chunk, note=f'what a cancel waits for; {CANCEL_MS:g} are allowed'))
        if captured:
            found += [
                record('prefill', case, 'capture_ms', sum(c.ms for c in captured), 'ms',
                       note=f'{len(captured)} new buckets, on the host'),
                record('prefill', case, 'capture_mb', sum(c.bytes for c in captured) / 1e6, 'MB')]
        return found

    def against_compiled(self, size: str, n: int) -> list[Record]:
        """Time the reference with compiled layers."""
        other = median(wall_ms(self.theirs_of(n), self.args.seconds))
        case = self.case(size=size, keep=1.0, tokens=n, path='cuda', variant='fused')
        return [record('prefill', case, 'ms', median(self.ours[size]), 'ms',
                       times=self.ours[size], baseline=(COMPILED, other))]
