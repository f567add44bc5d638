"""Drawing with matplotlib: style, rows of images, saving. No other module imports matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError
from fedveil.ledger.files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure


INK, MUTED, BLUE, ORANGE, GREEN, AMBER, RED = "#222222", "#777777", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#C62828"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", AMBER, "#56B4E9", "#8A7F00", MUTED)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES = ("-", "--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)))


def style(index: int) -> dict[str, Any]:
    """Return colour, marker and dash of the series at `index`; series differ without colour, too."""
    names = ("color", "marker", "linestyle")
    return {name: kinds[index % len(kinds)] for name, kinds in zip(names, (COLOURS, _MARKERS, DASHES), strict=True)}


@dataclass(frozen=True)
class Paper:
    """Size and font of a figure in a paper.

    Args:
        width, height: in inches. font: family; "" for the usual one. points: of all letters.
    """

    width: float
    height: float
    font: str = ""
    points: float = 8.0

    @classmethod
    def of(cls, size: str, font: str = "") -> Paper:
        """Return the size and font that options describe, such as "3.4x2.4" and "Times New Roman:8".

        Raises:
            ConfigError: of another form.
        """
        family, _, points = font.rpartition(":") if ":" in font else (font, "", "8")
        try:
            width, height = map(float, size.split("x"))
            return cls(width, height, family, float(points))
        except ValueError:
            raise ConfigError(
                f"--figure {size} --font {font!r}: give WIDTHxHEIGHT in inches and FAMILY:POINTS, such as --figure 3.4x2.4 "
                f"--font 'Times New Roman:8'"
            ) from None

    def fit(self, figure: Figure) -> None:
        """Set size and font of a drawn figure."""
        from matplotlib.text import Text

        figure.set_size_inches(self.width, self.height)
        for text in figure.findobj(Text):
            text.set_fontsize(self.points)
            if self.font:
                text.set_fontfamily(self.font)


def writable(path: str | Path) -> Path:
    """Return the path of a picture after checking that it can be written.

    Raises:
        ConfigError: the suffix is not .png, .svg or .pdf, or the folder does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise ConfigError(f"cannot draw to {str(path)!r}; give a file name that ends in .png, .svg or .pdf")
    if not target.parent.is_dir():
        raise ConfigError(f"cannot draw to {str(path)!r}: the folder {str(target.parent)!r} does not exist")
    return target


def blank(width: float, height: float) -> Figure:
    """Return an empty figure; sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(figure: Figure, count: int, across: int) -> list[Axes]:
    """Return the axes of `count` panels, at most `across` in a row, from left to right and down; empty places are hidden."""
    across = min(across, count)
    axes = list(figure.subplots(-(-count // across), across, squeeze=False).ravel())
    for axis in axes[count:]:
        axis.set_axis_off()
    return axes[:count]


def quiet(axis: Axes, grid: Literal["both", "x", "none"] = "both", size: float | None = None) -> None:
    """Remove the frame at the top and the right, and draw a pale grid. size: of the tick labels, in points."""
    axis.spines[["top", "right"]].set_visible(False)
    if grid != "none":
        axis.grid(axis=grid, alpha=0.25)
    if size is not None:
        axis.tick_params(labelsize=size)


def by_round(axis: Axes) -> None:
    """Set ticks of the x axis at whole numbers only, since it counts rounds."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("round", fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(figure: Figure, axis: Axes) -> None:
    """Draw the legend of one panel under the figure, with as many entries in a row as fit."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        wide = 0.5 + 0.068 * max(map(len, labels))  # width of one entry in inches at this font size
        beside = max(1, min(len(labels), int(figure.get_figwidth() / wide)))
        figure.legend(handles, labels, loc="outside lower center", ncols=beside, frameon=False, fontsize=8)


def save(figure: Figure, path: Path, description: str | None = None, dpi: int = 150, *, private: bool = False) -> Path:
    """Write the figure and return its path; the suffix sets the format. Equal figures give equal files.

    Args:
        description: stored in the metadata of a .png. dpi: pixels per inch. private: readable for the owner only (mode 600).
    """
    from matplotlib import rc_context

    kind = path.suffix.lower()
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(kind)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedveil"}):
        figure.savefig(
            drawn := BytesIO(),
            dpi=dpi,
            format=kind[1:] or None,
            metadata={"Description": description} if description else metadata,
        )
    write_output(path, drawn.getvalue(), private=private)
    return path


def save_rows(path: Path, rows: Sequence[tuple[str, NDArray[np.float32], Sequence[str]]], title: str) -> Path:
    """Write a picture of examples, which only its owner may read.

    Args:
        path: ends in .png, .pdf or .svg. rows: name, images (n, height, width, 1 or 3) in [0, 1], and a caption for each; every
            row has as many images as the first.
    """
    n = len(rows[0][1])
    width = max(1.1 * n + 1.4, 6.0)
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, int(width * 14))]
    figure = blank(width, 1.42 * len(rows) + 0.1 + 0.18 * len(lines))
    figure.suptitle("\n".join(lines), fontsize=9)
    axes = figure.subplots(len(rows), n, squeeze=False)
    for line, (name, images, captions) in zip(axes, rows, strict=True):
        for axis, image, caption in zip(line, images, captions, strict=True):
            axis.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_xlabel(caption, fontsize=8)
        line[0].set_ylabel(name, fontsize=8)
    return save(figure, path, dpi=120, private=True)
