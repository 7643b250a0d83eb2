"""Write the pictures of README: a step (drawn here) and the requests that memory holds (from serving records).

python launch/docs/pictures.py          # docs/images/step.svg, docs/images/requests-in-memory.png
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "tests" / "bench" / "results"

#: A bar group each, and the record it is of. The last is from before replay rewound states.
MODELS = {
    "Qwen3-Next-80B, two H200": "2026-11-23-h200-serving-qwen3-next-chain4.json",
    "Nemotron-Nano-9B-v2, one H200": "2026-11-22-h200-serving-nemotron-chain4.json",
    "Qwen3.5-35B-A3B, one H200": "2026-11-21-h200-serving-qwen3.5-chain4.json",
}
#: The servers' modes in their order: title, colour.
BARS = {
    "none": ("no speculation", "#9a9a9a"),
    "stock": ("SGLang's verify", "#d1605e"),
    "replayssm": ("its ReplaySSM flag", "#e8a33d"),
    "slots": ("slots", "#6a9fb5"),
    "replay": ("replay, SGLang's\nradix strategy", "#7fbf7b"),
    "rewind": ("replay", "#1b7837"),
}


def requests_in_memory(record: Mapping[str, Any]) -> dict[str, int]:
    """Requests that a server of each mode runs at a time, as SGLang itself said: at most what the benchmark asked
    for."""
    return {server["mode"]: int(server["max_running_requests"]) for server in record["servers"]}


def draw_requests(path: Path) -> None:
    """Grouped bars of `requests_in_memory`, a group a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(MODELS), figsize=(11, 3), tight_layout=True)
    for panel, (title, name) in zip(panels, MODELS.items(), strict=True):
        held = requests_in_memory(json.loads((RESULTS / name).read_text(encoding="utf-8")))
        modes = [mode for mode in BARS if mode in held][::-1]
        bars = panel.barh(
            [BARS[mode][0] for mode in modes], [held[mode] for mode in modes], color=[BARS[mode][1] for mode in modes]
        )
        panel.bar_label(bars, padding=3)
        panel.margins(x=0.15)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("requests at a time, same memory", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------- a step

STATE, INPUT, INK, FAINT = "#1b7837", "#f0c36d", "#222222", "#777777"


def _text(x: float, y: float, words: str, size: int = 13, *, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def _state(x: float, y: float, label: str, *, written: bool = False) -> str:
    """A whole recurrent state; a written one is filled."""
    fill, ink = (STATE, "white") if written else ("white", STATE)
    box = f'<rect x="{x}" y="{y}" width="52" height="52" rx="4" fill="{fill}" stroke="{STATE}" stroke-width="2"/>'
    return box + _text(x + 26, y + 31, label, 14, colour=ink, anchor="middle")


def _inputs(x: float, y: float, labels: list[str], pending: int) -> str:
    """Inputs of tokens in a window: ``pending`` ones are filled, those of this step's nodes are not."""
    drawn = []
    for place, label in enumerate(labels):
        fill = INPUT if place < pending else "white"
        left = x + 22 * place
        drawn.append(f'<rect x="{left}" y="{y}" width="18" height="18" rx="2" fill="{fill}" stroke="#b8862b"/>')
        drawn.append(_text(left + 9, y + 13, label, 10, anchor="middle"))
    return "".join(drawn)


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{FAINT}" stroke-width="1.6" marker-end="url(#head)" fill="none"/>'
    )


def step() -> str:
    """The diagram of a step with a chain of four nodes of which two are accepted, as SVG."""
    columns = {"verify": 200, "commit": 490, "once in several steps": 720}
    parts = [_text(x, 28, name, 15, colour=FAINT) for name, x in columns.items()]
    # SGLang: a state a node, one of them copied back
    parts += [_text(16, 92, "SGLang", 16), _text(16, 112, "a state a draft node", 12, colour=FAINT)]
    parts += [_state(200, 66, "S"), _arrow(256, 92, 280, 92)]
    parts += [_state(284 + 46 * node, 50 + 12 * node, f"S{node + 1}", written=True) for node in range(4)]
    parts += [_state(560, 66, "S2", written=True), _arrow(484, 92, 554, 92), _text(492, 84, "copy", 12, colour=FAINT)]
    # replay: the state is read, inputs are kept
    parts += [_text(16, 222, "replay", 16), _text(16, 242, "inputs of the tokens", 12, colour=FAINT)]
    parts += [_state(200, 196, "S"), _arrow(256, 222, 280, 222)]
    parts += [_inputs(286, 213, ["a", "b", "1", "2", "3", "4"], pending=2)]
    parts += [_arrow(424, 222, 484, 222), _inputs(490, 213, ["a", "b", "1", "2"], pending=4)]
    parts += [_text(490, 252, "a count: nothing is copied", 12, colour=FAINT)]
    parts += [_arrow(584, 222, 714, 222), _state(720, 196, "S'", written=True)]
    parts += [_text(782, 218, "pending tokens", 12, colour=FAINT), _text(782, 234, "folded, float32", 12, colour=FAINT)]
    # what the boxes mean
    parts += [_state(200, 290, "", written=False), _text(262, 312, "a state, read", 12)]
    parts += [_text(262, 330, "1 to 5 MB a layer", 12, colour=FAINT), _state(430, 290, "", written=True)]
    parts += [
        _text(492, 320, "a state, written", 12),
        _inputs(640, 307, [""], 1),
        _text(668, 320, "a token's inputs: a few KB", 12),
    ]
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 360" font-family="sans-serif" role="img">
<title>A step with a chain of four nodes, two of them accepted</title>
<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">
<path d="M0 0 L6 3 L0 6 z" fill="{FAINT}"/></marker></defs>
<rect width="900" height="360" fill="white"/>
{body}
</svg>
"""


if __name__ == "__main__":
    (IMAGES / "step.svg").write_text(step(), encoding="utf-8")
    draw_requests(IMAGES / "requests-in-memory.png")
