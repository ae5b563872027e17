"""What NVML says about NVLink: state, version, width, speed, errors. Nothing is ever set."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

#: Said wherever links are shown.
NOT_SETTABLE = (
    'a link\'s retry policy and clock cannot be set: NVML and nvidia-smi have counters of retries '
    'and replays, and no option for either',
    'an Orin has no NVLink and no PCIe between CPU and GPU: both share one memory')

#: Error counters by NVML's name, and what a report calls them.
ERRORS = {'NVML_NVLINK_ERROR_DL_REPLAY': 'replay', 'NVML_NVLINK_ERROR_DL_RECOVERY': 'recovery',
          'NVML_NVLINK_ERROR_DL_CRC_FLIT': 'crc_flit', 'NVML_NVLINK_ERROR_DL_CRC_DATA': 'crc_data',
          'NVML_NVLINK_ERROR_DL_ECC_DATA': 'ecc_data'}

CAPABILITIES = {'NVML_NVLINK_CAP_P2P_SUPPORTED': 'p2p', 'NVML_NVLINK_CAP_SYSMEM_ACCESS': 'sysmem',
                'NVML_NVLINK_CAP_P2P_ATOMICS': 'p2p_atomics', 'NVML_NVLINK_CAP_VALID': 'valid'}

#: Links that a card can have, where NVML does not tell.
MOST_LINKS = 18


@dataclass(frozen=True)
class Link:
    """
    One link of one card; ``None`` is unknown.

    :param active: whether it is up.
    :param version: of NVLink.
    :param mb_s: line rate, 1e6 bytes/s.
    :param remote: PCI address of the other end.
    :param errors: counters since the driver was loaded; one that cannot be read is left out.
    """

    card: int
    number: int
    active: bool | None
    version: int | None = None
    mb_s: float | None = None
    remote: str | None = None
    capabilities: dict[str, bool] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)


def links(nvml: Any) -> list[Link]:
    """
    Return every link of every card.

    :param nvml: pynvml, initialised, or what stands in for it.
    """
    found = []
    for card in range(_ask(nvml, 'nvmlDeviceGetCount') or 0):
        handle = _ask(nvml, 'nvmlDeviceGetHandleByIndex', card)
        if handle is None:
            continue
        count = _field(nvml, handle, 'NVML_FI_DEV_NVLINK_LINK_COUNT')
        speed = _field(nvml, handle, 'NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON')
        for number in range(MOST_LINKS if count is None else int(count)):
            state = _ask(nvml, 'nvmlDeviceGetNvLinkState', handle, number)
            if state is None and count is None:
                break
            found.append(_link(nvml, handle, card, number, state, speed))
    return found


def _link(nvml: Any, handle: Any, card: int, number: int, state: int | None,
          speed: float | None) -> Link:
    remote = getattr(
        _ask(nvml, 'nvmlDeviceGetNvLinkRemotePciInfo', handle, number), 'busId', None)
    if isinstance(remote, bytes):
        remote = remote.decode('ascii', 'replace')
    capabilities, errors = {}, {}
    for constant, name in CAPABILITIES.items():
        code = getattr(nvml, constant, None)
        value = None if code is None else _ask(
            nvml, 'nvmlDeviceGetNvLinkCapability', handle, number, code)
        if value is not None:
            capabilities[name] = bool(value)
    for constant, name in ERRORS.items():
        code = getattr(nvml, constant, None)
        value = None if code is None else _ask(
            nvml, 'nvmlDeviceGetNvLinkErrorCounter', handle, number, code)
        if value is not None:
            errors[name] = int(value)
    return Link(card, number, None if state is None else bool(state),
                _ask(nvml, 'nvmlDeviceGetNvLinkVersion', handle, number), speed, remote,
                capabilities, errors)


def _field(nvml: Any, handle: Any, constant: str) -> float | None:
    """Return a field value by the name of its constant, whatever its type."""
    code = getattr(nvml, constant, None)
    if code is None:
        return None
    values = _ask(nvml, 'nvmlDeviceGetFieldValues', handle, [code])
    if not values or getattr(values[0], 'nvmlReturn', 1) != 0:
        return None
    value = values[0].value
    kinds = {0: 'dVal', 1: 'uiVal', 2: 'ulVal', 3: 'ullVal', 4: 'sllVal', 5: 'siVal', 6: 'usVal'}
    name = kinds.get(values[0].valueType)
    return None if name is None else float(getattr(value, name))


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """Return what NVML says, ``None`` for whatever it refuses or does not have."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:
        return None


def widths(found: list[Link]) -> list[dict[str, Any]]:
    """
    Return how many links are up between a card and each other end.

    NVML does not tell the lanes of a link. The width is ``None`` where the state of one of the
    links is unknown, or where they lead.
    """
    pairs: dict[tuple[int, str | None], list[Link]] = {}
    for link in found:
        pairs.setdefault((link.card, link.remote), []).append(link)
    return [{'card': card, 'remote': remote,
             'width': None if remote is None or any(link.active is None for link in own)
             else sum(bool(link.active) for link in own)}
            for (card, remote), own in pairs.items()]


def summary(found: list[Link]) -> dict[str, Any]:
    """Return the links with their sums, JSON-ready."""
    active = [link for link in found if link.active]
    rates = [link.mb_s for link in active if link.mb_s is not None]
    errors: dict[str, int] = {}
    for link in found:
        for name, count in link.errors.items():
            errors[name] = errors.get(name, 0) + count
    return {'links': [asdict(link) for link in found], 'pairs': widths(found),
            'active': len(active), 'gb_s': sum(rates) / 1e3 if rates else None, 'errors': errors,
            'notes': list(NOT_SETTABLE)}
