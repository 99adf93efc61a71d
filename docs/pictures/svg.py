"""A little SVG: boxes, arrows and words, so that the pictures of the pages stay small and exact."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, GREY, PAPER = "#1f2933", "#7b8794", "#ffffff"
BLUE, TEAL, AMBER, ROSE, PALE = "#1f6feb", "#2a9d8f", "#e9a23b", "#d1495b", "#eef1f4"
TINTS = ["#dbe9ff", "#d8f0ed", "#fdeccd", "#f8dadf", "#e6e0f8", "#e3efd3"]
_STYLE = "font-family:ui-sans-serif,system-ui,Helvetica,Arial,sans-serif"


class Picture:
    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PALE,
        *,
        stroke: str = "none",
        round: float = 5,
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def bars(self, bars: list[tuple[float, float, float, float]], fill: str) -> None:
        """Boxes (x, y, width, height) as one path."""
        path = "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h{-w:g}z" for x, y, w, h in bars)
        self.parts.append(f'<path fill="{fill}" d="{path}"/>')

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        style = ' font-family="ui-monospace,Menlo,monospace"' if mono else ""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}"{weight}{style}>{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], stroke: str = GREY, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.5"{dash} '
            'marker-end="url(#tip)"/>'
        )

    def line(self, *points: tuple[float, float], stroke: str = GREY, width: float = 1) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"/>'
        )

    def text(self) -> str:
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" style="{_STYLE}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<defs>{tip}</defs>",
            f'<rect width="{self.width:g}" height="{self.height:g}" fill="{PAPER}"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def save(self, script: str) -> None:
        """Writes the picture to the script's folder, under the script's name."""
        Path(script).with_suffix(".svg").write_text(self.text())
