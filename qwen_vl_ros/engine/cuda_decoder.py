"""The decoder in CUDA kernels: tokens stay on the device, the host reads them as they appear."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_vl_ros.engine.decoder import (
    SLOTS,
    Decoder,
    Row,
    Running,
    TorchDecoder,
    append_name,
    check_admission,
    check_room,
)
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.generate import Choice
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.language import LanguageModel
from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8Linear
from qwen_vl_ros.kernels import decode_layout as layout
from qwen_vl_ros.kernels.decode import (
    FINITE,
    RESULTS,
    STUCK,
    ChainKernels,
    DecodeKernels,
    Matrix,
    NativeRow,
    Weights,
)
from qwen_vl_ros.kernels.loader import KernelError

LOG = logging.getLogger('qwen_vl_ros.engine')

#: Steps under way at a time: the one waited for and those that the GPU goes on with meanwhile.
AHEAD = 2
#: The same of a sequence that goes along with one that came later; ``release`` waits for them.
MOST_AHEAD = 4
#: Seconds after which a step that gave no result is an error.
PATIENCE = 20.0
#: Seconds of asking without a pause; a step is about one millisecond.
SPIN = 0.003
#: Steps, and tokens before them, by which the form of the step is chosen.
TIMED_STEPS, TIMED_CONTEXT = 8, 512
#: Relative difference of logits that rounding explains (bf16 and random weights: 0.06).
AGREEMENT = 0.2
#: Clocks between pieces of weights that the chain asks for early, see :meth:`ChainKernels.pace`.
PACES = (0, 500, 700, 900)


def make_decoder(language: LanguageModel, slots: int = SLOTS) -> Decoder:
    """
    Return the fastest decoder for a model: the kernels where they serve it, else plain torch.

    On a GPU one line of the log says why the kernels are not used.
    """
    if language.device.type == 'cuda':
        try:
            return CudaDecoder(language, slots)
        except (FileNotFoundError, KernelError) as error:
            LOG.warning('decode kernels: %s; plain torch is used instead', error)
    return TorchDecoder(language, slots)


@dataclass
class Flying(Running):
    """
    A sequence in its slot.

    :param taken: number of the next result to read; ``launched`` of the next step to launch.
    :param mask: of the step under way.
    """

    taken: int = 0
    launched: int = 0
    mask: Tensor | None = None
    #: When the steps under way were launched, monotonic clock, nanoseconds.
    launches: deque[int] = field(default_factory=deque)


class Stamps:
    """
    Places a device's stamps on the host's clock.

    No stamp is seen before it was made: the shortest time from stamp to sight so far is taken for
    the distance of the clocks. It may grow, as one of them runs slower than the other.
    """

    #: Nanoseconds by which clocks may run apart in one.
    DRIFT = 1e-4

    def __init__(self) -> None:
        self._apart: int | None = None
        self._seen = 0

    def host_ns(self, stamp: int, seen: int) -> int:
        """
        Return when a stamp was made, nanoseconds of the host's clock.

        :param stamp: nanoseconds of the device's clock.
        :param seen: when the host saw it.
        """
        apart = seen - stamp
        if self._apart is not None:
            apart = min(apart, self._apart + int((seen - self._seen) * self.DRIFT))
        self._apart, self._seen = apart, seen
        return stamp + apart


class CudaDecoder:
    """
    :class:`~qwen_vl_ros.engine.decoder.Decoder` on :class:`~qwen_vl_ros.kernels.decode`.

    A step of all sequences is one launch, in the form that :func:`choose_kernels` found fastest;
    while the host reads one token the GPU computes the next (:data:`AHEAD`), except where a
    grammar has to see the token first. Steps that nobody asks for any more leave rows behind
    ``cache.length`` and results that nobody reads. All calls come from one thread at a time and
    on one stream, that on which the caches were filled.

    Sampling draws with Gumbel noise from (seed, position, token): the same seed gives the same
    tokens whatever runs beside them, but not those that torch's generator would draw.

    :param language: the weights; they stay where they are.
    :param slots: sequences at a time, at most 8.
    :param native: the library; ``None`` loads libqwen_vl_decode.
    :raises FileNotFoundError: when libqwen_vl_decode has not been built.
    :raises KernelError: for shapes, dtypes or weights that the kernels do not serve.
    """

    def __init__(self, language: LanguageModel, slots: int = SLOTS,
                 native: ctypes.CDLL | None = None) -> None:
        self.language = language
        self.kernels = choose_kernels(language, native)
        self._slots: list[Flying | None] = [None] * min(slots, SLOTS)
        self._serial = [0] * len(self._slots)
        self._logits: Tensor | None = None
        self._stamps = Stamps()

    def admit(self, row: Row, token: int) -> int:
        """See :meth:`Decoder.admit`."""
        rows = row.cache.rows
        if rows.dtype != self.language.dtype or rows.device != self.language.device:
            raise EngineError(
                ErrorCode.BAD_REQUEST, f'a cache of {rows.dtype} on {rows.device}; the decoder '
                f'has {self.language.dtype} on {self.language.device}')
        slot = check_admission(self._slots, row, token, self.language.config.vocab)
        flying = Flying(row, token, None, taken=self._serial[slot], launched=self._serial[slot])
        self._slots[slot] = flying
        self._place(slot, flying)
        return slot

    def release(self, slot: int) -> None:
        """
        See :meth:`Decoder.release`.

        Returns when the steps under way have ended (a step's time at most for each): somebody else
        may fill the cache next, on another stream.
        """
        flying = self._slots[slot]
        self._slots[slot] = None
        if flying is not None:
            self._serial[slot] = flying.launched
            if flying.launched > flying.taken:
                self._await(slot, flying.launched - 1)

    @torch.inference_mode()
    def step(self, allowed: Mapping[int, Tensor] | None = None) -> dict[int, Choice]:
        """See :meth:`Decoder.step`."""
        masks = allowed or {}
        active = {slot: s for slot, s in enumerate(self._slots) if s is not None}
        for slot, s in active.items():
            check_room(s.row)
            if slot in masks and s.launched > s.taken:
                # Steps under way know nothing of the grammar: begin again where the host is.
                s.taken = s.launched
                s.launches.clear()
                self._place(slot, s)
            s.mask = masks.get(slot)
        while True:
            if not any(s.launched - s.taken < self._target(s, AHEAD) for s in active.values()):
                break
            # One who came later is behind the others. They go along when it catches up: a step
            # that is shared costs little more, one of its own would be a step's time for nothing.
            going = [slot for slot, s in active.items()
                     if s.launched - s.taken < self._target(s, MOST_AHEAD)]
            for at in range(0, len(going), self.kernels.rows):
                self._launch(going[at:at + self.kernels.rows])
        found = {}
        for slot, s in active.items():
            found[slot] = self._wait(slot, s)
            append_name(s.row, s.token)
            s.token = found[slot].token
        return found

    def _target(self, s: Flying, most: int) -> int:
        """Return how many steps of a sequence, at most so many, may be under way."""
        room = s.row.cache.capacity - s.row.cache.length
        if s.row.steps is not None:
            room = min(room, s.row.steps)
        return max(1, min(1 if s.mask is not None else most, room))

    def _launch(self, slots: list[int]) -> None:
        flying = [self._slots[slot] for slot in slots]
        filtered = any(s.row.sampling.temperature > 0 and (
            s.row.sampling.top_k > 0 or s.row.sampling.top_p < 1) for s in flying if s)
        if filtered and self._logits is None:
            self._logits = torch.empty(
                (SLOTS, self.language.config.vocab), device=self.language.device)
        now = time.monotonic_ns()
        self.kernels.step(slots, [s.mask if s else None for s in flying],
                          logits=self._logits if filtered else None)
        for s in flying:
            if s is not None:
                s.launched += 1
                s.launches.append(now)

    def _place(self, slot: int, s: Flying) -> None:
        sampling, cache = s.row.sampling, s.row.cache
        self.kernels.admit(slot, NativeRow(
            cache=cache.rows.data_ptr(), capacity=cache.capacity, seed=s.row.seed & (2**64 - 1),
            serial=s.taken, length=cache.length, offset=s.row.offset, token=s.token,
            top_k=sampling.top_k, temperature=sampling.temperature, top_p=sampling.top_p))

    def _wait(self, slot: int, s: Flying) -> Choice:
        if not self._await(slot, s.taken):
            raise EngineError(
                ErrorCode.UNKNOWN, f'a decode step gave no result in {PATIENCE:.0f} s')
        result = self.kernels.results[slot, s.taken % RESULTS]
        flags = int(result['flags'])
        if flags & STUCK:
            raise EngineError(
                ErrorCode.UNKNOWN, 'a decode step hung: its blocks did not run side by side')
        s.taken += 1
        if s.row.steps is not None:
            s.row = _one_less(s.row)
        return Choice(int(result['token']), float(result['probability']),
                      float(result['margin']), bool(flags & FINITE), s.launches.popleft(),
                      self._stamps.host_ns(int(result['at']), time.monotonic_ns()))

    def _await(self, slot: int, serial: int) -> bool:
        """Wait for a result; tell whether it came."""
        result = self.kernels.results[slot, serial % RESULTS]
        start = time.perf_counter()
        while result['ready'] != serial + 1:
            waited = time.perf_counter() - start
            if waited > PATIENCE:
                if self.language.device.type == 'cuda':
                    torch.cuda.synchronize(self.language.device)  # raises what it knows
                return False
            # Without a pause too: whoever waits for the interpreter (a client for the last token's
            # text) gets it now and not when its patience ends.
            time.sleep(0.0002 if waited > SPIN else 0)
        return True


def choose_kernels(language: LanguageModel, native: ctypes.CDLL | None = None) -> DecodeKernels:
    """
    Return the form of the step that is fastest on the device, by timing all.

    Their logits are held against each other beforehand: one that a driver or compiler makes
    differ from the form without graphs is left out, with a line in the log.

    :param native: see :class:`CudaDecoder`; on a CPU (emulated) nothing is timed.
    :raises KernelError: where no form serves the model; the text is that of the last.
    """
    described = _describe(language)
    found: list[DecodeKernels] = []
    refusal = KernelError('no form of the decode step')
    for form in (DecodeKernels, ChainKernels):
        try:
            if form.available(native):
                found.append(form(*described, native=native))
        except KernelError as error:
            refusal = error
    if not found:
        raise refusal
    if len(found) == 1 or language.device.type != 'cuda':
        return found[0]
    logits = _trial_logits(found[0], language)
    times: list[tuple[float, int, int]] = []
    for index, kernels in enumerate(found):
        if index and _differs(kernels, language, logits):
            continue
        if isinstance(kernels, ChainKernels):
            early = torch.cuda.get_device_capability(language.device) >= (9, 0)
            for pace in PACES if early else (0,):
                kernels.pace(pace)
                times.append((_step_time(kernels, language), index, pace))
        else:
            times.append((_step_time(kernels, language), index, 0))
    _, index, pace = min(times)
    chosen = found[index]
    if isinstance(chosen, ChainKernels):
        chosen.pace(pace)
    LOG.info('decode step: %s; timed: %s', chosen.form, ', '.join(
        f'{found[i].form} (pace {clocks}) {ms:.3f} ms' for ms, i, clocks in times))
    # The next sequence in this slot counts from the beginning again.
    chosen.results[:] = 0
    return chosen


def _differs(kernels: DecodeKernels, language: LanguageModel, expected: Tensor) -> bool:
    """Tell whether a form cannot run or gives other logits [vocab] than expected."""
    try:
        logits = _trial_logits(kernels, language)
    except KernelError as error:
        LOG.error('decode step: %s: %s; it is left out', kernels.form, error)
        return True
    near = bool((logits - expected).norm() <= AGREEMENT * expected.norm())
    if not near and bool(expected.isfinite().all()):
        LOG.error('decode step: logits of %s differ; it is left out', kernels.form)
        return True
    return False


def _trial(kernels: DecodeKernels, language: LanguageModel) -> KVCache:
    """Put a sequence with random rows behind it into the first slot."""
    cache = KVCache(language.config, TIMED_CONTEXT + 4 * TIMED_STEPS, language.device,
                    language.dtype)
    generator = torch.Generator(language.device).manual_seed(0)
    cache.rows.normal_(generator=generator)
    kernels.admit(0, NativeRow(
        cache=cache.rows.data_ptr(), capacity=cache.capacity, length=TIMED_CONTEXT, top_p=1.0))
    return cache


def _trial_logits(kernels: DecodeKernels, language: LanguageModel) -> Tensor:
    """Return the logits [vocab] of a step; NaN where it did not write any."""
    cache = _trial(kernels, language)
    logits = torch.full((SLOTS, language.config.vocab), float('nan'), device=language.device)
    kernels.step([0], logits=logits)
    torch.cuda.synchronize(language.device)
    del cache  # not before the step has ended
    return logits[0]


def _step_time(kernels: DecodeKernels, language: LanguageModel) -> float:
    """Return milliseconds of a step of one sequence."""
    cache = _trial(kernels, language)
    times = []
    for _ in range(3):  # the first also warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernels.step([0], steps=TIMED_STEPS)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / TIMED_STEPS)
    del cache
    return min(times[1:])


def _one_less(row: Row) -> Row:
    return Row(row.cache, row.offset, row.sampling, row.seed, row.named,
               None if row.steps is None else row.steps - 1)


def _describe(language: LanguageModel) -> tuple[layout.Shape, Weights]:
    """Return a model as the kernels want it described."""
    config = language.config
    if config.activation != 'silu':
        raise KernelError(f'no decode kernel for the activation {config.activation}')
    layers = [{
        'norm1': layer.norm1, 'norm2': layer.norm2, 'qkv': _matrix(layer.qkv),
        'out': _matrix(layer.out), 'gate_up': _matrix(layer.gate_up), 'down': _matrix(layer.down),
    } for layer in language.layers]
    head = _matrix(language.head)
    first = layers[0]['qkv']
    assert isinstance(first, Matrix)
    shape = layout.Shape(
        config.width, config.mlp_width, config.heads, config.kv_heads, config.head_dim,
        config.vocab, first.form, head.form)
    return shape, Weights(layers, head, language.norm, language.embedding,
                          language.frequencies, config.eps)


def _matrix(linear: Linear) -> Matrix:
    if isinstance(linear, Int8Linear):
        return Matrix(linear.codes, layout.INT8, linear.scales, None, linear.bias)
    if isinstance(linear, Int4Linear):
        return Matrix(linear.packed, linear.form, linear.scales, linear.zeros, linear.bias)
    return Matrix(linear.weight, layout.FLOAT, None, None, linear.bias)
