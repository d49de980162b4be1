"""Old names stay away: a row for each family, and the files that may still hold it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from workers import ROOT, need_checkout

need_checkout("kernels_cu", ".ci")
PYTHON, CUDA, BOTH = (".py",), (".cu", ".cuh"), (".py", ".cu", ".cuh")


class Family(NamedTuple):
    """Old names, their successors, the suffixes of files in which they are gone, and files that may hold them.

    in_code: only identifiers count, as the name is also an ordinary word in comments and strings.
    """

    old: str
    new: str
    scope: tuple[str, ...] = BOTH
    allowed: tuple[str, ...] = ()
    in_code: bool = False


# Files about weights that dropout keeps.
OF_DROPOUT = (
    "cuflash/reference/dropout.py",
    "cuflash/reference/mods.py",
    "cuflash/testing/mod_oracle.py",
    "tests/frameworks/test_jax_mods.py",
    "tests/kernels/test_dropout.py",
    "tests/kernels/test_dropout_bits.py",
    "tests/kernels/test_index_offsets.py",
    "tests/reference/test_dropout.py",
    "tests/support/eager_torch.py",
    "tests/support/mod_calls.py",
)
# Families of one kind of files, and their successors.
OF_CUDA = {
    r"Lengths|places_of": "SeqlenInfo, varlen_layout",
    r"own_(heads?|tile|scores|walk|step|work)|(apply|weigh)_own\w*|(Mod\w+|auto|unsigned|int) own": (
        "mod_*, apply_mods, p_and_ds_with_mods"
    ),
    r"(Seen|Cells?)[A-Z]\w*|k\w*Cell|seen_(keys|queries|rows|columns|tiles|begin|end|from|of|batch|head)\w*"
    r"|seen_sequence|(count|some|is|number)_seen|most_cells|some_hidden|cells?": (
        "Visible*, MaskTile*, visible_*, any_visible, mask_tiles"
    ),
    r"hide_\w+|hide(?=\()|\w+_hide|kHides\w*|find_clear|is_clear|some_clear|kClear|clears?_\w+|clear(?=[.;(])": (
        "apply_mask, apply_begin, apply_end, unmasked, zero_row"
    ),
    r"\w*Queue|queue|\w*(Dealt|Dealer|Dealing|Deals)\w*|Describer|ToldS\w+|kT(old|ells)\w*|(dealt|told|dq)_(work|steps"
    r"|turns)|(tell|describe)_\w+|(tell|hear|deal|describe)(?=\()|\w*untold|await(_\w+|(?=\())|DqTurn|turn_(counter"
    r"|full|empty|modes)|kOfSeveralLengths|CUFLASH_LENGTHS|\w+_work\.cuh": (
        "*TileScheduler, WorkRing, StepRing, SchedulerWarp, push, pop, publish, wait_*, semaphore, VARLEN"
    ),
    r"weigh(_\w+|(?=[<(]))|make_weights_again|scores_again|raise(_\w+|(?=\())|kRaisesAlways|kWeighsLate|begin_(scores"
    r"|sum|\w+_scores)|end_(scores|output)|begin_(next_output|step|dq|dp)|output\.cuh": (
        "softmax_tile, p_and_ds, recompute_*, update_max, issue_qk, issue_pv, release_k, mainloop.cuh"
    ),
    r"[Bb]locks? of threads|[Mm]ultiprocessors?|[Pp]ieces? of work|caller's own|several lengths": (
        "thread block, SM, work tile, mods, varlen"
    ),
    r"Divisor|(smaller|larger|quotient)(?=[(<])": "FastDivmod, const_min, const_max, fast_div",
}
OF_PYTHON = {
    r"[jJ]udges?|Judged|judged(?=\()": "validate, Validators, ValidatedCall",
    r"Asked|drops_none|MAX_KEPT|KEPT|written_once|run_own|run_mods": (
        "OptionsKey, is_zero, MAX_KEYS, CALL_CACHE, pick_form, resolve_mods"
    ),
    r"renamed(?==)|\.renamed|told_splits|_More|\.instead|instead(?==)": (
        "aliases, splits_text, _CapturedGradients, host_kernel"
    ),
    r"gapped|has_gaps|densed|dense_strides|(Array|ArraySpec|library)\.dense": (
        "any_last_stride, last_dim_strided, with_packed_strides, packed_strides, contiguous"
    ),
    r"all_paths|truth(?=\()|of_causal_pairs|magnitude(?=\()|warn_of_numbers|numbers_that_change|captured_object": (
        "trace_branches, branch_on, assume_causal, abs_bound, warn_if_recompiling, stand_ins"
    ),
    r"(uses|has|with)_cells|cells_(of|axes|shape|launch)|MAX_CELLS": "mask_tiles, is_block_sparse",
    r"seen_product|is_seen\w*|_last_seen|seen_not_finite": "visible_product, is_visible",
    r"looked_up|(?<=sums\.)apart|alike(?=\()": "gathered_axes, separate_axes, equivalent",
}
FAMILIES = (
    Family(r"Ragged\w*|kLengths|for_lengths", "Varlen*, kVarlen, for_varlen"),
    Family(r"ragged(?!_paged_attention|_verify_layout)\w*", "varlen"),
    Family(r"[Tt]erritor(y|ies)", "RowSlots, row_slots"),
    Family(r"OF_SEQUENCES|is_of_sequences|TOLD|is_told", "VARLEN_OPS, is_varlen, VARLEN_ARGS, has_varlen_args"),
    Family(r"is_kept", "is_cacheable", scope=PYTHON, allowed=OF_DROPOUT),
    Family(r"_?[tT]old|(?:is|given|check|with)_told", "varlen_args, varlen_kwargs, varlen_specs", PYTHON, in_code=True),
    Family(
        r"(?!test_)\w*_own|_?own(_\w+)?|_?OWN(_\w+)?", "mod_spec, mod_code, mod_args, mod_kwargs", PYTHON, in_code=True
    ),
    Family(r"[A-Za-z]*Own[A-Z]\w*|kOwn", "Mod*, kHasMods, kScoreMod, kMaskMod"),
    Family(
        r"\w*OWN_(SCORES|HIDES|TOGETHER|MASK|SLOPE)|backward_own|k?WithOwn",
        "SCORE_MOD, MASK_MOD, MODS_TOGETHER, backward_mods, WithMods",
        allowed=(".ci/versus_kernels.py",),
    ),
    Family(
        r"seen_counts\w*|SeenCountsParams|cells_(batch|head|row|q|k)|num_cells|seen_(batch|head)",
        "tile_counts, TileCountsParams, mask_tiles_*, list_stride_*",
        allowed=(".ci/versus_kernels.py",),
    ),
    Family(
        r"LENGTHS(?==)|TELLS_SEQUENCES|more_turns|first_turn|lse_sm90_\\w\*_\(lengths",
        "VARLEN, LISTS_SEQLENS, more_semaphores, first_semaphore",
    ),
    Family(r"DealtWork|Dealer|deal_out|ToldSteps?|TurnWarp", "WorkRing, SchedulerWarp, push, StepRing, SemaphoreWarp"),
    Family(r"OutputConsumer|RingPosition|AbsentKeys", "ForwardMainloop, PipelineState, MissingPages"),
    Family(r"kExists|kDecodes|kSingle|kFew|kNarrow", "kEnabled, kDecode, kOneTilePerBlock, kFewSequences, …"),
    Family(r"kCells|kFullCells|CellKind", "kBlockSparse, kSkipsFullTiles, MaskTileKind"),
    Family(r"rows_are_keys|kRowsAreKeys|heads_together|longest_first", "keys_as_rows, heads_in_l2, lpt_order"),
    Family(r"Recipe|recipe", "Guards, guards"),
    Family(
        r"[bB]oxed|Box|_boxes|(launch|tile)\.boxes|_?paired",
        "tma_operands, TmaBox, tma_boxes, tma_rows, vector_loaded",
        scope=PYTHON,
        allowed=(".ci/versus.py", ".ci/versus_kernels.py"),  # kernels of two trees are paired
    ),
    Family(
        r"(Written|Kernels|Parameters|Kept|Seen|Block)(?=\()|class (Written|Kernels|Parameters|Kept|Seen|Block)"
        r"|\.for_any",
        "PackedParams, LoadedPlan, ParamTemplate, unaligned_plan, SecondChanceCache, RecentKeys, ParamBuffer",
        scope=PYTHON,
        allowed=("examples/torch_training.py",),  # a block of a transformer
    ),
    Family(
        r"runtime[./](launch|kept|cache|host|counters|scratch|own_params|seeds)",
        "runtime.call, call_cache, disk_cache, cpu, device_memory, mod_params; ops.dropout_seed",
        allowed=(".ci/versus_checks.py",),  # it reads trees of any age
    ),
    Family(r"Known|KNOWN|tells_sequences|clears_unused", "OptionContext, DEVICES, lists_seqlens", in_code=True),
    *(Family(old, new, CUDA) for old, new in OF_CUDA.items()),
    *(Family(old, new, PYTHON) for old, new in OF_PYTHON.items()),
)
# Names for the origin or relation of a variable instead of its content.
VAGUE = {"made", "found", "given", "wanted", "known", "seen", "told", "kept", "own", "of", "at", "asked", "heard"}
VAGUE |= {"knows", "says", "sees", "places", "claims", "want", "blind", "soiled", "pulled"}
FOLDERS = ("cuflash", "kernels_cu", "tests", "examples", ".ci")
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in BOTH and path != Path(__file__).resolve()
}


@cache
def identifiers(name: str, text: str) -> str:
    """Returns the code of a file without comments, and in Python without strings."""
    if name.endswith(CUDA):
        return re.sub(r"//[^\n]*", "", text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(token.string for token in tokens if token.type == tokenize.NAME)


def variables(text: str) -> set[str]:
    """Returns the names of variables, arguments and attributes that a Python source sets."""
    nodes = list(ast.walk(ast.parse(text)))
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def uses(family: Family, texts: dict[str, str]) -> dict[str, list[str]]:
    """Returns the old names of a family that files of its scope hold, by file."""
    pattern = re.compile(rf"\b(?:{family.old})(?!\w)")
    scope = {name: text for name, text in texts.items() if name.endswith(family.scope)}
    if family.in_code:
        scope = {name: identifiers(name, text) for name, text in scope.items()}
    return {name: names for name, text in scope.items() if (names := [match[0] for match in pattern.finditer(text)])}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: path.read_text("utf-8") for name, path in FILES.items()}


def test_files_of_all_folders_and_endings_are_read(texts: dict[str, str]) -> None:
    assert len(texts) >= 480
    assert {name.split("/")[0] for name in texts} == set(FOLDERS)
    assert {ending for ending in BOTH for name in texts if name.endswith(ending)} == set(BOTH)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.new.split(",")[0])
def test_old_names_of_a_family_are_gone(family: Family, texts: dict[str, str]) -> None:
    files = uses(family, texts)
    assert set(family.allowed) <= set(texts)
    assert not set(files) - set(family.allowed), f"write {family.new}"


def test_variables_are_named_for_what_they_hold(texts: dict[str, str]) -> None:
    assert variables("def f(of): made = x.told = of.seen") == {"of", "made", "told"}
    named = [name for name in texts if name.endswith(PYTHON)]
    assert len(named) >= 380
    assert not {name: vague for name in named if (vague := variables(texts[name]) & VAGUE)}


def test_an_old_name_is_found() -> None:
    texts = {"a.cuh": "struct RaggedRows {};", "b.py": "# Territory of a slot", "c.md": "Ragged"}
    assert uses(FAMILIES[0], texts) == {"a.cuh": ["RaggedRows"]}
    assert uses(FAMILIES[2], texts) == {"b.py": ["Territory"]}
