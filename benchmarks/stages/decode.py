"""
The decode step: time a token, bandwidth, and what the client sees, beside transformers.

Official shapes with random weights. Times are those of steps in a row by CUDA events; the share of
the limit is held against the data sheet's bandwidth and against a kernel that only reads, both in
the same run. ``--baseline`` adds transformers' own decoder (its forward pass and an argmax,
without ``generate``) on the same weights: ``eager``, and ``compiled`` with a static cache, which
takes a minute to compile. What an Orin would need with the same share of its bandwidth is printed
beside, and marked projected; where a form that needs a Hopper GPU is faster, that share is timed
with the form that does not.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import CannotRun, Record, median, percentile, record, write
from benchmarks.stages import _decode_models as models
from benchmarks.stages import _decode_theirs, _llama
from qwen_vl_ros.engine.cuda_decoder import CudaDecoder, _describe, make_decoder
from qwen_vl_ros.engine.decoder import Row, TorchDecoder, step_logits
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.kernels.decode import DecodeKernels
from qwen_vl_ros.measure.devices import DEVICES, find_device
from qwen_vl_ros.measure.efficiency import PORTABLE

#: The device that is projected, in its usual mode.
ORIN = 'orin-agx-64'

EAGER, COMPILED = 'transformers eager', 'transformers static-compiled'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--shape', nargs='+', default=['2b'], choices=('2b', '7b', 'tiny'))
    parser.add_argument('--dtype', nargs='+', default=['bf16', 'fp16', 'int8', 'int4'],
                        choices=('bf16', 'fp16', 'int8', 'int4'))
    parser.add_argument('--context', nargs='+', type=int, default=[256, 512, 1024, 4096])
    parser.add_argument('--sequences', nargs='+', type=int, default=[1, 2, 4, 8],
                        help='decoded together, at context 512')
    parser.add_argument('--steps', type=int, default=200, help='timed steps of a case')
    parser.add_argument('--tokens', type=int, default=1000,
                        help='of a long answer, as the client sees it; 0 leaves it out')
    parser.add_argument('--baseline', nargs='*', default=[], choices=('eager', 'compiled'))
    parser.add_argument('--llama', type=Path, help='figures of llama.cpp to stand beside')


def run(args: argparse.Namespace) -> list[Record]:
    """Time all shapes and dtypes."""
    if not torch.cuda.is_available():
        raise CannotRun('torch finds no CUDA device')
    device = torch.device('cuda', torch.cuda.current_device())
    pin = next((d.modes[d.default].gb_s for d in DEVICES.values()
                if d.title.split()[1] in torch.cuda.get_device_name(device).split()), None)
    read = read_bandwidth(device)
    bench = Bench(args, device, pin, max(read))
    bench.keep([record('decode', {'path': 'cuda', 'variant': 'torch.sum of 4 GB'}, 'gb_s',
                       median(read), 'GB/s', times=read, note='a kernel that only reads')])
    compiled = bench.compiled(args.shape) if 'compiled' in args.baseline else {}
    for shape in args.shape:
        theirs = compiled.get(shape, {})
        if 'eager' in args.baseline:
            theirs = bench.eager(shape) | theirs
        for dtype in args.dtype:
            bench.ours(shape, dtype, theirs)
            bench.note(f'{shape} {dtype}')
    return bench.found


def read_bandwidth(device: torch.device) -> list[float]:
    """Return GB/s of a sum over 4 GB, run by run."""
    numbers = torch.empty(1 << 30, dtype=torch.float32, device=device).fill_(1)
    times = timed(lambda: numbers.sum(), 10, 1)
    return [numbers.nbytes / ms / 1e6 for ms in times]


def timed(call: Callable[[], object], runs: int, calls: int) -> list[float]:
    """Return milliseconds of a call: ``runs`` figures, each over some calls in a row."""
    times = []
    for i in range(runs + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / calls)
    return times


class Bench:
    """
    What all measurements share.

    :param pin: GB/s of the data sheet, or ``None`` for a device that is not in the table.
    :param read: GB/s of a kernel that only reads.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, pin: float | None,
                 read: float) -> None:
        self.args, self.device, self.pin, self.read = args, device, pin, read
        self.found: list[Record] = []
        self._started = time.monotonic()

    def note(self, what: str) -> None:
        """Say how far the stage has come."""
        print(f'{time.monotonic() - self._started:6.1f} s: {what}', flush=True)

    def keep(self, found: list[Record]) -> None:
        """Take records in, and write them at once: a later case may end the program."""
        self.found += found
        if self.args.json:
            write(self.args.json, found)

    def ours(self, shape: str, dtype: str, theirs: dict[str, float]) -> None:
        """Time one model of ours in all cases."""
        before = used(self.device)
        language = models.language_model(shape, dtype, self.device)
        decoder = make_decoder(language)
        for count in sorted({1, *self.args.sequences}):
            # Whatever is chosen, captured or tuned at first use is so by that.
            slots = [decoder.admit(Row(models.filled_cache(language, 512, 640), 0), 7)
                     for _ in range(count)]
            for _ in range(4):
                decoder.step()
            for slot in slots:
                decoder.release(slot)
        path = 'cuda' if isinstance(decoder, CudaDecoder) else 'torch'
        case: dict[str, Any] = {'model': shape, 'dtype': dtype, 'path': path}
        alone = self.step(language, decoder, {**case, 'context': 512}, 1, theirs)
        self.keep(alone)
        if isinstance(decoder, CudaDecoder) and type(decoder.kernels) is not DecodeKernels:
            self.keep(self.step(language, portable(decoder), {
                **case, 'context': 512, 'variant': PORTABLE}, 1, {}))
        for count in self.args.sequences:
            if count > 1:
                self.keep(self.step(
                    language, decoder, {**case, 'context': 512, 'sequences': count}, count,
                    {'one sequence': alone[0]['value']}))
        for context in self.args.context:
            if context != 512:
                self.keep(self.step(language, decoder, {**case, 'context': context}, 1, {}))
        if self.args.tokens:
            self.keep(self.client(language, decoder, case, before))
        if shape != '7b':
            self.keep(self.accuracy(shape, language, decoder, case))
        del decoder, language
        torch.cuda.empty_cache()

    def step(self, language: LanguageModel, decoder: CudaDecoder | TorchDecoder | Any,
             case: dict[str, Any], count: int, theirs: dict[str, float]) -> list[Record]:
        """Time steps of ``count`` sequences; GPU time alone, several launched in a row."""
        steps = self.args.steps
        context = case['context']
        caches = [models.filled_cache(language, context, context + 4 * steps + 64)
                  for _ in range(count)]
        slots = [decoder.admit(Row(cache, 0), 7 + i) for i, cache in enumerate(caches)]
        if isinstance(decoder, CudaDecoder):
            kernels = decoder.kernels

            def step() -> None:
                for first in range(0, count, kernels.rows):
                    kernels.step(slots[first:first + kernels.rows])

            times = timed(step, max(5, steps // 10), 10)
        else:
            times = timed(decoder.step, steps, 1)
        for slot in slots:
            decoder.release(slot)
        ms = median(times)
        config = language.config
        row = 2 * config.layers * config.kv_heads * config.head_dim * language.dtype.itemsize
        reads = -(-count // decoder.kernels.rows) if isinstance(decoder, CudaDecoder) else 1
        moved = reads * language.weight_bytes + count * context * row
        note = decoder.kernels.form if isinstance(decoder, CudaDecoder) else ''
        found = [record('decode', case, 'ms_per_token' if count == 1 else 'ms', ms, 'ms',
                        times=times, baseline=baseline, note=note)
                 for baseline in (*theirs.items(),) or (None,)]
        rate = moved / ms / 1e6
        found.append(record('decode', case, 'tokens_per_s', count * 1e3 / ms, '1/s'))
        found.append(record('decode', case, 'gb_s', rate, 'GB/s',
                            note='weights and the cache, over the time of a step'))
        if self.pin:
            found.append(record('decode', case, 'share_of_limit', rate / self.pin, '',
                                note=f'of {self.pin:g} GB/s on the data sheet'))
        found.append(record('decode', case, 'share_of_read', rate / self.read, '',
                            note=f'of {self.read:.0f} GB/s that a reading kernel reached'))
        if self.pin and count == 1 and type(getattr(decoder, 'kernels', None)) is DecodeKernels:
            found.append(self.projected(case, moved, rate / self.pin))
        if self.args.llama and count == 1:
            found += _llama.beside(self.args.llama, case, 1e3 / ms)
        return found

    def projected(self, case: dict[str, Any], moved: int, share: float) -> Record:
        """
        Return the time of a step on an Orin that reaches the same share of its bandwidth.

        :param moved: bytes of the step.
        """
        device, name, mode = find_device(ORIN, None)
        made = record(
            'decode', {**{k: v for k, v in case.items() if k != 'path'}, 'device': ORIN,
                       'power': name}, 'ms_per_token', moved / share / mode.gb_s / 1e6, 'ms',
            kind='projected', note=f'{moved / 1e6:.0f} MB at {share:.1%} of {mode.gb_s:g} GB/s, '
            'the share that the step reached on the machine that timed it')
        made['machine'] = f'{device.title}, projected: none was at hand'
        return made

    def client(self, language: LanguageModel, decoder: Any, case: dict[str, Any], before: int,
               ) -> list[Record]:
        """Decode a long answer as an engine does, token by token."""
        count = self.args.tokens
        cache = models.filled_cache(language, 512, 512 + count + 16)
        slot = decoder.admit(Row(cache, 0, steps=count + 8), 7)
        for _ in range(8):
            decoder.step()
        rest = used(self.device) - before - weights_of(language) - cache.rows.nbytes
        seen: list[float] = []
        last = time.perf_counter()
        for _ in range(count):
            choice: Choice = decoder.step()[slot]
            now = time.perf_counter()
            seen.append((now - last) * 1e3)
            last = now
            if not choice.finite:
                raise CannotRun('a logit was not finite')
        grown = used(self.device) - before - weights_of(language) - cache.rows.nbytes - rest
        decoder.release(slot)
        case = {**case, 'context': 512, 'answer_tokens': count}
        found = [record('decode', case, 'ms_per_token_seen', median(seen), 'ms', times=seen,
                        p50=median(seen), p99=percentile(seen, 99),
                        note='from token to token on the host')]
        found += self.handover(language, decoder, case)
        found.append(record('decode', case, 'mb', rest / 1e6, 'MB',
                            note='device memory besides weights and cache, libraries included'))
        found.append(record('decode', case, 'mb_grown', grown / 1e6, 'MB',
                            note=f'over {count} tokens'))
        return found

    def handover(self, language: LanguageModel, decoder: Any, case: dict[str, Any],
                 ) -> list[Record]:
        """Time from a token's end on the device to its choice in the host's hands."""
        if not isinstance(decoder, CudaDecoder):
            return []
        cache = models.filled_cache(language, 512, 1024)
        slot = decoder.admit(Row(cache, 0), 7)
        late = []
        for _ in range(60):
            origin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            zero = time.perf_counter()
            origin.record()
            decoder._launch([slot])
            end.record()
            decoder._wait(slot, decoder._slots[slot])  # type: ignore[arg-type]
            now = time.perf_counter()
            end.synchronize()
            late.append((now - zero) * 1e3 - origin.elapsed_time(end))
        decoder.release(slot)
        return [record('decode', case, 'ms_to_host', median(late), 'ms', times=late,
                       note='a lone step: launch, and token decided to choice read')]

    def eager(self, shape: str) -> dict[str, float]:
        """Time transformers' decoder as it is."""
        model = models.TheirDecoder(shape, self.device, torch.bfloat16, 0)
        return self.theirs(shape, EAGER, _decode_theirs.times_of(model))

    def compiled(self, shapes: Sequence[str]) -> dict[str, dict[str, float]]:
        """Time transformers' decoder compiled, by shape; a shape that fails is left out."""
        running = [_decode_theirs.Compiled(shape) for shape in shapes]
        found = {}
        ready = []
        for one in running:
            try:
                one.wait()
                ready.append(one)
            except CannotRun as error:
                print(f'left out: {error}')
        for one in ready:
            found[one.shape] = self.theirs(one.shape, COMPILED, one.times())
        self.note('transformers compiled')
        return found

    def theirs(self, shape: str, name: str, times: list[float]) -> dict[str, float]:
        """Keep the times of a baseline, and return its name and median."""
        self.keep([record(
            'decode', {'model': shape, 'dtype': 'bf16', 'context': _decode_theirs.CONTEXT,
                       'variant': name}, 'ms_per_token', median(times), 'ms', times=times)])
        torch.cuda.empty_cache()
        return {name: median(times)}

    @torch.inference_mode()
    def accuracy(self, shape: str, language: LanguageModel, decoder: Any, case: dict[str, Any],
                 ) -> list[Record]:
        """Hold logits after eight tokens against float32 on the same (dequantised) weights."""
        if not isinstance(decoder, CudaDecoder):
            return []
        tokens = [11, 500, 7, 42, 300, 5, 66, 8]
        wide = models.widened(language)
        caches = [KVCache(language.config, 16, self.device, dtype)
                  for dtype in (language.dtype, language.dtype, torch.float32)]
        logits = torch.empty((8, language.config.vocab), device=self.device)
        for token in tokens:
            slot = decoder.admit(Row(caches[0], 0), token)
            decoder.kernels.step([slot], logits=logits)
            decoder.release(slot)
            plain = step_logits(language, [token], [Row(caches[1], 0)])[0]
            exact = step_logits(wide, [token], [Row(caches[2], 0)])[0]
            for cache in caches:
                cache.length += 1

        def error(got: torch.Tensor) -> float:
            return float((got.double() - exact.double()).norm() / exact.double().norm())

        name, other = 'plain torch', error(plain)
        if case['dtype'] == 'bf16' and self.args.baseline:
            theirs = models.TheirDecoder(shape, self.device, torch.bfloat16, 16)
            name, other = EAGER, error(theirs.prefill(tokens))
        return [record('decode', {**case, 'context': len(tokens)}, 'relative_error',
                       error(logits[0]), '', baseline=(name, other),
                       note='Frobenius norm of the logits against float32, random weights')]


def portable(decoder: CudaDecoder) -> CudaDecoder:
    """Return the same decoder on the one kernel that needs nothing newer than an Orin has."""
    other = copy.copy(decoder)
    other.kernels = DecodeKernels(*_describe(decoder.language))
    other._slots, other._serial = [None] * len(other._slots), [0] * len(other._serial)
    return other


def used(device: torch.device) -> int:
    """Return bytes of the device that are in use, by whomever; what nobody holds is given back."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def weights_of(language: LanguageModel) -> int:
    """Return the bytes of all weights that stay in memory."""
    tied = language.head.__class__.__name__ == 'Linear' and (
        language.head.weight.data_ptr() == language.embedding.data_ptr())
    return language.weight_bytes + (0 if tied else language.embedding.nbytes)

