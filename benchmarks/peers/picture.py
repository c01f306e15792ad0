"""The figures as a picture: an SVG of horizontal bars, written by hand, readable on light and dark.

Does not know what the bars mean; it is given texts and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

_WIDTH, _LEFT, _RIGHT, _TOP = 760, 200, 60, 84
_BAR, _GAP, _ROW = 15, 3, 58
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.a { fill: #9ec1ea } .b { fill: #1f6feb } .spread { stroke: #24292f } .grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .a { fill: #31507a } .b { fill: #4493f8 } .spread { stroke: #e6edf3 } .grid { stroke: #3d444d }
}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar's length in seconds, and the least and the most that was measured."""

    value_s: float
    least_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A name, a remark below it, and its two bars; None says that there is nothing to show."""

    name: str
    remark: str
    bars: tuple[Bar | None, Bar | None]


def draw(title: str, legend: tuple[str, str], rows: Sequence[Row]) -> str:
    """The picture's text."""
    longest = max((bar.most_s for row in rows for bar in row.bars if bar), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    height = _TOP + _ROW * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="16" y="28">{escape(title)}</text>',
        *_legend(legend),
        *_grid(longest, scale, height - 24),
    ]
    for number, row in enumerate(rows):
        parts += _row(row, _TOP + _ROW * number, scale)
    return "\n".join([*parts, "</svg>", ""])


def _legend(legend: tuple[str, str]) -> Iterator[str]:
    for style, x, text in zip("ab", (_LEFT, _LEFT + 200), legend, strict=True):
        yield f'<rect class="{style}" x="{x}" y="44" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 18}" y="55">{escape(text)}</text>'


def _grid(longest: float, scale: float, bottom: int) -> Iterator[str]:
    """Lines at round values, ten at most beside the one at zero."""
    unit = 10.0 ** floor(log10(longest / 10))
    unit *= next((factor for factor in (1, 2, 5) if longest / (unit * factor) <= 10), 10)
    for number in range(int(longest / unit) + 1):
        x = _LEFT + number * unit * scale
        yield f'<path class="grid" d="M{x:.1f} {_TOP - 12}V{bottom}"/>'
        yield (
            f'<text class="small" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">'
            f"{number * unit:g} s</text>"
        )


def _row(row: Row, y: int, scale: float) -> Iterator[str]:
    yield f'<text x="16" y="{y + 12}">{escape(row.name)}</text>'
    yield f'<text class="small" x="16" y="{y + 28}">{escape(row.remark)}</text>'
    for style, number, bar in zip("ab", range(2), row.bars, strict=True):
        top = y + number * (_BAR + _GAP)
        if bar is None:
            yield f'<text class="small" x="{_LEFT + 6}" y="{top + 12}">not measured</text>'
            continue
        least, most = _LEFT + bar.least_s * scale, _LEFT + bar.most_s * scale
        width, middle = bar.value_s * scale, top + _BAR / 2
        yield (
            f'<rect class="{style}" x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}" '
            'rx="2"/>'
        )
        yield f'<path class="spread" d="M{least:.1f} {middle}H{most:.1f}"/>'
        yield f'<text class="small" x="{most + 6:.1f}" y="{top + 12}">{bar.value_s:.1f} s</text>'
