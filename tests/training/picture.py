"""A run as an SVG: the reward of each step, and what held-out questions earned before and after. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tests.training.measures import Run

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 40, 44
BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#6b7280"


def draw(run: Run, title: str) -> str:
    """Return the picture's text."""
    last = max(len(run.steps) - 1, 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(reward: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * reward

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=14),
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e7eb"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{tenth / 10:.1f}", anchor="end", colour=GREY))
    parts += [
        _text(x(step), HEIGHT - BOTTOM + 18, str(step), anchor="middle", colour=GREY)
        for step in range(0, len(run.steps), max(1, len(run.steps) // 8))
    ]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step", anchor="middle", colour=GREY))
    parts.append(_line([(x(each.number), y(each.reward)) for each in run.steps]))
    for step, reward, anchor in ((0, run.before, "start"), (last, run.after, "end")):
        parts.append(f'<circle cx="{x(step):.1f}" cy="{y(reward):.1f}" r="5" fill="{ORANGE}"/>')
        shift = 9 if anchor == "start" else -9
        parts.append(_text(x(step) + shift, y(reward) + 16, f"held out {reward:.2f}", anchor=anchor, colour=ORANGE))
    return "\n".join([*parts, "</svg>", ""])


def _line(points: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#111827", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} fill="{colour}" font-size="{size}">{text}</text>'
