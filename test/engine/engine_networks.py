"""Runs a TensorRT network layer by layer in torch: what it says, without a GPU to build it for."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

#: Layer kinds by name, with the class that shows their fields.
CLASSES = {
    'ACTIVATION': 'IActivationLayer', 'CAST': 'ICastLayer', 'CONSTANT': 'IConstantLayer',
    'DEQUANTIZE': 'IDequantizeLayer', 'ELEMENTWISE': 'IElementWiseLayer', 'GATHER': 'IGatherLayer',
    'MATRIX_MULTIPLY': 'IMatrixMultiplyLayer', 'NORMALIZATION': 'INormalizationLayer',
    'QUANTIZE': 'IQuantizeLayer', 'SHUFFLE': 'IShuffleLayer', 'SOFTMAX': 'ISoftMaxLayer'}

TYPES = {'FLOAT': torch.float32, 'HALF': torch.float16, 'INT8': torch.int8,
         'INT32': torch.int32}


def walk(trt, network, inputs, rounded=True):
    """
    Return the network's output.

    :param inputs: by name.
    :param rounded: keep each tensor's own type between layers; otherwise floats stay float64.
    """
    values = {}
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        assert tensor.dtype.name == str(inputs[tensor.name].dtype).split('.')[1].replace(
            'float16', 'HALF').replace('float32', 'FLOAT')
        values[tensor.name] = inputs[tensor.name].double()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        kind = layer.type.name
        layer.__class__ = getattr(trt, CLASSES[kind])
        given = [values[layer.get_input(j).name] for j in range(layer.num_inputs)]
        out = layer.get_output(0)
        found = compute(trt, layer, kind, *given)
        if rounded or out.dtype.name not in ('HALF', 'FLOAT'):
            found = found.to(TYPES[out.dtype.name]).double()
        assert len(out.shape) == found.dim()
        assert all(a in (-1, b) for a, b in zip(out.shape, found.shape)), (layer.name, out.shape)
        values[out.name] = found
    return values[network.get_output(0).name]


def compute(trt, layer, kind, *given):
    """Return what one layer gives, in float64."""
    if kind == 'CONSTANT':
        weights = np.asarray(layer.weights)
        return torch.from_numpy(weights.reshape(tuple(layer.shape)).copy()).double()
    if kind == 'ACTIVATION':
        name = layer.activation_type if hasattr(layer, 'activation_type') else layer.type
        return {'SIGMOID': torch.sigmoid, 'GELU_ERF': F.gelu}[name.name](given[0])
    if kind == 'CAST':
        return given[0]
    if kind == 'ELEMENTWISE':
        assert given[0].dim() == given[1].dim()
        return {'SUM': torch.add, 'PROD': torch.mul}[layer.op.name](*given)
    if kind == 'GATHER':
        return given[0].index_select(layer.axis, given[1].long())
    if kind == 'MATRIX_MULTIPLY':
        a, b = (x.transpose(-1, -2) if op == trt.MatrixOperation.TRANSPOSE else x
                for x, op in zip(given, (layer.op0, layer.op1)))
        return a @ b
    if kind == 'NORMALIZATION':
        assert layer.axes == 2
        return F.layer_norm(given[0], given[0].shape[1:], None, None, layer.epsilon) * (
            given[1]) + given[2]
    if kind == 'SHUFFLE':
        x = given[0].permute(*list(layer.first_transpose)[:given[0].dim()])
        # 0 would keep a dimension; it is not used here.
        x = x.reshape(tuple(layer.reshape_dims))
        return x.permute(*list(layer.second_transpose)[:x.dim()])
    if kind == 'SOFTMAX':
        return given[0].softmax(int(layer.axes).bit_length() - 1)
    if kind == 'QUANTIZE':
        return (given[0] / given[1]).round().clamp(-128, 127)
    scale = given[1]
    if scale.dim():
        scale = scale.reshape([-1 if i == layer.axis else 1 for i in range(given[0].dim())])
    return given[0] * scale
