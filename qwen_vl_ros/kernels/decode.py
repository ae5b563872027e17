"""Face of libqwen_vl_decode: the decode step of the language model in one persistent kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.kernels import decode_layout as layout
from qwen_vl_ros.kernels.loader import KernelError, library
from qwen_vl_ros.kernels.memory import together

#: Sequences of a step, and results of each that are kept: QWEN_VL_DECODE_ROWS and _RESULTS.
ROWS, RESULTS = 8, 64
FINITE, STUCK = 1, 2
DTYPES = (torch.bfloat16, torch.float16)
#: ``qwen_vl_decode_result``.
RESULT = np.dtype([('token', '<i4'), ('probability', '<f4'), ('margin', '<f4'), ('flags', '<i4'),
                   ('ready', '<i8'), ('at', '<i8')])

_MESSAGE = 512
_int, _long, _pointer, _float = (ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float)


class NativeMatrix(ctypes.Structure):
    """``qwen_vl_decode_matrix``."""

    _fields_ = (('weight', _pointer), ('scales', _pointer))


class NativeLayer(ctypes.Structure):
    """``qwen_vl_decode_layer``."""

    _fields_ = (('op', NativeMatrix * 4), ('bias', _pointer), ('norm1', _pointer),
                ('norm2', _pointer), ('reserved', _pointer))


class NativeModel(ctypes.Structure):
    """``qwen_vl_decode_model``."""

    _fields_ = (
        *((name, _int) for name in (
            'dtype', 'form', 'head_form', 'group', 'layers', 'width', 'mlp', 'heads', 'kv_heads',
            'head_dim', 'vocab', 'blocks', 'parts_out', 'parts_down')),
        ('eps', _float), ('reserved', _int), ('layer', _pointer), ('head', NativeMatrix),
        *((name, _pointer) for name in ('norm', 'embedding', 'frequencies', 'ranges',
                                        'workspace')),
        ('workspace_bytes', _long))


class NativeRow(ctypes.Structure):
    """``qwen_vl_decode_row``."""

    _fields_ = (('cache', _pointer), ('capacity', _long), ('seed', ctypes.c_uint64),
                ('serial', _long), ('length', _int), ('offset', _int), ('token', _int),
                ('top_k', _int), ('temperature', _float), ('top_p', _float),
                ('reserved', _int * 2))


class NativeLaunch(ctypes.Structure):
    """``qwen_vl_decode_launch``."""

    _fields_ = (('count', _int), ('steps', _int), ('slot', _int * ROWS),
                ('mask', _pointer * ROWS), ('results', _pointer), ('logits', _pointer))


@dataclass(frozen=True)
class Matrix:
    """
    A matrix as the kernel reads it.

    :param weight: floats or codes [out, in or in / 2], contiguous.
    :param form: of :mod:`~qwen_vl_ros.kernels.decode_layout`.
    :param scales: float32 [out] of INT8, float16 [out, groups] of grouped forms.
    :param zeros: integers [out, groups] of grouped forms.
    :param bias: [out] or ``None``.
    """

    weight: Tensor
    form: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """
    Everything that a step reads.

    :param layers: of each layer ``norm1``, ``norm2`` (tensors) and the matrices by name.
    :param frequencies: float32 [head_dim / 2] of the rotary embedding.
    """

    layers: Sequence[dict[str, Any]]
    head: Matrix
    norm: Tensor
    embedding: Tensor
    frequencies: Tensor
    eps: float


class DecodeKernels:
    """
    One model's decode step on one GPU.

    Everything runs in the current stream of the device and returns when it is launched. Weights
    are read where they lie; scales are copied once into the order of the tiles.

    :param shape: sizes and forms.
    :param weights: on the device; held as long as this object.
    :param native: the library; ``None`` loads libqwen_vl_decode.
    :raises FileNotFoundError: when the library has not been built.
    :raises KernelError: for sizes, forms or devices that it does not serve.
    """

    #: What the names of its functions begin with, and a name for this form of the step.
    prefix, form = 'qwen_vl_decode', 'one kernel'

    @classmethod
    def available(cls, native: ctypes.CDLL | None = None) -> bool:
        """Tell whether a library has this form of the step; see :class:`DecodeKernels`."""
        found = library('qwen_vl_decode') if native is None else native
        return hasattr(found, f'{cls.prefix}_step')

    def __init__(self, shape: layout.Shape, weights: Weights,
                 native: ctypes.CDLL | None = None) -> None:
        self._library = library('qwen_vl_decode') if native is None else native
        self.device = weights.embedding.device
        if weights.embedding.dtype not in DTYPES:
            raise KernelError(f'no decode kernel for {weights.embedding.dtype}')
        self._kept: list[Any] = [weights]
        self._model = NativeModel(
            dtype=DTYPES.index(weights.embedding.dtype), form=shape.form,
            head_form=shape.head_form, group=128, layers=len(weights.layers), width=shape.width,
            mlp=shape.mlp, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            vocab=shape.vocab, eps=weights.eps)
        self._model.group = self._common_group(shape, weights)
        table = (NativeLayer * len(weights.layers))()
        matrices = iter(self._matrices(shape, weights))
        for native_layer, layer in zip(table, weights.layers):
            for index in range(len(layout.OPS[:4])):
                native_layer.op[index] = next(matrices)
            native_layer.bias = self._address(layer['qkv'].bias)
            native_layer.norm1 = self._address(layer['norm1'])
            native_layer.norm2 = self._address(layer['norm2'])
        self._model.head = next(matrices)
        self._model.norm = self._address(weights.norm)
        self._model.embedding = self._address(weights.embedding)
        self._model.frequencies = self._address(weights.frequencies)
        self._model.layer = self._upload(np.frombuffer(bytes(table), np.uint8))
        #: Most sequences that a step can take.
        self.rows = self._prepare(shape)
        pinned = torch.zeros(ROWS * RESULTS * RESULT.itemsize, dtype=torch.uint8,
                             pin_memory=self.device.type == 'cuda')
        self._kept.append(pinned)
        #: What the device hands over, in pinned memory: [slot, serial % RESULTS].
        self.results: np.ndarray = pinned.numpy().view(RESULT).reshape(ROWS, RESULTS)
        self._pinned = pinned.data_ptr()

    def _prepare(self, shape: layout.Shape) -> int:
        """Share the work out, provide the workspace; return the most sequences of a step."""
        blocks, rows = _int(), _int()
        self._call('capacity', ctypes.byref(blocks), ctypes.byref(rows))
        plan = layout.plan(shape, blocks.value)
        self._model.blocks = blocks.value
        self._model.parts_out, self._model.parts_down = plan.parts_out, plan.parts_down
        self._model.ranges = self._upload(plan.ranges.reshape(-1).view(np.uint8))
        self._provide_workspace()
        return rows.value

    def _provide_workspace(self) -> None:
        size = _long()
        self._call('workspace', ctypes.byref(size))
        workspace = torch.zeros(size.value, dtype=torch.uint8, device=self.device)
        self._model.workspace, self._model.workspace_bytes = workspace.data_ptr(), size.value
        self._kept.append(workspace)

    def admit(self, slot: int, row: NativeRow) -> None:
        """Put a sequence into a slot, after all steps launched so far."""
        self._call('admit', _int(slot), ctypes.byref(row), self._stream())

    def step(self, slots: Sequence[int], masks: Sequence[Tensor | None] = (), steps: int = 1,
             logits: Tensor | None = None) -> None:
        """
        Run tokens of some sequences.

        :param masks: bool [vocab] on the device or ``None``, for each of ``slots``; live until
            the step has run.
        :param steps: tokens in a row.
        :param logits: float32 [ROWS, vocab] that gets the logits by place in ``slots``; needed
            where a sequence samples with top_k or top_p, and then ``steps`` is 1.
        """
        launch = NativeLaunch(count=len(slots), steps=steps, results=self._pinned)
        launch.slot[:len(slots)] = slots
        for i, mask in enumerate(masks):
            if mask is not None:
                launch.mask[i] = self._address(mask, keep=False)
        if logits is not None:
            launch.logits = self._address(logits, keep=False)
        self._call('step', ctypes.byref(launch), self._stream())

    def _matrices(self, shape: layout.Shape, weights: Weights) -> list[NativeMatrix]:
        """Describe the matrices of all layers, then the output matrix."""
        named = [(op, layer[op]) for layer in weights.layers for op in layout.OPS[:4]]
        named.append(('head', weights.head))
        for op, matrix in named:
            self._check(shape, op, matrix)
        quantised = [(op, matrix) for op, matrix in named if matrix.scales is not None]
        laid = iter(together([self._scales(shape, op, matrix).cpu() for op, matrix in quantised],
                             self.device))
        return [NativeMatrix(self._address(matrix.weight),
                             self._address(None if matrix.scales is None else next(laid)))
                for _, matrix in named]

    @staticmethod
    def _check(shape: layout.Shape, op: str, matrix: Matrix) -> None:
        wanted = shape.head_form if op == 'head' else shape.form
        if matrix.form != wanted:
            raise KernelError(f'{op} has form {matrix.form}, the others {wanted}')
        size = {layout.FLOAT: 2, layout.INT4: 0.5}.get(wanted, 1)
        if matrix.weight.nbytes != shape.outputs(op) * int(shape.inputs(op) * size):
            raise KernelError(f'{op} has {matrix.weight.nbytes} bytes')

    def _scales(self, shape: layout.Shape, op: str, matrix: Matrix) -> Tensor:
        assert matrix.scales is not None
        rows = layout.tile_rows(shape, op)
        if matrix.zeros is None:
            return layout.channel_scales(matrix.scales, rows)
        return layout.group_scales(
            matrix.scales, matrix.zeros, rows, shape.inputs(op), self._model.group)

    @staticmethod
    def _common_group(shape: layout.Shape, weights: Weights) -> int:
        """Return the inputs a group that all matrices can be read in."""
        group = layout.GROUPS[-1]
        for layer in weights.layers:
            for op in layout.OPS[:4]:
                matrix = layer[op]
                if matrix.zeros is not None:
                    try:
                        group = min(group, layout.group_of(matrix.scales, shape.inputs(op)))
                    except ValueError as error:
                        raise KernelError(f'{op}: {error}') from error
        return group

    def _address(self, tensor: Tensor | None, keep: bool = True) -> int | None:
        if tensor is None:
            return None
        if tensor.device != self.device or not tensor.is_contiguous():
            raise KernelError(f'a tensor on {tensor.device}, contiguous '
                              f'{tensor.is_contiguous()}; the kernels are on {self.device}')
        if keep:
            if tensor.data_ptr() % 16:
                raise KernelError('a tensor does not lie at a multiple of 16 bytes')
            self._kept.append(tensor)
        return tensor.data_ptr()

    def _upload(self, data: np.ndarray) -> int | None:
        return self._address(torch.from_numpy(data.copy()).to(self.device))

    def _stream(self) -> ctypes.c_void_p:
        if self.device.type != 'cuda':
            return ctypes.c_void_p()
        return ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)

    def _call(self, name: str, *arguments: object) -> None:
        self._call_on(f'{self.prefix}_{name}', ctypes.byref(self._model), *arguments)

    def _call_on(self, name: str, *arguments: object) -> None:
        message = ctypes.create_string_buffer(_MESSAGE)
        with torch.cuda.device(self.device) if self.device.type == 'cuda' else nullcontext():
            code = getattr(self._library, name)(*arguments, message, ctypes.c_size_t(_MESSAGE))
        if code:
            raise KernelError(message.value.decode(errors='replace'), code)


class ChainKernels(DecodeKernels):
    """
    The same step as a chain of kernels, one a matrix, in a CUDA graph.

    Takes and gives what :class:`DecodeKernels` does, to the same semantics; which of the two is
    faster depends on the device and the weights.
    """

    prefix, form = 'qwen_vl_chain', 'a chain of kernels'
    _chain: ctypes.c_void_p | None = None

    def _prepare(self, shape: layout.Shape) -> int:
        self._provide_workspace()
        chain, rows = _pointer(), _int()
        self._call_on('qwen_vl_chain_create', ctypes.byref(self._model), ctypes.byref(chain),
                      ctypes.byref(rows))
        self._chain = chain
        return rows.value

    def _call(self, name: str, *arguments: object) -> None:
        # The library keeps what it made of the model; only the workspace's size comes before that.
        own = ctypes.byref(self._model) if self._chain is None else self._chain
        self._call_on(f'{self.prefix}_{name}', own, *arguments)

    def pace(self, clocks: int) -> None:
        """
        Choose how fast gate and up ask for weights while attention's projection still runs.

        :param clocks: of the device between two pieces; 0 asks for all at once. When no step is
            under way.
        """
        self._call('pace', ctypes.c_int32(clocks))

    def close(self) -> None:
        """Give the graphs back, after all steps."""
        chain, self._chain = self._chain, None
        if chain is not None:
            self._library.qwen_vl_chain_destroy(chain)

    def __del__(self) -> None:
        self.close()
