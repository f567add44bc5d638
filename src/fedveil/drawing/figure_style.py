"""What all pictures share: colours, markers, dashes, quiet axes, panels in a grid, and how a picture is saved."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedveil.errors import ConfigError
from fedveil.ledger.files import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure

INK, MUTED, BLUE, ORANGE, GREEN, AMBER = "#222222", "#777777", "#0072B2", "#D55E00", "#009E73", "#E69F00"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", AMBER, "#56B4E9", "#8A7F00", MUTED)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES = ("-", "--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)))


def style(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the series at `index`: series differ without colour too."""
    names = ("color", "marker", "linestyle")
    return {name: kinds[index % len(kinds)] for name, kinds in zip(names, (COLOURS, MARKERS, DASHES), strict=True)}


def writable(path: str | Path) -> Path:
    """The path of a picture to be written.

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
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(figure: Figure, count: int, across: int) -> list[Axes]:
    """The axes of `count` panels, at most `across` beside each other, left to right and down; empty places are not drawn."""
    across = min(across, count)
    axes = list(figure.subplots(-(-count // across), across, squeeze=False).ravel())
    for axis in axes[count:]:
        axis.set_axis_off()
    return axes[:count]


def quiet(axis: Axes, grid: Literal["both", "x", "none"] = "both", size: float | None = None) -> None:
    """No frame at the top and the right, and a pale grid. size: of the tick labels, in points."""
    axis.spines[["top", "right"]].set_visible(False)
    if grid != "none":
        axis.grid(axis=grid, alpha=0.25)
    if size is not None:
        axis.tick_params(labelsize=size)


def by_round(axis: Axes) -> None:
    """The x axis counts rounds: ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("round", fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(figure: Figure, axis: Axes) -> None:
    """The legend of one panel under the whole figure, as many entries beside each other as there is room for."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        wide = 0.5 + 0.068 * max(map(len, labels))  # inches of one entry at this size of letters
        beside = max(1, min(len(labels), int(figure.get_figwidth() / wide)))
        figure.legend(handles, labels, loc="outside lower center", ncols=beside, frameon=False, fontsize=8)


def save(figure: Figure, path: Path, description: str | None = None, dpi: int = 150, *, private: bool = False) -> Path:
    """Write the figure and return its path; the suffix gives the format. The same figure gives the same file.

    Args:
        description: kept among the metadata of a .png. dpi: pixels an inch. private: for its owner alone (mode 600).
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
