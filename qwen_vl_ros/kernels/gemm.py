"""
Matrix products by cuBLASLt with bias and residual in the epilogue, algorithms chosen by timing.

The library is opened at run time by libqwen_vl_encoder: torch brings it along, on a Jetson it is
part of CUDA. Which algorithm is fastest for a shape is measured once on the device and remembered
in ``$XDG_CACHE_HOME/qwen_vl_ros/products.json`` under the device's name, cuBLASLt's version,
shape, dtype and epilogue.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen_vl_ros.kernels.loader import KernelError, library

LOG = logging.getLogger('qwen_vl_ros.kernels')

#: In the order of ``qwen_vl_dtype``.
DTYPES = (torch.bfloat16, torch.float16)

#: ``QWEN_VL_LT_ALGORITHM``.
ALGORITHM_BYTES = 64

#: What cuBLASLt may use beside the operands; NVIDIA recommends 32 MiB for Hopper.
WORKSPACE_BYTES = 32 << 20

#: Algorithms that are timed for a shape.
CANDIDATES = 16

#: cuBLASLt is also asked for a product of so many rows less, and what it proposes is timed for the
#: shape itself: just under a multiple of its tiles it proposes others, which may be faster.
FEWER_ROWS = 60

#: An algorithm replaces one that cuBLASLt holds for faster when it takes less than this share.
MARGIN = 0.98

#: Names another library than the one that torch or CUDA brings.
VARIABLE = 'QWEN_VL_CUBLASLT'

_MESSAGE = 256


class NativeProduct(ctypes.Structure):
    """``qwen_vl_product``."""

    _fields_ = (('rows', ctypes.c_int32), ('outs', ctypes.c_int32), ('ins', ctypes.c_int32),
                ('dtype', ctypes.c_int32), ('bias', ctypes.c_int32), ('add', ctypes.c_int32))


@dataclass(frozen=True)
class Shape:
    """
    What an algorithm is chosen for: x [rows, ins] times weight [outs, ins], and the epilogue.

    :param bias: one is added.
    :param add: a residual is added.
    """

    rows: int
    outs: int
    ins: int
    dtype: torch.dtype
    bias: bool
    add: bool

    @property
    def flops(self) -> int:
        """Return the FLOPs, a multiply-add counted as two."""
        return 2 * self.rows * self.outs * self.ins

    @property
    def name(self) -> str:
        """Return a name for the cache file."""
        extra = ('+bias' if self.bias else '') + ('+add' if self.add else '')
        kind = str(self.dtype).removeprefix('torch.')
        return f'{self.rows}x{self.outs}x{self.ins} {kind}{extra}'


@dataclass
class Plan:
    """A prepared product. :param tuned: its algorithm was chosen by timing."""

    handle: ctypes.c_void_p
    algorithms: list[bytes]
    tuned: bool = False


def multiply_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, add: Tensor | None = None,
) -> Tensor:
    """Do what :meth:`Products.multiply` does in plain torch: ``x @ weight.T + bias + add``."""
    y = F.linear(x, weight, bias)
    return y if add is None else add + y


class Products:
    """
    cuBLASLt on one device, with a workspace of its own: one stream at a time may use it.

    :param device: where all tensors lie.
    :param native: the library; ``None`` loads libqwen_vl_encoder.
    :param store: file of chosen algorithms; ``None`` is the user's cache.
    :raises FileNotFoundError: when the library has not been built.
    :raises KernelError: when cuBLASLt cannot be opened.
    """

    def __init__(
        self, device: torch.device, native: ctypes.CDLL | None = None, store: Path | None = None,
    ) -> None:
        self.device = device
        self._library = library('qwen_vl_encoder') if native is None else native
        handle, version = ctypes.c_void_p(), ctypes.c_uint64()
        path = os.environ.get(VARIABLE)
        self._handle: ctypes.c_void_p | None = None
        call(self._library.qwen_vl_lt_open, path and path.encode(), ctypes.byref(handle),
              ctypes.byref(version))
        self._handle = handle
        self.version = version.value
        self._plans: dict[Shape, Plan] = {}
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._store = Store(store, f'{torch.cuda.get_device_name(device)} cuBLASLt {self.version}')

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
        add: Tensor | None = None,
    ) -> Tensor:
        """
        Write ``x @ weight.T + bias + add``.

        :param x: [rows, ins], bfloat16 or float16, contiguous.
        :param weight: [outs, ins].
        :param bias: [outs] or ``None``.
        :param out: [rows, outs].
        :param add: [rows, outs] or ``None``; may be ``out``.
        :return: ``out``.
        """
        shape = Shape(x.shape[0], weight.shape[0], weight.shape[1], x.dtype, bias is not None,
                      add is not None)
        plan = self._plans.get(shape) or self._prepare(shape)
        self._multiply(plan, x, weight, bias, out, add)
        return out

    def tune(
        self, rows: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
        add: bool = False,
    ) -> float | None:
        """
        Choose the fastest algorithm for a shape, if it has not been chosen before.

        :param weights: of all layers, each [outs, ins]; they take turns, so that they come from
            memory as they do in use.
        :param biases: as many.
        :return: microseconds of the best; ``None`` where nothing had to be timed.
        """
        outs, ins = weights[0].shape
        shape = Shape(rows, outs, ins, weights[0].dtype, biases[0] is not None, add)
        plan = self._plans.get(shape) or self._prepare(shape)
        if plan.tuned:
            return None
        x = torch.randn(rows, ins, device=self.device, dtype=shape.dtype)
        out = torch.randn(rows, outs, device=self.device, dtype=shape.dtype)
        best: tuple[float, bytes] | None = None
        for algorithm in dict.fromkeys(plan.algorithms + self._neighbours(shape)):
            try:
                self._choose(plan, algorithm)
                took = queued_time(lambda i: self._multiply(
                    plan, x, weights[i % len(weights)], biases[i % len(weights)], out,
                    out if add else None))
            except KernelError:
                continue  # refused for this shape after all
            # cuBLASLt's own order stands unless another one is clearly faster.
            if best is None or took < MARGIN * best[0]:
                best = took, algorithm
        if best is None:
            raise KernelError(f'no algorithm of cuBLASLt runs {shape.name}')
        self._choose(plan, best[1])
        plan.tuned = True
        self._store.put(shape.name, best[1])
        return best[0]

    def _prepare(self, shape: Shape) -> Plan:
        plan = self._ask(shape)
        known = self._store.get(shape.name)
        if known is not None:
            try:
                self._choose(plan, known)
                plan.tuned = True
            except KernelError:
                LOG.info('the remembered algorithm for %s is not accepted', shape.name)
        self._plans[shape] = plan
        return plan

    def _neighbours(self, shape: Shape) -> list[bytes]:
        """Return what is proposed for :data:`FEWER_ROWS`; it need not run for the shape."""
        if shape.rows <= FEWER_ROWS:
            return []
        try:
            plan = self._ask(replace(shape, rows=shape.rows - FEWER_ROWS))
        except KernelError:
            return []
        self._library.qwen_vl_lt_forget(plan.handle)
        return plan.algorithms

    def _ask(self, shape: Shape) -> Plan:
        product = NativeProduct(shape.rows, shape.outs, shape.ins, DTYPES.index(shape.dtype),
                                shape.bias, shape.add)
        buffer = (ctypes.c_uint8 * (CANDIDATES * ALGORITHM_BYTES))()
        found, handle = ctypes.c_int32(), ctypes.c_void_p()
        call(self._library.qwen_vl_lt_prepare, self._handle, ctypes.byref(product),
             ctypes.c_uint64(WORKSPACE_BYTES), CANDIDATES, buffer, ctypes.byref(found),
             ctypes.byref(handle))
        raw = bytes(buffer)
        return Plan(handle, [raw[i * ALGORITHM_BYTES:(i + 1) * ALGORITHM_BYTES]
                             for i in range(found.value)])

    def _choose(self, plan: Plan, algorithm: bytes) -> None:
        call(self._library.qwen_vl_lt_choose, plan.handle, algorithm)

    def _multiply(
        self, plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
        add: Tensor | None,
    ) -> None:
        call(self._library.qwen_vl_lt_multiply, plan.handle, address(x), address(weight),
              address(bias), address(add), address(out), address(self._workspace),
              stream(self.device))

    def __del__(self) -> None:
        """Free the plans and the handle."""
        if getattr(self, '_handle', None) is not None:
            for plan in self._plans.values():
                self._library.qwen_vl_lt_forget(plan.handle)
            self._library.qwen_vl_lt_close(self._handle)


@dataclass
class Store:
    """
    Remembered algorithms of one device and version.

    :param path: of the JSON file; ``None`` is the user's cache.
    :param section: what the algorithms hold for.
    """

    path: Path | None
    section: str
    _known: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what is there; a file that cannot be read is as good as none."""
        if self.path is None:
            base = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
            self.path = Path(base) / 'qwen_vl_ros' / 'products.json'
        self._known = self._all().get(self.section, {})

    def get(self, name: str) -> bytes | None:
        """Return the algorithm of a shape."""
        try:
            raw = bytes.fromhex(self._known[name])
        except (KeyError, ValueError, TypeError):
            return None
        return raw if len(raw) == ALGORITHM_BYTES else None

    def put(self, name: str, algorithm: bytes) -> None:
        """Remember an algorithm; where the file cannot be written, for this process."""
        self._known[name] = algorithm.hex()
        assert self.path is not None
        found = self._all()
        # Another process may have added to the file meanwhile.
        found[self.section] = {**found.get(self.section, {}), **self._known}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                    'w', dir=self.path.parent, suffix='.tmp', delete=False) as file:
                json.dump(found, file, indent=1, sort_keys=True)
            os.replace(file.name, self.path)
        except OSError as error:
            LOG.debug('chosen algorithms are not kept: %s', error)

    def _all(self) -> dict[str, dict[str, str]]:
        assert self.path is not None
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: value for key, value in found.items() if isinstance(value, dict)}


def queued_time(call: Callable[[int], object], runs: int = 12) -> float:
    """
    Return microseconds of a launch among many, the fastest of two rounds.

    :param call: launches in the current stream; gets a running number, to rotate its operands.
    """
    best = float('inf')
    for turn in range(3):
        # The device waits (cycles) while the launches queue up: their own cost stays out.
        torch.cuda._sleep(1_000_000 if turn else 1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(runs if turn else 1):
            call(i)
        end.record()
        end.synchronize()
        if turn:
            best = min(best, begin.elapsed_time(end) * 1e3 / runs)
    return best


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return where a tensor's elements start, null for ``None``."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def stream(device: torch.device) -> ctypes.c_void_p:
    """Return torch's current stream of a device."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def call(function: object, *arguments: object) -> None:
    """:raises KernelError: when a function of the library refuses; its sentence is the text."""
    message = ctypes.create_string_buffer(_MESSAGE)
    code = function(*arguments, message, ctypes.c_size_t(_MESSAGE))  # type: ignore[operator]
    if code:
        raise KernelError(message.value.decode(errors='replace'), code)
