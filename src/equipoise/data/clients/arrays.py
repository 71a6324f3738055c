"""Arrays of any library as tensors: refusals name the row and the column of the user's own array."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.trees import named_leaves
from equipoise.data.clients.ragged import Ragged, Visited
from equipoise.errors import InvalidData, is_integer, is_number, notify

Exact = dict[str, tuple[list[Tensor], Any]]  # by name, rows of float64 arrays before they became float32, and columns
_ROWS_PER_CHECK = 65_536
_MOST_SAMPLED = 2**20  # numbers of an array that are looked at for what rounding does to them
_LOST, _CONSTANT = 0.01, 1e-12  # rounding that matters, as a share of the deviation; deviation that is itself rounding


def as_tree(name: str, values: Any, rows: int | None = None, rounding: Exact | None = None) -> Any:
    """Inputs or targets as a tensor, or as a tuple or dict of leaves.

    A tuple is one of several inputs if its entries are arrays, one of them of `rows` rows, where that is known; or if one is a
    tuple or dict, which is refused. Other tuples are arrays. `rounding` takes note of what float32 does to the numbers.
    """
    if isinstance(values, dict):
        if not values or not all(isinstance(key, str) for key in values):
            raise InvalidData(f"{name} as a dict must map names of the model's arguments to arrays.")
        return {key: as_leaf(f"{name}[{key!r}]", leaf, rounding) for key, leaf in values.items()}
    if isinstance(values, tuple) and values and _is_tree(values, rows):
        return tuple(as_leaf(f"{name}[{i}]", leaf, rounding) for i, leaf in enumerate(values))
    return as_leaf(name, values, rounding)


def _is_tree(values: tuple[Any, ...], rows: int | None) -> bool:
    """Whether a tuple holds several inputs, and not the rows of one."""
    if not any(map(_is_array, values)) or not all(_is_array(leaf) or isinstance(leaf, tuple | dict) for leaf in values):
        return False
    return rows is None or any(_is_array(leaf) and len(leaf) == rows for leaf in values) or len(values) != rows


def _is_array(value: Any) -> bool:
    """Whether something is an array of one or more dimensions, of whatever library."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, Ragged | Visited) or (hasattr(type(value), "__array__") and hasattr(type(value), "__len__"))


def as_leaf(name: str, values: Any, rounding: Exact | None = None) -> Any:
    """A tensor of finite numbers, or sequences; float64 becomes float32, in which models work by default."""
    if isinstance(values, Visited):
        return values
    if isinstance(values, Ragged):
        _refuse_non_finite(name, values.values, None, values.offsets)
        return values
    if isinstance(values, dict) or (isinstance(values, tuple) and any(map(_is_array, values))):
        raise InvalidData(f"{name} is a {type(values).__name__}, but trees have one level. Move its arrays up one level.")
    tensor = values if isinstance(values, Tensor) else _as_tensor(name, values)
    if tensor.is_complex():
        raise InvalidData(f"{name} holds complex numbers ({tensor.dtype}). Give real and imaginary parts as two features.")
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has few operations for them
        unsigned = tensor.dtype == torch.uint64
        tensor = tensor.to(torch.int64)
        if unsigned and bool((tensor < 0).any()):
            raise InvalidData(f"{name} holds whole numbers of 2⁶³ or more (uint64). Give smaller ones, or float32.")
    if tensor.dim() == 0:
        raise InvalidData(f"{name} must have one row per example, but is the single number {tensor.item()}.")
    _refuse_non_finite(name, tensor, _column_names(values))
    if tensor.dtype != torch.float64:
        return tensor
    single = tensor.float()
    if not bool(torch.isfinite(single).all()):
        row = int((~torch.isfinite(single)).nonzero()[0, 0])
        largest = tensor[row].abs().max().item()
        raise InvalidData(f"{name}, row {row} holds {largest:.3g}, beyond the largest float32, 3.4e38. Scale {name}.")
    if rounding is not None:
        step = -(-tensor.numel() // _MOST_SAMPLED) if tensor.numel() else 1
        rounding.setdefault(name, ([], _column_names(values)))[0].append(tensor.detach()[::step].clone())
    return single


def tell_of_rounding(source: str, exact: Exact) -> None:
    """Give a notice of columns whose numbers float32 rounds by more than a hundredth of their standard deviation."""
    lost = []
    for name, (parts, columns) in exact.items():
        if len({part.shape[1:] for part in parts}) == 1 and any(len(part) for part in parts):
            rows = torch.cat(parts)
            deviation, error = rows.std(0, correction=0), (rows - rows.float()).abs().amax(0)
            places = ((error > _LOST * deviation) & (deviation > _CONSTANT * rows.abs().amax(0))).nonzero().tolist()
            lost += [f"{name}{_column(place, columns)}" for place in places[:3]] + ["…"] * (len(places) > 3)
    if lost:
        notify(f"{source}: float32 rounds away what tells numbers apart: {', '.join(lost)}. Subtract the mean first.")


def _as_tensor(name: str, values: Any) -> Tensor:
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        row = int(np.argwhere(np.ma.getmaskarray(values))[0, 0])
        raise InvalidData(f"{name}, row {row} is masked. Drop that example; data.from_frame takes tables with missing values.")
    try:
        if isinstance(values, list) and any(isinstance(row, Tensor) for row in values[:1]):
            return torch.stack([torch.as_tensor(row) for row in values])
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as failure:  # rows of different lengths
        raise InvalidData(
            f"{name} must be an array of numbers with equal shapes: {first_line(failure)}. Sequences of different lengths are "
            "a leaf Ragged.of(sequences) of a dict."
        ) from failure
    if array.dtype.kind == "O":
        array = _numbers_of_objects(name, array, _column_names(values))
    if array.dtype.kind not in "biuf":
        hint = " Did you swap y and client?" if name == "y" and array.dtype.kind in "US" else ""
        raise InvalidData(f"{name} holds {array.dtype}, but must hold numbers.{hint} Tables: data.from_frame.")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # long doubles, which torch does not know
        array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    readable = array.flags.writeable and all(step >= 0 for step in array.strides)  # by torch
    return torch.from_numpy(array if readable else array.copy())


def _numbers_of_objects(name: str, array: NDArray[Any], columns: Any) -> NDArray[Any]:
    """An array of Python objects as numbers, whole labels as integers; a column of text, or a missing value, is named."""
    labels = name == "y" and array.size and all(is_integer(value) or isinstance(value, bool | np.bool_) for value in array.flat)
    try:
        return array.astype(np.int64 if labels else np.float64)
    except OverflowError as failure:
        raise InvalidData(f"{name} holds a whole number that is too large. Give smaller ones, or float32.") from failure
    except (TypeError, ValueError):
        for place, value in np.ndenumerate(array):
            try:
                float(value)
            except (TypeError, ValueError):
                raise InvalidData(
                    f"{name}, row {place[0]}{_column(place[1:], columns)} holds {value!r}, which is no number. Tables with "
                    "text or missing values: data.from_frame(frame, client=…, target=…); rows of different lengths: Ragged."
                ) from None
        raise


def _refuse_non_finite(name: str, values: Tensor, columns: Any, sequences: Tensor | None = None) -> None:
    """Refuse NaN and infinity; `sequences` are the offsets of sequences, whose values these are."""
    if not values.is_floating_point():
        return
    for start in range(0, len(values), _ROWS_PER_CHECK):
        part = values[start : start + _ROWS_PER_CHECK]
        if not bool((finite := torch.isfinite(part)).all()):
            row, *place = (~finite).nonzero()[0].tolist()
            where = f"row {start + row}{_column(place, columns)}"
            if sequences is not None:
                owner = int(torch.searchsorted(sequences, start + row, right=True)) - 1
                where = f"row {owner}, step {start + row - int(sequences[owner])}{_column(place, None)}"
            raise InvalidData(
                f"{name}, {where} holds {part[(row, *place)].item()}. Repair or drop that example; data.from_frame takes "
                "tables with missing values."
            )


def _column_names(values: Any) -> Any:
    """The names of the columns of a table of some library; None of an array."""
    return getattr(values, "column_names", None) or getattr(values, "columns", None)  # Arrow's table, pandas' and Polars'


def _column(place: Any, columns: Any) -> str:
    """The column of a value, by its name in a table."""
    if len(place) != 1:
        return f", place {tuple(place)}" if len(place) else ""
    return f", column {place[0]}" if columns is None else f", column {str(columns[place[0]])!r}"


def client_of_rows(values: Any, rows: int | None = None) -> tuple[NDArray[Any], tuple[str, ...]]:
    """The client of each row as numbers (N,) into the sorted names (n,); 1, 1.0 and "1" are one client.

    >>> client_of_rows([2, "1", 1.0])
    (array([1, 0, 0]), ('1', '2'))
    """
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    if isinstance(array, list | tuple) and any(isinstance(each, str) for each in array):
        array = np.array(array, dtype=object)
    array = np.asarray(array)
    if array.ndim != 1:
        raise InvalidData(f"client must hold one id per row, but has shape {array.shape}.")
    if len(array) == 0:
        raise InvalidData("client holds no id: there is no row.")
    if rows is not None and len(array) != rows:
        raise InvalidData(f"client has {len(array)} rows, but x has {rows}; each example needs one.")
    if array.dtype.kind == "O":
        distinct: dict[Any, int] = {}
        which = np.fromiter((distinct.setdefault(_hashable(i, row), len(distinct)) for row, i in enumerate(array)), np.int64)
        unique = list(distinct)
    else:
        found, which = _distinct(array)
        unique = found.tolist()
    whole = array.dtype.kind in "iu"
    names = list(map(str, unique)) if whole else [_client_name(value, which, place) for place, value in enumerate(unique)]
    ordered = sorted(set(names))
    position = {name: k for k, name in enumerate(ordered)}
    return np.array([position[name] for name in names])[which], tuple(ordered)


def _distinct(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """What np.unique gives: the distinct values in order, and the place of each value among them."""
    if array.dtype.kind in "iu" and (least := int(array.min())) >= 0 and int(array.max()) - least < 4 * len(array):
        there = np.zeros(int(array.max()) - least + 1, dtype=bool)  # a table takes less time than sorting
        there[array - least] = True
        return np.flatnonzero(there) + least, (there.cumsum() - 1)[array - least]
    # Rows of one client often follow each other: the first of each stretch says all.
    begins = np.flatnonzero(np.concatenate([[True], array[1:] != array[:-1]]))
    found, which = np.unique(array[begins], return_inverse=True)
    return found, which.repeat(np.diff(begins, append=len(array)))


def _hashable(value: Any, row: int) -> Any:
    try:
        hash(value)
    except TypeError:
        raise InvalidData(f"client, row {row} holds {value!r}, which is no id.") from None
    try:
        missing = value is None or bool(value != value)
    except TypeError:  # pandas' NA is neither equal to itself nor not
        missing = True
    return ("nan",) if missing else value  # one key for all that is missing


def _client_name(value: Any, which: NDArray[Any], place: int) -> str:
    if value != ("nan",) and (text := client_name(value)):
        return text
    what = "empty text" if value == "" else "infinite" if is_number(value) and value == value else "missing"
    row = int(np.flatnonzero(which == place)[0])
    raise InvalidData(f"client, row {row} is {what}. Drop that row, or name its client.")


def client_name(value: Any) -> str | None:
    """The id that a value stands for, None if it stands for none: 1, 1.0 and "1" are one client.

    >>> client_name(1.0), client_name("01"), client_name(float("nan")), client_name("")
    ('1', '01', None, None)
    """
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise InvalidData(f"client holds {value!r}, which is no Unicode text: it was read with a wrong encoding.")
        return value or None
    if isinstance(value, complex | np.complexfloating):
        raise InvalidData("client holds complex numbers; ids must be text or integers.")
    if is_number(value) and not isinstance(value, Integral):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value == int(value) else str(value)
    return None if value is None or str(value) in ("<NA>", "NaT") else str(value)


def first_line(failure: Exception) -> str:
    """The first line of what an error says."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0].rstrip(".")[:300]


def rows_by_client(which: NDArray[Any], clients: int) -> tuple[Tensor, Tensor]:
    """The rows of client 0, then those of client 1 …, (N,), each in order; and how many each has, (n,)."""
    if bool((which[1:] >= which[:-1]).all()):
        order = np.arange(len(which))
    else:  # by the lower 16 bits, then by the upper ones: NumPy sorts numbers of 16 bits in linear time
        order = np.argsort(which.astype(np.uint16), kind="stable")
        for shift in range(16, int(clients - 1).bit_length(), 16):
            order = order[np.argsort((which >> shift).astype(np.uint16)[order], kind="stable")]
    return torch.from_numpy(order), torch.from_numpy(np.bincount(which, minlength=clients))


def row_counts(**named: Any) -> dict[str, int]:
    """Rows of every leaf of some trees, by name."""
    return {name: len(leaf) for key, tree in named.items() for name, leaf in named_leaves(key, tree).items()}
