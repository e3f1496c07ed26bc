"""The operations of matrix products and convolutions: 2 for each multiplication with its addition."""

import math

import numpy as np

from jaxpar.backward.graph import Graph, Node

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def product_flops(graph: Graph, node: Node) -> int:
    """Returns the FLOPs of a matrix product or a convolution with the shapes of a graph; 0 for another node."""
    if node.name == "dot_general":
        return _dot_flops(graph, node)
    return _conv_flops(graph, node) if node.name == "conv_general_dilated" else 0


def _dot_flops(graph: Graph, node: Node) -> int:
    contracted, _ = node.equation.params["dimension_numbers"]
    left, right = (graph.avals[i].shape for i in node.inputs)
    # The sharding of a contracted dim may be known for one side only.
    depth = 1
    for on_left, on_right in zip(*contracted, strict=True):
        depth *= min(left[on_left], right[on_right])
    result = graph.avals[node.outputs[0]].shape
    return 2 * depth * math.prod(result)


def _conv_flops(graph: Graph, node: Node) -> int:
    image, kernel, result = (graph.avals[i].shape for i in (*node.inputs, *node.outputs))
    params = node.equation.params
    numbers = params["dimension_numbers"]
    batch, features, *spatial = (result[dim] for dim in numbers.out_spec)
    total = 2 * batch * features * kernel[numbers.rhs_spec[1]]
    for at, size in enumerate(spatial):
        total *= meetings(
            *(image[numbers.lhs_spec[2 + at]], kernel[numbers.rhs_spec[2 + at]], size),
            stride=params["window_strides"][at],
            low=params["padding"][at][0],
            image_step=params["lhs_dilation"][at],
            kernel_step=params["rhs_dilation"][at],
        )
    return total


def meetings(
    image: int,
    kernel: int,
    result: int,
    *,
    stride: int = 1,
    low: int = 0,
    image_step: int = 1,
    kernel_step: int = 1,
) -> int:
    """Returns how often an element of an image meets one of a kernel, along one dim of a convolution.

    Args:
        image: Elements of the image.
        kernel: Elements of the kernel.
        result: Elements of the result.
        stride: Steps of the kernel between two of these.
        low: Padding before the image.
        image_step: Dilation of the image, whose gaps are not counted, as padding is not.
        kernel_step: Dilation of the kernel.
    """
    last = (image - 1) * image_step
    starts, offsets = np.arange(result) * stride - low, np.arange(kernel) * kernel_step
    few, many = sorted((starts, offsets), key=len)
    positions = (one + many for one in few)
    met = ((at >= 0) & (at <= last) & (at % image_step == 0) for at in positions)
    return sum(int(each.sum()) for each in met)
