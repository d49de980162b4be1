"""Pictures of measurements: letters that can be read on a phone, no label over another, none cut off."""

from __future__ import annotations

import runpy
import struct
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from workers import ROOT

from cuflash.__main__ import main
from cuflash.tools.bench import ranks

RESULTS, PICTURES = ROOT / "examples" / "results", ROOT / "examples" / "pictures"
PHONE, LEGIBLE = 375, 10  # pixels: the width of a phone's page, and the least height of letters


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures that were written, by the name of the file."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    written: dict[str, Any] = {}
    savefig = Figure.savefig

    def noted(figure: Any, path: Any, **options: Any) -> None:
        written[Path(path).name] = figure
        savefig(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", noted)
    return written


def size(path: Path) -> tuple[int, int]:
    """Returns width and height of a PNG file."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def assert_legible(figure: Any) -> None:
    """Asserts that texts are tall enough, lie inside of the figure, and do not overlap."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    # Axes have labels of ticks beyond their limits, which are not drawn.
    drawn = {id(text) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in _labels(axis)}
    of_ticks = {id(text) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)}
    texts = [text for text in texts if id(text) not in of_ticks or id(text) in drawn]
    assert len(texts) > 10
    boxes = []
    for text in texts:
        pixels = text.get_fontsize() / 72 * PHONE / figure.get_figwidth()
        assert pixels >= LEGIBLE, f"{text.get_text()!r} has {pixels:.1f} pixels of {PHONE}"
        box = text.get_window_extent()
        inside = box.x0 > -1 and box.y0 > -1 and box.x1 < figure.bbox.x1 + 1 and box.y1 < figure.bbox.y1 + 1
        assert inside, f"{text.get_text()!r} is cut off: {box}, {figure.bbox}"
        boxes.append((text.get_text(), box.padded(-1)))  # a pixel less on each side: boxes are taller than letters
    for (text, box), (other, other_box) in combinations(boxes, 2):
        assert not box.overlaps(other_box), f"{text!r} lies over {other!r}"


def _labels(axis: Any) -> list[Any]:
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()) if low <= tick.get_loc() <= high]
    return [axis.label, *(tick.label1 for tick in ticks)]


# "ranks" is a table: its picture shows computed shares.
@pytest.mark.parametrize(
    "path",
    sorted({*RESULTS.glob("h?00/*.json")} - {*RESULTS.glob("h?00/ranks.json")}),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_pictures_of_the_recorded_results_are_legible_on_a_phone(
    path: Path, figures: dict[str, Any], tmp_path: Path
) -> None:
    assert main(["bench", "--draw", str(path), "--pictures", str(tmp_path)]) == 0
    assert len(figures) >= 2
    for figure in figures.values():
        assert_legible(figure)
    shown = {picture: path.parent / picture for picture in figures if (path.parent / picture).exists()}
    if path.parent.name == "h200" and path.stem == "paper":
        shown["paper-summary.png"] = PICTURES / "paper-summary.png"
    for name, picture in shown.items():
        assert size(picture) == size(tmp_path / name), f"{picture} is out of date: cuflash bench --draw {path}"


def test_the_picture_of_errors_is_legible_on_a_phone(figures: dict[str, Any], tmp_path: Path) -> None:
    drawn = tmp_path / "accuracy.png"
    assert main(["accuracy", "--draw", str(RESULTS / "accuracy.json"), "--picture", str(drawn)]) == 0
    assert_legible(figures["accuracy.png"])
    assert size(drawn) == size(RESULTS / "accuracy.png")


def test_the_picture_of_ranks_is_legible_on_a_phone(
    figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "RANKS", (1, 16))  # all schemes
    drawn = tmp_path / "ranks.png"
    assert main(["bench", "ranks", "--picture", str(drawn)]) == 0
    assert_legible(figures["ranks.png"])
    assert size(drawn) == size(PICTURES / "ranks.png")


def test_the_picture_of_the_algorithm_is_legible_on_a_phone(
    figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = tmp_path / "how_it_works.png"
    monkeypatch.setattr(sys, "argv", ["how_it_works.py", str(drawn)])
    monkeypatch.syspath_prepend(ROOT / "examples")
    runpy.run_path(str(ROOT / "examples" / "how_it_works.py"), run_name="__main__")
    assert_legible(figures["how_it_works.png"])
    assert size(drawn) == size(PICTURES / "how_it_works.png")


def test_small_letters_and_labels_over_others_are_noticed() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    axes.set_xticks(range(12), ["one"] * 12, fontsize=13)
    axes.set_yticks(range(12), ["one"] * 12, fontsize=13)
    assert_legible(figure)
    for change, message in (
        (lambda: axes.set_title("small", fontsize=6), "small' has 5"),
        (lambda: axes.set_title("long " * 20, fontsize=13), "is cut off"),
        (lambda: axes.set_xticks(range(12), ["longer labels"] * 12), "lies over"),
    ):
        change()
        with pytest.raises(AssertionError, match=message):
            assert_legible(figure)
        axes.set_title("")
    pyplot.close(figure)
