"""States of FlashAttention, FlashAttention-2 and FLASH-D for one query after each tile of keys, with equal results.

It prints the state of the row tile by tile, and checks that the three results agree with the library's. With
`--picture FILE` it draws the states (matplotlib). It exits with 1 if a result differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from packages import explain_missing

import cuflash
from cuflash.reference import flash1, flash2, flashd
from cuflash.reference.tiles import Tile

KEYS, TILE, HEAD_DIM = 96, 8, 64
ALGORITHMS: dict[Any, Any] = {"flash1": flash1, "flash2": flash2, "flashd": flashd}
Trace = list[dict[str, float]]


def main() -> int:
    """Runs the row, prints and draws its states, and compares the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", metavar="FILE", help="draw the states into FILE; needs matplotlib")
    picture = parser.parse_args().picture
    if picture is not None:
        with explain_missing():  # before the computation, so that a missing package is reported at once
            import matplotlib
        matplotlib.use("Agg")
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, n, 1, HEAD_DIM)) for n in (1, KEYS, KEYS))
    # Scores rise with the key index, so that the largest one comes late and the states change many times.
    k += q * np.linspace(-0.1, 0.12, KEYS)[:, None, None] + 0.05 * np.sin(np.arange(KEYS))[:, None, None] * q
    traces, ends = {}, {}
    for name in ALGORITHMS:
        traces[name], ends[name] = trace(name, q, k, v)
    for name, states in traces.items():
        print(f"{name}: {', '.join(states[0])}, after each tile of {TILE} keys")
        for number, state in enumerate(states):
            print(f"  {number:>4}  " + "  ".join(f"{x:>9.4f}" for x in state.values()))
    exact = exactly(q, k, v)
    device, arrays = on_a_gpu(q, k, v)
    for name in ALGORITHMS:
        ends[f"the library's {name} on the {device}"] = float(cuflash.forward(*arrays, algorithm=name)[0, 0, 0, 0])
    wrong = [name for name, end in ends.items() if not abs(end - exact) < 1e-5 * (1 + abs(exact))]
    for name, end in ends.items():
        print(f"{name:<32} {end:.7f}")
    print(f"{'exact':<32} {exact:.7f}: " + (f"wrong are {', '.join(wrong)}" if wrong else "all are equal"))
    if picture is not None:
        draw(traces, exact, picture)
    return int(bool(wrong))


def trace(name: str, q: Any, k: Any, v: Any) -> tuple[Trace, float]:
    """Returns the states of the row before any key and after each tile, and the result; of o, the first number."""
    algorithm: Any = ALGORITHMS[name]
    state, states = algorithm.start(1, HEAD_DIM, q.dtype), []
    scores = (q[0, :, 0] @ k[0, :, 0].T) / np.sqrt(HEAD_DIM)
    for begin in range(-TILE, KEYS, TILE):
        if begin >= 0:
            keys = slice(begin, begin + TILE)
            tile = Tile(begin, begin + TILE, scores[:, keys].copy(), k[0, keys, 0], v[0, keys, 0], q.dtype)
            state = algorithm.update(state, tile)
        statistics = {"lse": state.lse} if name == "flashd" else {"m": state.m, "ell": state.ell}
        states.append({key: float(x[0]) for key, x in statistics.items()} | {"o": float(state.o[0, 0])})
    return states, float(algorithm.finish(state)[0][0, 0])


def exactly(q: Any, k: Any, v: Any) -> float:
    """Returns the first number of attention, written out."""
    scores = k[0, :, 0] @ q[0, 0, 0] / np.sqrt(HEAD_DIM)
    p = np.exp(scores - scores.max())
    return float(p @ v[0, :, 0, 0] / p.sum())


def on_a_gpu(*arrays: Any) -> tuple[str, tuple[Any, ...]]:
    """Returns "GPU" and float32 copies of the arrays there, or "CPU" and the arrays themselves."""
    try:
        device = cuflash.plan(*(x.shape for x in arrays), dtype="float32").device
    except cuflash.UnsupportedError as error:
        print(error)
        device = "cpu"
    if device == "cpu":
        return "CPU", arrays
    import cupy

    return "GPU", tuple(cupy.asarray(x.astype("float32")) for x in arrays)


def draw(traces: dict[str, Trace], exact: float, path: str) -> None:
    """Draws a line for each algorithm: its statistics on the left, o on the right."""
    from matplotlib import pyplot

    titles = {
        "flash1": "FlashAttention\no divided by ℓ at each tile",
        "flash2": "FlashAttention-2\no divided by ℓ once, at the end",
        "flashd": "FLASH-D\nno maximum, no division",
    }
    named = {"m": "m, largest score", "ell": "ℓ, sum of exp(s - m)", "lse": "lse"}
    pyplot.rcParams.update({"font.size": 12, "axes.titlesize": 12, "legend.fontsize": 12})  # legible on a phone
    figure, axes = pyplot.subplots(3, 2, figsize=(6, 9), sharex=True, layout="constrained")
    for (left, right), (name, states) in zip(axes, traces.items(), strict=True):
        num_keys = [number * TILE for number in range(len(states))]
        colours = iter(("#0072B2", "#D55E00"))
        for key in states[0]:
            values = [state[key] for state in states]
            if key != "o":
                shown = [np.nan if np.isinf(x) else x for x in values]
                left.plot(num_keys, shown, "o-", ms=3, color=next(colours), label=named[key])
            else:
                right.plot(num_keys, values, "o-", ms=3, color="#009E73", label="o")
        if name == "flash2":
            ended = states[-1]["o"] / states[-1]["ell"]
            whole = states[-1]["o"]
            right.annotate("", (KEYS, ended), (KEYS, whole), arrowprops={"arrowstyle": "->"})
            right.text(KEYS - 3, (whole + ended) / 2, "o / ℓ", ha="right", va="center", backgroundcolor="white")
        right.axhline(exact, color="black", lw=0.8, ls="--", label="exact")
        left.set_title(titles[name])
        right.set_ylabel("first number of o")
    for panel in axes[-1]:
        panel.set_xlabel("keys so far")
    handles = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=160)
    print(f"drawn to {path}")


if __name__ == "__main__":
    sys.exit(main())
