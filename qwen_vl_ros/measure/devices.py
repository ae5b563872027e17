"""What devices can do on paper: bandwidth and dense FP16 arithmetic in each power mode."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Dense FP16/BF16 FLOPs of one Ampere SM in one clock: 4 tensor cores x 256 multiply-adds.
AMPERE_FLOPS_PER_CLOCK = 2048

#: A kernel inside a CUDA graph, microseconds (Hazy Research on an H100; MegaQwen measured 0.83).
#: Of Orin no figure is published.
GRAPH_KERNEL_US = 1.3


@dataclass(frozen=True)
class Mode:
    """
    A device in one power mode, its clocks at their cap.

    :param sms: streaming multiprocessors that are on; 0 where that is not the unit.
    :param mhz: of the GPU, at most.
    :param gb_s: memory bandwidth, 1e9 bytes/s.
    :param tflops: dense FP16 with FP32 accumulation, 1e12/s.
    """

    gb_s: float
    tflops: float
    sms: int = 0
    mhz: float = 0.0


@dataclass(frozen=True)
class Device:
    """
    A device.

    :param title: for people.
    :param default: the mode taken where none is named.
    :param launch_us: time that a kernel takes however little it does.
    :param orin: its kernels' efficiency can be taken from published Orin figures.
    :param source: where the numbers come from.
    """

    title: str
    default: str
    modes: dict[str, Mode] = field(hash=False)
    launch_us: float = GRAPH_KERNEL_US
    orin: bool = False
    source: str = ''

    @property
    def full_mhz(self) -> float:
        """Return the highest GPU clock of all modes."""
        return max(mode.mhz for mode in self.modes.values())


def _orin(gb_s: float, sms: int, mhz: float) -> Mode:
    return Mode(gb_s, sms * mhz * 1e6 * AMPERE_FLOPS_PER_CLOCK / 1e12, sms, mhz)


#: LPDDR5 at 3200 and 2133 MHz on 256 and 128 bits.
FULL, SLOW, HALF, HALF_SLOW = 204.8, 136.5, 102.4, 68.3

NVPMODEL = "NVIDIA's nvpmodel configuration of the module (SMs, GPU and EMC caps); data sheet"

DEVICES: dict[str, Device] = {
    'orin-agx-64': Device('Jetson AGX Orin 64 GB', 'maxn', {
        '15w': _orin(SLOW, 6, 408), '30w': _orin(FULL, 8, 612), '50w': _orin(FULL, 16, 816),
        'maxn': _orin(FULL, 16, 1300)}, orin=True, source=NVPMODEL),
    'orin-agx-32': Device('Jetson AGX Orin 32 GB', 'maxn', {
        '15w': _orin(SLOW, 6, 408), '30w': _orin(FULL, 8, 612), '40w': _orin(FULL, 14, 816),
        'maxn': _orin(FULL, 14, 930.75)}, orin=True, source=NVPMODEL),
    'orin-nx-16': Device('Jetson Orin NX 16 GB', 'maxn-super', {
        '10w': _orin(HALF_SLOW, 4, 612), '15w': _orin(HALF, 4, 612), '25w': _orin(HALF, 8, 408),
        'maxn': _orin(HALF, 8, 918), 'maxn-super': _orin(HALF, 8, 1173)},
        orin=True, source=NVPMODEL),
    'orin-nano-8': Device('Jetson Orin Nano 8 GB', 'maxn-super', {
        # Memory at 2133 MHz until it is flashed for the super modes, which begin with 25w.
        '7w': _orin(HALF_SLOW, 8, 408), '15w': _orin(HALF_SLOW, 8, 612),
        '25w': _orin(HALF, 8, 918),
        'maxn-super': _orin(HALF, 8, 1020)}, orin=True, source=NVPMODEL),
    'thor-t5000': Device('Jetson T5000 (Thor)', 'maxn', {'maxn': Mode(273.0, 258.0, 20, 1575)},
                         source='data sheet; dense FP16 is a quarter of the dense FP4 figure'),
    'h200': Device('NVIDIA H200 SXM', 'full', {'full': Mode(4800.0, 989.0, 132, 1980)},
                   source='data sheet'),
    'a100-80': Device('NVIDIA A100 80 GB SXM', 'full', {'full': Mode(2039.0, 312.0, 108, 1410)},
                      source='data sheet'),
}

#: Memory bandwidth of modules by words of the name that the board gives itself, 1e9 bytes/s (data
#: sheets). An Orin Nano has its memory at 2133 MHz, unless it was flashed for the super modes of
#: JetPack 6.2, which its name says then. Xavier has LPDDR4x.
MODULES_GB_S: dict[tuple[str, ...], float] = {
    ('AGX Orin',): FULL, ('Orin NX',): HALF, ('Orin Nano', 'Super'): HALF,
    ('Orin Nano',): HALF_SLOW, ('Thor',): DEVICES['thor-t5000'].modes['maxn'].gb_s,
    ('AGX Xavier',): 136.5, ('Xavier NX',): 59.7}


def find_device(name: str, mode: str | None) -> tuple[Device, str, Mode]:
    """
    Return a device of the table, the name of its mode and the mode.

    :raises ValueError: names the choices.
    """
    if name not in DEVICES:
        raise ValueError(f"device '{name}' is not one of {', '.join(DEVICES)}, this")
    device = DEVICES[name]
    mode = (mode or device.default).lower()
    if mode not in device.modes:
        raise ValueError(f"mode '{mode}' is not one of {', '.join(device.modes)} "
                         f'({device.title})')
    return device, mode, device.modes[mode]
