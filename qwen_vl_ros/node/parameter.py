"""One parameter of the node: how it is described, checked and shown to ROS tools."""

from __future__ import annotations

import math
from dataclasses import Field, field
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    ParameterType,
)

#: When a changed value counts: from the next question on, at the next activation (so the node must
#: not be active), or at the next configuration (so it must be unconfigured).
LIVE, ACTIVATE, CONFIGURE = 'live', 'activate', 'configure'

ROS_TYPES = {
    bool: ParameterType.PARAMETER_BOOL,
    int: ParameterType.PARAMETER_INTEGER,
    float: ParameterType.PARAMETER_DOUBLE,
    str: ParameterType.PARAMETER_STRING,
    tuple: ParameterType.PARAMETER_STRING_ARRAY,
}


def parameter(name: str, default: Any, when: str, text: str, *, low: float | None = None,
              high: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Describe a parameter; ``when`` a change counts, ``text``: one or two sentences."""
    return field(default=default, metadata={
        'name': name, 'when': when, 'text': text, 'low': low, 'high': high, 'choices': choices})


def checked(spec: Field[Any], value: Any) -> Any:
    """Return the value in the field's own type; a whole number passes for a float."""
    meta = spec.metadata
    kind: type = type(spec.default)
    name = meta['name']
    if kind is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise ValueError(f'{name} must be a list of texts, got {value!r}')
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f'{name} must be {_kind_name(kind)}, got {value!r}')
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'{name} must be finite, got {value}')
    if meta['low'] is not None and not meta['low'] <= value <= meta['high']:
        raise ValueError(f"{name} must be from {meta['low']} to {meta['high']}, got {value}")
    if meta['choices'] and value not in meta['choices']:
        raise ValueError(f"{name} must be one of {', '.join(meta['choices'])}, got '{value}'")
    return value


def _kind_name(kind: type) -> str:
    return {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'text'}[kind]


def descriptor(spec: Field[Any]) -> ParameterDescriptor:
    """Return what ROS tools show of a parameter."""
    meta, kind = spec.metadata, type(spec.default)
    words = [{LIVE: 'Can be changed at any time.',
              ACTIVATE: 'Can be changed while the node is not active.',
              CONFIGURE: 'Can be changed while the node is unconfigured.'}[meta['when']]]
    if meta['choices']:
        words.append(f"One of {', '.join(meta['choices'])}.")
    result = ParameterDescriptor(
        name=meta['name'], type=ROS_TYPES[kind], description=meta['text'],
        additional_constraints=' '.join(words),
        # A whole number in a YAML file is good enough for a float, which static typing refuses.
        dynamic_typing=kind is float)
    if meta['low'] is not None and kind is int:
        result.integer_range = [
            IntegerRange(from_value=meta['low'], to_value=meta['high'], step=1)]
    elif meta['low'] is not None:
        result.floating_point_range = [
            FloatingPointRange(from_value=meta['low'], to_value=meta['high'], step=0.0)]
    return result
