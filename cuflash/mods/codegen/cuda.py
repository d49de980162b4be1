"""Prints expression graphs as CUDA: a struct of static functions, which compute each value as seldom as they can.

A kernel calls `head` once per head and `row` once per row of a tile. It calls `pair` once per two columns of a row, and
`element` once per score. The text calls functions of kernels_cu/common/mod_functions.cuh, which must be included first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..graph.graph import INDEX_OFFSETS, CapturedArray, Node, post_order
from ..graph.operations import Type
from .hoisting import FLOAT_INPUTS, KEY, STAGE_NAMES, STAGES, stage_of, staged
from .scalars import SCALARS, expression, kind_of, literal

_ROW = 1  # the stage
_STORAGE = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float32": "float",
    "float64": "double",
}


def print_struct(
    roots: Sequence[Node],
    arrays: Sequence[CapturedArray],
    name: str,
    results: Sequence[str],
    exact: Collection[str] = (),
    runs: Mapping[tuple[int, int], bool] = MappingProxyType({}),
    has_offsets: bool = False,
) -> str:
    """Returns the text of a struct template `name`, whose `element` returns the roots under the names `results`.

    Its template parameter is true if the offsets in all captured arrays fit into an int. Equal graphs give equal text.

    exact: results that must have equal bits in every kernel, for any dtype and order of stages. runs: by array number
    and axis, the contiguous axes that are at least as long as the columns. A value is True if two elements can be
    loaded together. has_offsets: index offsets follow the arrays.
    """
    printer = _Printer(staged(roots), arrays, [each in exact for each in results], runs)
    return printer.text(name, results, has_offsets)


class _PartOfOffset(NamedTuple):
    """Axes of a captured array whose index is first computed in one stage."""

    array: int
    stage: int
    axes: tuple[tuple[int, Node], ...]


def _parts_of_offset(x: Node) -> list[_PartOfOffset]:
    """Returns the offset of a load in parts, one for each stage up to the load's stage."""
    axes = [(axis, index, stage_of(index)) for axis, index in enumerate(x.arguments)]
    return [
        _PartOfOffset(x.value, stage, tuple((axis, index) for axis, index, first in axes if first == stage))
        for stage in range(stage_of(x) + 1)
    ]


class _Run(NamedTuple):
    """A load along the columns of a row: its number, its array's number and axis. is_pair: it loads two elements."""

    number: int
    array: int
    axis: int
    is_pair: bool

    @property
    def name(self) -> str:
        return f"run{self.number}"

    @property
    def kind(self) -> str:
        return str(self.is_pair).lower()


def _axis_of_columns(x: Node) -> int | None:
    """Returns the axis along which a load follows the columns of a row with all other indices fixed, or None."""
    if x.op != "load":
        return None
    axes = [axis for axis, index in enumerate(x.arguments) if stage_of(index) > _ROW]
    return axes[0] if len(axes) == 1 and x.arguments[axes[0]] is KEY else None


class _Printer:
    """Prints the statements of the four functions, and collects the values that each passes to later functions."""

    def __init__(
        self,
        roots: Sequence[Node],
        arrays: Sequence[CapturedArray],
        are_exact: Sequence[bool],
        runs: Mapping[tuple[int, int], bool],
    ) -> None:
        self.roots, self.arrays = roots, arrays
        self.order = post_order(roots)
        self.exact = set(post_order([x for x, is_exact in zip(roots, are_exact, strict=True) if is_exact]))
        self.users: dict[Node, list[Node]] = {each: [] for each in self.order}
        for each in self.order:
            for argument in each.arguments:
                self.users[argument].append(each)
        # Sums that are fused with a product, and the product's index among their arguments.
        self.fused = {each: place for each in self.order if (place := self._fused_place(each)) is not None}
        self.runs: dict[Node, _Run] = {}  # loads of elements along a row
        for x in self.order:
            axis = _axis_of_columns(x)
            if axis is not None and (is_pair := runs.get((x.value, axis))) is not None:
                self.runs[x] = _Run(len(self.runs), x.value, axis, is_pair)
        # Values that are inlined into another expression, or that no expression uses.
        nameless = {each.arguments[place] for each, place in self.fused.items()}
        nameless |= {KEY} if KEY not in roots and self.runs.keys() >= set(self.users.get(KEY, ())) else set()
        values = (each for each in self.order if each.op not in ("input", "constant") and each not in nameless)
        self.names = {each: f"value{number}" for number, each in enumerate(values)}
        # Parts of offsets are members: NVRTC may duplicate an unrolled loop for both outcomes of an invariant minimum.
        parts = dict.fromkeys(part for x in self.order if x.op == "load" for part in _parts_of_offset(x)[:-1])
        self.offsets = {part: f"offset{number}" for number, part in enumerate(parts) if part.axes}

    def _fused_place(self, x: Node) -> int | None:
        """Returns the index of the argument of a sum that is multiplied in the same instruction, else None."""
        if x.type != Type.FLOAT32 or x.op not in ("add", "subtract") or x in self.exact:
            return None
        for place in (1, 0):
            product = x.arguments[place]
            has_one_user = self.users[product] == [x] and product not in self.roots
            if product.op == "multiply" and has_one_user and stage_of(product) == stage_of(x):
                return place
        return None

    def text(self, name: str, results: Sequence[str], has_offsets: bool) -> str:
        """Returns the whole struct."""
        arrays = "".join(
            f"    CapturedArray<{self._storage(number)}, {len(each.shape)}, kShortOffsets> array{number};\n"
            for number, each in enumerate(self.arrays)
        )
        arrays += f"    int index_offsets[{len(INDEX_OFFSETS)}];\n" * has_offsets
        pairs = "".join(f"    LoadedPair<{self._storage(x.array)}, {x.kind}> {x.name};\n" for x in self.runs.values())
        members = [self._members(stage) for stage in (0, 1)]
        fields = "".join(f"    {SCALARS[x.type]} {result};\n" for x, result in zip(self.roots, results, strict=True))
        structs = [("Arrays", arrays), ("Head", _fields(members[0])), ("Row", _fields(members[1]))]
        structs += [("Pair", pairs), ("Result", fields)]
        text = [f"template <bool kShortOffsets>\nstruct {name} {{\n"]
        text.append("  using Offset = typename OffsetOf<kShortOffsets>::Type;\n")
        text += [f"  struct {title} {{\n{lines}  }};\n" for title, lines in structs]
        text += [self._function(stage, title, list(members[stage])) for stage, title in enumerate(("Head", "Row"))]
        text.append(self._pair_function())
        values = [f"static_cast<{SCALARS[x.type]}>({self._use(x, 2)})" for x in self.roots]
        return "".join([*text, self._function(2, "Result", values), "};\n"])

    def _members(self, stage: int) -> dict[str, str]:
        """Returns the names and types of the values of a stage that later stages use."""
        uses = set(self.roots) | {argument for x in self.order if stage_of(x) > stage for argument in x.arguments}
        values = [x for x in self.order if x in uses and stage_of(x) == stage and not _is_parameter(x)]
        offsets = {name: "Offset" for part, name in self.offsets.items() if part.stage == stage}
        runs = {x.name: f"ArrayRun<{self._storage(x.array)}>" for x in self.runs.values() if stage == _ROW}
        return {self._name(x): SCALARS[kind_of(x)] for x in values} | offsets | runs

    def _function(self, stage: int, result: str, values: list[str]) -> str:
        parameters = ["const Arrays& arrays"]
        parameters += [f"const {each.capitalize()}& {each}" for each in STAGE_NAMES[:stage]]
        parameters += ["const Pair& pair"] * (stage > _ROW)
        parameters += [f"{'float' if name in FLOAT_INPUTS else 'int'} {name}" for name in STAGES[stage]]
        parameters[-1] += " = 0.0f" * (STAGES[stage][-1] == "addend")
        lines = [
            f"const {SCALARS[kind_of(x)]} {name} = {self._expression(x, stage)};"
            for x, name in self.names.items()
            if stage_of(x) == stage
        ]
        lines += [
            f"const Offset {name} = {self._offset(part, stage)};"
            for part, name in self.offsets.items()
            if part.stage == stage
        ]
        if stage == _ROW:
            lines += [f"const auto {run.name} = {self._run(x, run)};" for x, run in self.runs.items()]
        body = "".join(f"    {line}\n" for line in [*lines, f"return {{{', '.join(values)}}};"])
        head = f"  __device__ __forceinline__ static {result} {STAGE_NAMES[stage]}({', '.join(parameters)}) {{\n"
        return f"{head}{body}  }}\n"

    def _name(self, x: Node) -> str:
        return str(x.value) if x.op == "input" else self.names[x]

    def _use(self, x: Node, stage: int) -> str:
        """Returns the text by which a stage refers to a value."""
        if x.op == "constant":
            return literal(x)
        if _is_parameter(x):
            return f"arrays.index_offsets[{INDEX_OFFSETS.index(x.value)}]"
        return self._name(x) if stage_of(x) == stage else f"{STAGE_NAMES[stage_of(x)]}.{self._name(x)}"

    def _expression(self, x: Node, stage: int) -> str:
        if x in self.fused:
            return self._fma(x, stage)
        if x.op == "load":
            return self._load(x)
        # Values of a head or a row are computed seldom, so the slower exact tanh is affordable there.
        is_exact = x in self.exact or (x.op == "tanh" and stage <= _ROW)
        return expression(x, [self._use(each, stage) for each in x.arguments], is_exact)

    def _fma(self, x: Node, stage: int) -> str:
        place = self.fused[x]
        one, other = (self._use(each, stage) for each in x.arguments[place].arguments)
        addend = self._use(x.arguments[1 - place], stage)
        if x.op == "subtract":
            one, addend = (f"-{one}", addend) if place == 1 else (one, f"-{addend}")
        return f"fmaf({one}, {other}, {addend})"

    def _load(self, x: Node) -> str:
        if x in self.runs:
            return f"static_cast<{SCALARS[x.type]}>(pair.{self.runs[x].name}.at(column))"
        last = _parts_of_offset(x)[-1]
        terms = self._earlier_offsets(x, last.stage) + ([self._offset(last, last.stage)] if last.axes else [])
        return f"static_cast<{SCALARS[x.type]}>(arrays.array{x.value}.at({' + '.join(terms) or '0'}))"

    def _run(self, x: Node, run: _Run) -> str:
        """Returns the value of a row from which its pairs load elements."""
        offset = " + ".join(self._earlier_offsets(x, _ROW)) or "0"
        return f"arrays.array{x.value}.run({run.axis}, key_begin, {offset})"

    def _earlier_offsets(self, x: Node, stage: int) -> list[str]:
        """Returns the texts by which a stage refers to the parts of a load's offset from earlier stages."""
        parts = [part for part in _parts_of_offset(x)[:-1] if part.axes]
        return [f"{STAGE_NAMES[part.stage]}." * (part.stage < stage) + self.offsets[part] for part in parts]

    def _pair_function(self) -> str:
        """Returns the function that loads two columns; the first column is even."""
        pairs = [f"arrays.array{x.array}.template pair<{x.kind}>(row.{x.name}, column)" for x in self.runs.values()]
        return (
            "  __device__ __forceinline__ static Pair pair(const Arrays& arrays, const Row& row, int column) {\n"
            f"    return {{{', '.join(pairs)}}};\n  }}\n"
        )

    def _storage(self, array: int) -> str:
        return _STORAGE[self.arrays[array].dtype]

    def _offset(self, part: _PartOfOffset, stage: int) -> str:
        return " + ".join(
            f"arrays.array{part.array}.{'clamped' if x.bounds[0] >= 0 else 'wrapped'}({axis}, {self._use(x, stage)})"
            for axis, x in part.axes
        )


def _is_parameter(x: Node) -> bool:
    """True for a constant or an index offset, which code names in every stage."""
    return x.op == "constant" or (x.op == "input" and x.value in INDEX_OFFSETS)


def _fields(members: dict[str, str]) -> str:
    return "".join(f"    {kind} {name};\n" for name, kind in members.items())
