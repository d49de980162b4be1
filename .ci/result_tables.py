"""Tables of the files under examples/results, and the text of the page that has them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from cuflash.tools.bench import accuracy as of_errors

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "results"
GPUS = ("h200", "h100")  # folders; README.md shows the first that has a file
KINDS: dict[str, Callable[[str], bool]] = {  # kinds of models; the first that matches counts
    "language models, training": lambda name: name.endswith(", training"),
    "language models, prompts": lambda name: name.endswith(", prefill") or "new of" in name,
    "text encoders, proteins": lambda name: name.startswith(("BERT", "ModernBERT", "ESM")),
    "images": lambda name: name.startswith(("ViT", "DINO", "SigLIP", "InternViT")),
    "speech": lambda name: name.startswith(("Whisper", "wav2vec")),
    "diffusion, video, structures": lambda name: True,
}
# Issues in which other libraries track their wrong results.
WRONG = {("FlashAttention-4", "backward"): " ([PR 2896](https://github.com/Dao-AILab/flash-attention/pull/2896))"}
OURS = {"forward": "flash2", "backward": "backward"}  # by op, the name of the timed call
Rows = list[dict[str, Any]]


@cache
def read(gpu: str, preset: str) -> dict[str, Any]:
    """Returns the content of a benchmark file. gpu: its folder, "" for a file beside the folders."""
    return dict(json.loads((RESULTS / gpu / f"{preset}.json").read_text("utf-8")))


def card(gpu: str, preset: str) -> str:
    """Returns the name of the GPU on which a file was measured."""
    return str(read(gpu, preset)["machine"]["gpus"][0]["name"])


def rows_of(gpu: str, preset: str, op: str) -> Rows:
    """Returns the timed rows of an op."""
    return [row for row in read(gpu, preset)["rows"] if row["op"] == op and row["seconds"]]


def first_of_ours(rows: Rows) -> Rows:
    """Returns the rows of our first contender."""
    name = next(row["contender"] for row in rows if row["ours"])
    return [row for row in rows if row["contender"] == name]


def best(row: dict[str, Any]) -> float | None:
    """Returns the ratio of a row's speed to the fastest peer; None without a peer."""
    return min(row["ratios"].values()) if row["ratios"] else None


def table(heading: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    head = list(heading)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *map(list, lines)))


def times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f})"


def span(numbers: Iterable[float], digits: int = 2) -> str:
    """Returns the smallest and the largest number as text."""
    ordered = sorted(numbers)
    least, greatest = (f"{x:.{digits}f}" for x in (ordered[0], ordered[-1]))
    return least if least == greatest else f"{least} to {greatest}"


def short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def speed(gpu: str, ops: tuple[str, ...], seqlens: tuple[int, ...] = ()) -> str:
    """Returns a table of TFLOP/s by head dim, mask and length: all lengths, or the given ones."""
    by_op = {op: [x for x in first_of_ours(rows_of(gpu, "paper", op)) if x["dtype"] == "bfloat16"] for op in ops}
    seqlens = seqlens or tuple(lengths(by_op[ops[0]]))
    lines = []
    for dim, causal in sorted({(row["head_dim"], row["causal"]) for row in by_op[ops[0]]}):
        line = [str(dim), "causal" if causal else "none"]
        for rows in by_op.values():
            here = {row["seqlen_q"]: row for row in rows if (row["head_dim"], row["causal"]) == (dim, causal)}
            line += [f"{here[seqlen]['tflops']:.0f}{times(best(here[seqlen]))}" for seqlen in seqlens]
        lines.append(line)
    columns = (f"{f'{op}, ' * (len(ops) > 1)}seqlen {short(seqlen)}" for op in ops for seqlen in seqlens)
    return table(["head dim", "mask", *columns], lines)


def models(gpu: str) -> str:
    """Returns a table of ratios to the fastest peer by kind of model."""
    lines = []
    left = {op: first_of_ours(rows_of(gpu, "models", op)) for op in ("forward", "backward")}
    for kind, belongs in KINDS.items():
        line = [kind]
        for op, rows in left.items():
            ratios = [ratio for row in rows if belongs(row["name"]) and (ratio := best(row)) is not None]
            left[op] = [row for row in rows if not belongs(row["name"])]
            columns = [f"{geometric_mean(ratios):.2f}", span(ratios), str(len(ratios))] if ratios else []
            line += columns or ["–"] * 3
        lines.append(line)
    return table(["kind", *(f"{op}, {what}" for op in left for what in ("mean", "range", "calls"))], lines)


def wrong(gpu: str) -> str:
    """Returns a list of peers with wrong results, and the head dims."""
    head_dims: dict[tuple[str, str], set[int]] = {}
    for row in read(gpu, "models")["rows"]:
        if row["wrong"]:
            head_dims.setdefault((row["contender"], row["op"]), set()).add(row["head_dim"])
    lines = []
    for (name, op), dims in head_dims.items():
        issue = WRONG.get((name, op), "")
        lines.append(f"- {op} of {name}{issue}, head dims {', '.join(map(str, sorted(dims)))}")
    return "\n".join(lines) or "None."


def decode(gpu: str) -> str:
    """Returns a table of µs a call and GB/s of decoding."""
    lines = []
    for row in first_of_ours(rows_of(gpu, "decode", "forward")):
        rate = f"{row['num_bytes'] / row['seconds'] * 1e-9:.0f}"
        heads = f"{row['heads_q']}/{row['heads_kv']}"
        lines.append([f"{row['batch']} x {short(row['seqlen_k'])}", heads, str(row["head_dim"]),
                      f"{row['seconds'] * 1e6:.1f}{times(best(row))}", rate])  # fmt: skip
    return table(("batch x cached keys", "heads", "head dim", "µs a step", "GB/s"), lines)


def masks(gpu: str) -> str:
    """Returns a table of TFLOP/s with masks and score_mods, and ratios to flex_attention."""
    lines = []
    by_op = {op: rows_of(gpu, "masks", op) for op in ("forward", "backward")}
    for name in dict.fromkeys(row["name"] for row in by_op["forward"]):
        line = [name]
        for rows in by_op.values():
            ours = next((row for row in first_of_ours(rows) if row["name"] == name), None)
            line.append("–" if ours is None else f"{ours['tflops']:.0f}{times(ours['ratios'].get('torch flex'))}")
        lines.append(line)
    return table(("mask or score", "forward", "backward"), lines)


def memory(gpu: str) -> str:
    """Returns a table of MiB that a call allocates, by length."""
    rows = rows_of(gpu, "memory", "forward")
    lines = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        of_one = {row["seqlen_q"]: row["peak_bytes"] / 2**20 for row in rows if row["contender"] == name}
        lines.append([name, *(f"{of_one[x]:,.0f}" if x in of_one else "out of memory" for x in lengths(rows))])
    return table(("forward, MiB", *(short(x) for x in lengths(rows))), lines)


def ranks(gpu: str) -> str:
    """Returns a table of shares of one GPU's rate, by problem and contender; those of the best scheme are bold."""
    rows, lines = read(gpu, "ranks")["rows"], []
    most = {key: max(row["share"] for row in rows if (row["problem"], row["op"]) == key)
            for key in {(row["problem"], row["op"]) for row in rows}}  # fmt: skip
    for problem, contender in dict.fromkeys((row["problem"], row["contender"]) for row in rows):
        line = [problem, contender]
        for op in ("forward", "both"):
            share = next((row["share"] for row in rows if (row["problem"], row["contender"], row["op"])
                          == (problem, contender, op)), None)  # fmt: skip
            is_best = share is not None and share == most[problem, op]
            line.append("–" if share is None else f"**{share:.2f}**" if is_best else f"{share:.2f}")
        lines.append(line)
    return table(("problem", "", "forward", "both passes"), lines)


def lengths(rows: Rows) -> list[int]:
    return sorted({row["seqlen_q"] for row in rows})


def calls(gpu: str) -> str:
    """Returns tables of the host time of repeated calls, and of the time of first calls."""
    content = read(gpu, "paper")
    host_times = {name: x for name, x in content["host_seconds"].items() if "deterministic" not in name}
    host = [[name, f"{seconds * 1e6:.0f} µs"] for name, seconds in host_times.items()]
    cold, disk, of_peers = (content["startup"].get(name, {}) for name in ("cold", "disk", "peers"))
    first = []
    for op in of_peers:
        first.append([f"{op}, cuflash, head dim 128, compiled", f"{cold[op]['d128'] * 1e3:.0f} ms"])
        first.append([f"{op}, cuflash, head dim 128, from the cache on disk", f"{disk[op]['d128'] * 1e3:.0f} ms"])
        first += [[f"{op}, {name}, head dim 128", f"{seconds * 1e3:.0f} ms"] for name, seconds in of_peers[op].items()]
    return f"{table(('host time of a repeated call', ''), host)}\n\n{table(('first call in a process', ''), first)}"


def install() -> str:
    """Returns a table of megabytes that pip downloads and installs."""
    rows = read("", "install")["rows"]
    kinds = {"bytes": "downloads", "bytes_beside_torch": "beside PyTorch", "bytes_on_disk": "on disk"}
    lines = [[row["stack"], *(f"{row[kind] / 1e6:,.0f}" for kind in kinds)] for row in rows]
    return table(("MB", *kinds.values()), lines)


Ratios = dict[tuple[str, str, float], list[float]]  # by dtype, op and size of the scores


def errors(statistic: Callable[[list[float]], float]) -> Ratios:
    """Returns ratios of our errors to the largest (`max`) or smallest (`min`) of the peers'."""
    _, rows = of_errors.read(RESULTS / "accuracy.json")
    ratios: Ratios = {}
    for row in rows:
        if row.ours and (ratio := of_errors.ratio(rows, row, statistic)):
            ratios.setdefault((row.setting.case.dtype, row.op, row.setting.size), []).append(ratio)
    return ratios


def accuracy() -> str:
    """Returns a table of ratios of our errors to the largest and the smallest of the peers', by size of the scores."""
    columns, lines = [errors(max), errors(min)], []
    for dtype, size in dict.fromkeys((dtype, size) for dtype, _, size in columns[0]):
        lines.append([dtype, f"{size:g}", *(span(ratios[dtype, op, size]) for ratios in columns for op in OURS)])
    heads = (f"{op}, to the {which}" for which in ("largest", "smallest") for op in OURS)
    return table(("dtype", "size of the scores", *heads), lines)


# Tables of the second document by benchmark file, each with the text before it.
forward, backward = (partial(speed, ops=(op,)) for op in OURS)
SECTIONS: dict[str, dict[str, Callable[[str], str]]] = {
    "paper": {
        "Forward, TFLOP/s, and in brackets times as fast as the fastest other library:": forward,
        "Backward, counted as 2.5 times the work of forward:": backward,
        "Host time (backward of other libraries through autograd) and first calls:": calls,
    },
    "models": {
        "Times as fast as the fastest other library that takes the call:": models,
        "Not timed, because sampled rows were wrong:": wrong,
    },
    "decode": {
        "One query a sequence, bfloat16; in brackets times as fast as the fastest other library. The GPU's memory "
        "gives {bandwidth} GB/s at most:": decode
    },
    "masks": {
        "TFLOP/s of what is seen, and in brackets times as fast as compiled flex_attention. The picture compares with "
        "the fastest library that takes the call, such as FlashAttention-4 for causal:": masks
    },
    "ranks": {"Share of one GPU's rate for the same work, 16 and 8 heads of 128, windows and documents of 4k:": ranks},
    "memory": {"Allocated by a call (bfloat16, causal, batch 1, 16 heads, head dim 64), by seqlen:": memory},
}
PICTURES = {
    "models": "Calls of published models: times as fast as the fastest other library",
    "decode": "Decoding: GB/s of four libraries",
    "masks": "Masks and scores: times as fast as the fastest other library",
}


def details() -> str:
    """Returns the text of the second document."""
    parts = ["# Measured", "Written by `.ci/readme_tables.py` out of the files here."]
    for gpu in GPUS:
        files = {preset: path for preset in SECTIONS if (path := RESULTS / gpu / f"{preset}.json").is_file()}
        parts += [f"## {card(gpu, preset)}" for preset in list(files)[:1]]
        for preset, path in files.items():
            content = read(gpu, preset)
            bandwidth = f"{(content['machine']['gpus'][0].get('bytes_per_second') or 0) * 1e-9:.0f}"
            versions = ", ".join(f"{name} {version}" for name, version in content["machine"]["versions"].items())
            parts += [f"### {preset}", f"`{content['command']}`: {versions}"]
            if path.with_suffix(".png").is_file():  # by `cuflash bench --draw`
                parts.append(f"![{PICTURES[preset]}]({gpu}/{preset}.png)")
            for text, make in SECTIONS[preset].items():
                parts += [text.replace("{bandwidth}", bandwidth), make(gpu)]
    count = len(read("", "accuracy")["machine"]["gpus"])
    gpu = f"one {card('', 'accuracy')}" + f" of the {count} in the machine" * (count > 1)
    text = f"Root mean square errors of cuflash, as multiples of the largest and the smallest of the others', on {gpu}:"
    parts += ["## Errors", text, accuracy()]
    parts.append("![Errors by seqlen and by the size of the scores, beside other libraries](accuracy.png)")
    return "\n\n".join([*parts, "## Downloads", install()]) + "\n"
