"""
The encoder as a TensorRT engine, behind the same calls as the fused one.

One module serves TensorRT 10 and 11 (``tensorrt``, as JetPack brings it) and TensorRT-RTX
(``tensorrt_rtx``, from PyPI): both build from :mod:`tensorrt_network`. Where neither is installed,
the GPU is not one of theirs, or building fails, one line in the log says so and the encoder stays
as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.engine.errors import one_line
from qwen_vl_ros.engine.tensorrt_network import (
    INPUTS,
    NETWORK_VERSION,
    OUTPUT,
    Builder,
    Profile,
    add_encoder,
    calibrate,
    calibration_pictures,
    fault,
)
from qwen_vl_ros.engine.tensorrt_store import Key, Store, cache_folder
from qwen_vl_ros.engine.vision import patch_positions, rotary_tables

if TYPE_CHECKING:
    from qwen_vl_ros.engine.vision import VisionEncoder

LOG = logging.getLogger('qwen_vl_ros.engine')

PRECISIONS = ('fp16', 'int8')

#: Modules by which TensorRT goes, in the order in which they are tried.
MODULES = ('tensorrt', 'tensorrt_rtx')

#: Bytes of scratch memory that a build may use.
WORKSPACE = 2 << 30

#: Largest relative error of merged tokens against plain torch that an engine may have.
MOST_ERROR = {'fp16': 0.02, 'int8': 0.15}


class TensorRtError(RuntimeError):
    """TensorRT is missing, or cannot serve this encoder here; one sentence."""


def find_tensorrt() -> Any:
    """
    Return the TensorRT module that is installed.

    :raises TensorRtError: names what to install.
    """
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError):
            continue
    raise TensorRtError('neither tensorrt nor tensorrt_rtx can be imported; JetPack brings the '
                        'first, requirements-tensorrt.txt the second')


def choose_engine(encoder: VisionEncoder, name: str, most_pixels: int,
                  precision: str = 'fp16') -> str:
    """
    Let an encoder run in one of :data:`~qwen_vl_ros.engine.options.ENGINES`.

    :param most_pixels: of a resized picture, for which the engine is built.
    :param precision: one of :data:`PRECISIONS`, for tensorrt.
    :return: what it runs in; 'native' may mean plain torch where there are no kernels.
    """
    if name == 'torch':
        encoder.fused = None
    if name != 'tensorrt':
        return name
    most = max(4, most_pixels // 196 // 4 * 4)
    try:
        engine: Any = TensorRtEncoder(encoder, Profile(4, min(1564, most), most), precision)
    except (TensorRtError, RuntimeError, MemoryError) as error:
        # Out of memory while it is built or tried is no reason to have no engine at all.
        LOG.warning('vision.engine tensorrt is not used: %s', one_line(error))
        return 'native'
    encoder.fused = engine
    return name


def build(trt: Any, encoder: VisionEncoder, profile: Profile, precision: str = 'fp16',
          capability: str = '', timings: bytes = b'') -> tuple[bytes, bytes]:
    """
    Build an engine; needs no GPU where the library can build for one that is not there.

    :param capability: such as 'SM86', for TensorRT-RTX; '' is the GPU that is there.
    :param timings: of an earlier build.
    :return: the serialised engine and the timings, empty for TensorRT-RTX.
    :raises TensorRtError: with what the library said.
    """
    said = _Said(trt)
    builder = trt.Builder(said.logger)
    flag = getattr(trt.NetworkDefinitionCreationFlag, 'STRONGLY_TYPED', None)
    network = builder.create_network(0 if flag is None else 1 << int(flag))
    scales = None
    if precision == 'int8':
        scales = calibrate(encoder, calibration_pictures())
    parts = Builder(trt, network, scales)
    add_encoder(parts, encoder)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE)
    timed = trt.__name__ == 'tensorrt'  # TensorRT-RTX chooses when it compiles, at run time
    if timed:
        config.set_timing_cache(config.create_timing_cache(timings), False)
    shapes = builder.create_optimization_profile()
    for name, width in zip(INPUTS, (encoder.config.width, *[encoder.config.head_dim] * 2)):
        shapes.set_shape(name, (profile.least, width), (profile.usual, width),
                         (profile.most, width))
    config.add_optimization_profile(shapes)
    if capability:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise TensorRtError(f'the engine could not be built: {said.last()}')
    return bytes(plan), bytes(config.get_timing_cache().serialize()) if timed else b''


def model_digest(encoder: VisionEncoder) -> str:
    """Return the sha256 of an encoder's shape and of all weights that are built in."""
    digest = hashlib.sha256(repr((encoder.config, encoder.dtype)).encode())
    linears = [encoder.merge_fc1, encoder.merge_fc2]
    tensors: list[Tensor | None] = [*encoder.merge_norm]
    for block in encoder.blocks:
        linears += [block.qkv, block.proj, block.fc1, block.fc2]
        tensors += [*block.norm1, *block.norm2]
    tensors += [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
    for tensor in tensors:
        if tensor is None:
            continue
        digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


class TensorRtEncoder:
    """
    Blocks and merger of an encoder in a TensorRT engine, slice by slice.

    :param encoder: on a GPU; its weights stay, for what does not fit the profile.
    :param profile: patches of a slice.
    :param precision: one of :data:`PRECISIONS`; int8 is approximate.
    :param store: of engines; ``None`` is the user's cache.
    :raises TensorRtError: when it cannot serve here.
    """

    def __init__(self, encoder: VisionEncoder, profile: Profile, precision: str = 'fp16',
                 store: Store | None = None) -> None:
        trt = find_tensorrt()
        self.encoder = encoder
        self.profile = profile
        self.precision = precision
        self._trt = trt
        self._said = _Said(trt)
        self._lock = threading.Lock()
        self._last: torch.cuda.Event | None = None
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        reason = fault(encoder) or self._unsupported()
        if reason:
            raise TensorRtError(reason)
        self.key = Key(
            f'{trt.__name__} {trt.__version__}', self._gpu(), model_digest(encoder), precision,
            (profile.least, profile.usual, profile.most), NETWORK_VERSION)
        self._runtime = trt.Runtime(self._said.logger)
        self._engine = self._load(store or Store(cache_folder()))
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise TensorRtError(f'no memory for the engine: {self._said.last()}')
        self.error = self._check()

    def fits(self, grid: tuple[int, int, int]) -> bool:
        """Say whether a grid's slices lie within the profile."""
        return grid[1] * grid[2] <= self.profile.most

    def run(self, x: Tensor, grid: tuple[int, int, int], units: Tensor | None) -> Tensor:
        """
        Run blocks and merger; as :meth:`CudaEncoder.run`.

        :param x: embeddings of the kept units [4 * kept, width], in the order of ``units``.
        :param units: int64 [kept], ascending; ``None`` keeps all.
        :return: [kept, out_width].
        """
        t, h, w = grid
        area = h * w // 4
        cos, sin = self._rotation(h, w)
        if units is None:
            counts = [area] * t
            spots = None
        else:
            host = units.cpu().numpy()
            counts = [int(n) for n in np.bincount(host // area, minlength=t)]
            spots = torch.from_numpy(host % area).to(x.device)
        out = torch.empty(sum(counts), self.encoder.config.out_width, dtype=torch.float16,
                          device=x.device)
        half = x.half()
        with self._lock:
            stream = torch.cuda.current_stream(x.device)
            if self._last is not None:
                stream.wait_event(self._last)
            begin = 0
            for count in filter(None, counts):
                rows = slice(4 * begin, 4 * (begin + count))
                own = (cos, sin) if spots is None else tuple(
                    table.view(area, 4, -1)[spots[begin:begin + count]].flatten(0, 1)
                    for table in (cos, sin))
                self._execute(half[rows], own[0], own[1], out[begin:begin + count], stream)
                begin += count
            self._last = torch.cuda.Event()
            self._last.record(stream)
        return out.to(self.encoder.dtype)

    def release(self) -> None:
        """Give back what can be made again without waiting."""
        self._tables.clear()

    def _rotation(self, h: int, w: int) -> tuple[Tensor, Tensor]:
        if (h, w) not in self._tables:
            if len(self._tables) >= 16:
                self._tables.clear()
            cfg = self.encoder.config
            cos, sin = rotary_tables(
                patch_positions(h, w).to(self.encoder.device), cfg.head_dim, cfg.theta)
            self._tables[h, w] = cos.contiguous(), sin.contiguous()
        return self._tables[h, w]

    def _execute(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, stream: Any) -> None:
        context = self._context
        tensors = [x.contiguous(), cos.contiguous(), sin.contiguous()]
        for name, tensor in zip(INPUTS, tensors):
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise TensorRtError(f'{name} {list(tensor.shape)} was refused')
            context.set_tensor_address(name, tensor.data_ptr())
            tensor.record_stream(stream)
        context.set_tensor_address(OUTPUT, out.data_ptr())
        if not context.execute_async_v3(stream.cuda_stream):
            raise TensorRtError(f'the engine failed: {self._said.last()}')

    def _unsupported(self) -> str:
        if self.encoder.device.type != 'cuda':
            return 'it runs on a GPU only'
        major, minor = torch.cuda.get_device_capability(self.encoder.device)
        kinds = getattr(self._trt, 'ComputeCapability', None)
        if self._trt.__name__ == 'tensorrt_rtx' and not hasattr(kinds, f'SM{major}{minor}'):
            return f'TensorRT-RTX does not run on sm_{major}{minor}'
        return ''

    def _gpu(self) -> str:
        found = torch.cuda.get_device_properties(self.encoder.device)
        return f'{found.name} sm_{found.major}{found.minor} CUDA {torch.version.cuda}'

    def _load(self, store: Store) -> Any:
        """Return the engine of this key: from the store, or built and stored."""
        plan = store.read(self.key)
        engine = self._runtime.deserialize_cuda_engine(plan) if plan is not None else None
        if engine is not None:
            return engine
        started = time.monotonic()
        timings = Store(store.folder, 'timings')
        plan, times = build(self._trt, self.encoder, self.profile, self.precision,
                            timings=timings.read(self.key) or b'')
        store.write(self.key, plan)
        if times:
            timings.write(self.key, times)
        LOG.info('TensorRT engine %s built in %.0f s', store.path(self.key).name,
                 time.monotonic() - started)
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise TensorRtError(f'the engine cannot be loaded: {self._said.last()}')
        return engine

    @torch.inference_mode()
    def _check(self) -> float:
        """
        Return the relative error against plain torch on a small picture.

        :raises TensorRtError: when it is larger than :data:`MOST_ERROR`.
        """
        patches, grid = calibration_pictures()[3]
        if not self.fits(grid):
            return float('nan')
        x = self.encoder.embed(patches.to(self.encoder.device))
        expected = self.encoder.encode_plain(x, grid).float()
        got = self.run(x, grid, None).float()
        error = float((got - expected).norm() / expected.norm())
        if not error <= MOST_ERROR[self.precision]:
            raise TensorRtError(
                f'its merged tokens in {self.precision} differ by {error:.1%} from torch\'s, at '
                f'most {MOST_ERROR[self.precision]:.0%} are allowed')
        return error


class _Said:
    """A logger that keeps the last error for the message of an exception."""

    def __init__(self, trt: Any) -> None:
        said: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, text: str) -> None:
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    said[:] = [text]
                    LOG.debug('TensorRT: %s', text)

        self.logger = Logger()
        self._said = said

    def last(self) -> str:
        """Return the last error, on one line."""
        return ' '.join(self._said[-1].split()) if self._said else 'no reason was given'
