"""The single checks of ``qwen_vl doctor``; each looks at one thing and changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import qwen_vl_ros
from qwen_vl_ros.share import share

OK, WARN, FAIL = 'OK', 'WARN', 'FAIL'

#: A 1920x1080 rgb8 picture is 6.2 MB; a smaller segment or buffer loses best-effort pictures.
SEGMENT_BYTES = 32 << 20
SOCKET_BYTES = 4 << 20

#: Distribution, import name and whether nothing works without it.
PACKAGES = (
    ('numpy', 'numpy', True),
    ('opencv-python-headless', 'cv2', True),
    ('simplejpeg', 'simplejpeg', True),
    ('safetensors', 'safetensors', True),
    ('tokenizers', 'tokenizers', True),
    ('rosbags', 'rosbags', False),
)


@dataclass(frozen=True)
class Check:
    """
    What one check found.

    :param status: OK, WARN or FAIL.
    :param next_step: what to do about it; empty when nothing is to be done.
    """

    name: str
    status: str
    found: str
    next_step: str = ''


def run_checks(model: str | Path | None) -> list[Check]:
    """
    Run all checks, in the order in which a person would mend things.

    :param model: folder to check, or ``None`` when there is none.
    """
    checks: list[Callable[[], Check]] = [
        python, *[lambda p=p: package(*p) for p in PACKAGES], transformers, torch_build, gpu,
        jetson, ros, middleware, interfaces, fast_dds_profile, socket_buffers, shared_memory,
        memory, kernels, lambda: model_folder(model)]
    results = []
    for check in checks:
        try:
            results.append(check())
        except Exception as error:
            name = getattr(check, '__name__', 'check').strip('<>')
            results.append(Check(name, WARN, f'could not be checked: {error}'))
    return results


def python() -> Check:
    """Hold the interpreter against the supported range."""
    version = platform.python_version()
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Check('python', FAIL, version, 'use Python 3.10 to 3.13')
    return Check('python', OK, f'{version}, qwen_vl_ros {qwen_vl_ros.__version__}')


def package(distribution: str, module: str, needed: bool) -> Check:
    """Look for a Python package."""
    if importlib.util.find_spec(module) is None:
        return Check(distribution, FAIL if needed else WARN, 'not installed',
                     f'pip install {distribution}')
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # OpenCV comes under several distribution names.
        found = str(getattr(importlib.import_module(module), '__version__', 'version unknown'))
    return Check(distribution, OK, found)


def transformers() -> Check:
    """Hold transformers against the range that the engine knows."""
    from qwen_vl_ros.engine.config import check_transformers
    from qwen_vl_ros.engine.errors import CheckpointError

    if importlib.util.find_spec('transformers') is None:
        return Check('transformers', FAIL, 'not installed', 'pip install transformers')
    version = importlib.metadata.version('transformers')
    try:
        check_transformers()
    except CheckpointError as error:
        return Check('transformers', FAIL, version, error.message)
    return Check('transformers', OK, version)


def torch_build() -> Check:
    """Look for torch, and for a CPU build on a machine that has a GPU."""
    if importlib.util.find_spec('torch') is None:
        return Check('torch', FAIL, 'not installed',
                     'pip install torch, on a Jetson the wheel for its JetPack')
    import torch

    found = f'{torch.__version__}, {torch.get_num_threads()} CPU threads'
    if torch.version.cuda is None and has_nvidia_gpu():
        return Check('torch', FAIL, found + ', built without CUDA on a machine with a GPU',
                     'install the CUDA build of torch, on a Jetson the wheel for its JetPack')
    return Check('torch', OK, found)


def has_nvidia_gpu() -> bool:
    """Say whether the kernel drives an NVIDIA GPU (discrete, or the Tegra's own)."""
    return any(Path(p).exists() for p in ('/dev/nvidia0', '/dev/nvhost-gpu', '/dev/nvgpu'))


def gpu() -> Check:
    """Name the GPU, its architecture and free memory."""
    import torch

    if not torch.cuda.is_available():
        if has_nvidia_gpu():
            return Check('gpu', FAIL, 'there is one, but torch cannot use it',
                         "see what python -c 'import torch; torch.cuda.init()' says")
        return Check('gpu', WARN, 'none; the model runs on the CPU',
                     'a 2B model answers in seconds on a GPU and in minutes here')
    major, minor = torch.cuda.get_device_capability(0)
    free, total = torch.cuda.mem_get_info(0)
    found = (f'{torch.cuda.get_device_name(0)}, sm_{major}{minor}, '
             f'{free / 2**30:.1f} of {total / 2**30:.1f} GiB free')
    if (major, minor) < (8, 0):
        return Check('gpu', WARN, found, 'bfloat16 needs sm_80 or later; use --dtype float16')
    return Check('gpu', OK, found)


def jetson() -> Check:
    """Name the Jetson module, its L4T release and clocks."""
    release = Path('/etc/nv_tegra_release')
    if not release.exists():
        return Check('jetson', OK, f'not a Jetson ({platform.machine()})')
    model = Path('/proc/device-tree/model')
    name = model.read_text(errors='replace').strip('\0\n ') if model.exists() else 'Jetson'
    first = release.read_text(errors='replace').splitlines()[0].lstrip('# ')
    rate = Path('/sys/class/devfreq/17000000.gpu')
    if rate.exists():
        low = int((rate / 'min_freq').read_text())
        high = int((rate / 'max_freq').read_text())
        if low < high:
            return Check('jetson', WARN, f'{name}, {first}; the GPU clock is not fixed',
                         'for measurements: sudo nvpmodel -m 0 && sudo jetson_clocks')
    return Check('jetson', OK, f'{name}, {first}')


def ros() -> Check:
    """Look for rclpy."""
    distro = os.environ.get('ROS_DISTRO', '')
    if importlib.util.find_spec('rclpy') is None:
        return Check('ros', WARN, 'rclpy is not importable; replay and ask work without it',
                     "source /opt/ros/$ROS_DISTRO/setup.bash, or 'make venv' in the source tree")
    if distro and distro not in ('humble', 'jazzy'):
        return Check('ros', WARN, distro, 'tested with humble and jazzy')
    return Check('ros', OK, distro or 'rclpy without ROS_DISTRO (wheels)')


def middleware() -> Check:
    """Name the middleware that ROS would take."""
    if importlib.util.find_spec('rclpy') is None:
        return Check('rmw', WARN, 'no ROS, no middleware')
    chosen = os.environ.get('RMW_IMPLEMENTATION', '')
    if chosen not in ('', 'rmw_fastrtps_cpp', 'rmw_fastrtps_dynamic_cpp'):
        return Check('rmw', WARN, chosen,
                     'the profile below is for Fast DDS only; see to large messages yourself')
    return Check('rmw', OK, chosen or 'default (rmw_fastrtps_cpp)')


def interfaces() -> Check:
    """Look for the message package."""
    if importlib.util.find_spec('qwen_vl_msgs') is not None:
        return Check('qwen_vl_msgs', OK, 'built')
    return Check('qwen_vl_msgs', WARN, 'not built or not sourced; the node cannot start',
                 "'colcon build' and source install/setup.bash, or 'make venv'")


def fast_dds_profile() -> Check:
    """See whether a profile for large messages is set and would do."""
    name = 'fast dds profile'
    where = share('config', 'fastdds.xml')
    step = f'export FASTRTPS_DEFAULT_PROFILES_FILE={where} for the camera driver (the node has it)'
    transports = os.environ.get('FASTDDS_BUILTIN_TRANSPORTS', '')
    if 'LARGE_DATA' in transports and 'max_msg_size' in transports:
        return Check(name, OK, f'FASTDDS_BUILTIN_TRANSPORTS={transports}')
    for variable in ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE'):
        path = os.environ.get(variable)
        if not path:
            continue
        try:
            root = ET.parse(path).getroot()
        except (OSError, ET.ParseError) as error:
            return Check(name, FAIL, f'{variable}={path}: {error}', step)
        sizes = [int(e.text or 0) for e in root.iter() if e.tag.endswith('segment_size')]
        if max(sizes, default=0) < SEGMENT_BYTES:
            found = f'{path} sets no shared memory segment of {SEGMENT_BYTES >> 20} MiB'
            return Check(name, WARN, found, step)
        return Check(name, OK, path)
    return Check(name, WARN,
                 'not set; a best-effort camera driver loses two of three raw pictures',
                 step)


def socket_buffers() -> Check:
    """Hold the kernel's limit of receive buffers against what pictures over UDP need."""
    path = Path('/proc/sys/net/core/rmem_max')
    if not path.exists():
        return Check('kernel buffers', OK, 'net.core.rmem_max cannot be read here')
    value = int(path.read_text())
    if value < SOCKET_BYTES:
        return Check('kernel buffers', WARN,
                     f'net.core.rmem_max is {value}; cameras on other machines lose pictures',
                     f'sudo sysctl -w net.core.rmem_max={8 << 20}')
    return Check('kernel buffers', OK, f'net.core.rmem_max is {value}')


def shared_memory() -> Check:
    """See whether /dev/shm has room for the profile's segments."""
    path = Path('/dev/shm')
    if not path.exists():
        return Check('shared memory', WARN, '/dev/shm is missing; pictures go over UDP')
    stat = os.statvfs(path)
    free = stat.f_bavail * stat.f_frsize
    if free < 4 * SEGMENT_BYTES:
        return Check('shared memory', WARN, f'/dev/shm has {free >> 20} MiB free',
                     'in a container: docker run --shm-size=1g (or --ipc=host)')
    return Check('shared memory', OK, f'/dev/shm has {free >> 20} MiB free')


def available_bytes() -> int | None:
    """Return MemAvailable, or ``None`` where the kernel does not say."""
    try:
        lines = Path('/proc/meminfo').read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines
                 if line.startswith('MemAvailable')), None)


def memory() -> Check:
    """Hold free memory against what a 2B model takes."""
    free = available_bytes()
    if free is None:
        return Check('memory', OK, 'MemAvailable cannot be read here')
    found = f'{free / 2**30:.1f} GiB available'
    if free < 6 << 30:
        return Check('memory', WARN, found, 'Qwen2-VL-2B in bfloat16 takes about 6 GiB')
    return Check('memory', OK, found)


def kernels() -> Check:
    """See whether the native kernels are built, and what makes the patches."""
    from qwen_vl_ros.kernels.loader import built
    from qwen_vl_ros.kernels.patches import default_patcher

    libraries = built()
    patcher = default_patcher() if 'libqwen_vl_cpu.so' in libraries else None
    if patcher is not None:
        return Check('kernels', OK, f'{", ".join(libraries)}; patches: {patcher.isa}, '
                                    f'{patcher.threads} thread(s), bytes of {patcher.resampler}')
    step = "'make kernels'" if (Path(qwen_vl_ros.__file__).parents[1] / 'kernels').is_dir() else (
        'install the package again with cmake and g++ on the machine')
    return Check('kernels', WARN, 'not built; Pillow makes the patches, the same but slower', step)


def model_folder(model: str | Path | None) -> Check:
    """Read a model's config and hold its size against the memory."""
    from qwen_vl_ros.engine.config import load_config
    from qwen_vl_ros.engine.errors import CheckpointError

    if model is None:
        return Check('model', FAIL, 'none', 'name a Qwen2-VL folder with --model PATH')
    folder = Path(model).expanduser()
    step = "download 'Qwen/Qwen2-VL-2B-Instruct' once and name its folder with --model"
    if not folder.is_dir():
        return Check('model', FAIL, f'{folder} is no folder', step)
    try:
        config = load_config(folder)
    except CheckpointError as error:
        return Check('model', FAIL, error.message, step)
    files = sorted(folder.glob('*.safetensors'))
    if not files:
        return Check('model', FAIL, f'{folder} holds no .safetensors file', step)
    size = sum(f.stat().st_size for f in files)
    found = (f'{folder.name}, {len(files)} file(s), {size / 2**20:.0f} MiB, '
             f'{config.vision.depth} + {config.language.layers} layers')
    free = available_bytes()
    if free is not None and size * 1.3 > free:
        return Check('model', FAIL, f'{found}; {free >> 20} MiB are available',
                     'close other programs, or take a smaller or quantised model')
    return Check('model', OK, found)
