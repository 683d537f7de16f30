"""Copies of arrays in row-major order, of transposed ones in tiles that a processor's cache holds.

NumPy copies a transposed matrix element by element along its columns. Where the rows are a power of
two of bytes apart, hardly any of these elements stay in the cache until their neighbours are read.
"""

import numpy as np

_TILE = 256  # rows and columns
_SPARE = 16  # elements after a row of a tile, so that its columns spread over the cache


def contiguous(array: np.ndarray) -> np.ndarray:
    """The same values in row-major order; a copy unless they are in it already."""
    if array.flags.c_contiguous:
        return array
    result = np.empty(array.shape, array.dtype)
    copy_into(result, array)
    return result


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `target`, which has its shape and is in row-major order."""
    shape, strides = _merged(source)
    if len(shape) < 2 or strides[-1] == source.itemsize or source.itemsize not in strides:
        target[...] = source
        return
    # As views with fewer axes, of which the last ones are those of a matrix that is transposed.
    merged = np.lib.stride_tricks.as_strided(source, shape, strides, writeable=False)
    whole = target.reshape(shape)
    row = strides.index(source.itemsize)
    # Tiles of the axis along which the source lies, and of the last one.
    merged, whole = np.moveaxis(merged, row, -2), np.moveaxis(whole, row, -2)
    for index in np.ndindex(whole.shape[:-2]):
        _copy_matrix(whole[index], merged[index])


def _copy_matrix(target: np.ndarray, source: np.ndarray) -> None:
    """Copies a matrix with columns that are rows of memory into one with rows that are."""
    rows, columns = source.shape
    tile = np.empty((_TILE, _TILE + _SPARE), source.dtype)
    for column in range(0, columns, _TILE):
        for row in range(0, rows, _TILE):
            part = source[row : row + _TILE, column : column + _TILE].T
            copy = tile[: part.shape[0], : part.shape[1]]
            copy[...] = part
            target[row : row + _TILE, column : column + _TILE] = copy.T


def _merged(array: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides with neighbouring axes as one where they are one in memory."""
    shape, strides = list[int](), list[int]()
    for size, stride in zip(array.shape, array.strides, strict=True):
        if size == 1:
            continue
        if shape and strides[-1] == size * stride:
            shape[-1] *= size
            strides[-1] = stride
        else:
            shape.append(size)
            strides.append(stride)
    return tuple(shape), tuple(strides)
