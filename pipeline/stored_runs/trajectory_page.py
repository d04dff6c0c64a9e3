"""Trajectories as a self-contained HTML page, without scripts or external resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.pipeline.stored_runs.conversations import MessageSpan
    from staleflow.pipeline.stored_runs.views import TokenView, TrajectoryView

HUES = (200, 30, 130, 290, 60, 350)
"""Hues of the versions in a trajectory, oldest first."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid #8886; padding: 1rem 0; }
h2 { font-size: 1rem; margin: 0 0 .4rem; }
dl { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: 0 0 .6rem; font-size: .85rem; }
dt { opacity: .6; } dl div { display: flex; gap: .35rem; } dd { margin: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .6rem .8rem; border-radius: .4rem;
  background: #8881; font: 14px/1.7 ui-monospace, monospace; }
.error { color: #c22; } .legend { font-size: .85rem; opacity: .8; }
span[title] { border-radius: .2rem; }
section { border-left: 3px solid #8886; padding-left: .8rem; margin: .6rem 0; }
section.given { margin-left: 2rem; } section.given pre { opacity: .75; }
h3 { font-size: .85rem; font-weight: 600; margin: 0; } h3 small { font-weight: 400; opacity: .7; }
"""


def page(run: str, views: Sequence[TrajectoryView], description: str) -> str:
    """The HTML of the page. what: branch or model, for the title."""
    body = "\n".join(_article(view) for view in views)
    title = escape(f"{run}: {len(views)} trajectories ({description})")
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>\n'
        f"<h1>{title}</h1>\n<p class=legend>Hover over a token for its version, instance, logprob and ratio.</p>\n"
        f"{body}\n</html>\n"
    )


def _article(view: TrajectoryView) -> str:
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_short(value))}</dd></div>"
        for name, value in [*view.facts.items(), *view.reward_parts.items()]
        if name != "trajectory"
    )
    error = f'<p class="error">{escape(view.error)}</p>' if view.error else ""
    versions = sorted({t.version for t in view.tokens if t.version >= 0})
    sections = "".join(_passage(view, passage, versions) for passage in view.passages) or "<pre></pre>"
    return (
        f'<article id="t{view.id}"><h2>trajectory {view.id}</h2><dl>{facts}</dl>{error}'
        f"<pre>{escape(view.prompt)}</pre>{sections}{_legend(view, versions)}</article>"
    )


def _passage(view: TrajectoryView, passage: MessageSpan, versions: list[int]) -> str:
    tokens = "".join(_token(t, versions) for t in view.tokens[passage.start : passage.stop])
    if len(view.passages) == 1:
        return f"<pre>{tokens}</pre>"
    seconds = f" · {passage.seconds:.2f} s" if passage.seconds else ""
    css_class = "" if passage.sampled else " class=given"
    return f"<section{css_class}><h3>{escape(passage.role)}<small>{seconds}</small></h3><pre>{tokens}</pre></section>"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _token(token: TokenView, versions: list[int]) -> str:
    if token.version < 0:
        return f'<span title="{escape(f"given by {token.instance}, id {token.id}")}">{escape(token.text)}</span>'
    tooltip = f"version {token.version} on {token.instance}, logprob {token.logprob:.4f}, id {token.id}"
    if token.ratio is not None:
        tooltip += f", ratio {token.ratio:.4f}"
    return f'<span title="{escape(tooltip)}" style="background:{_colour(token, versions)}">{escape(token.text)}</span>'


def _colour(token: TokenView, versions: list[int]) -> str:
    if token.ratio is None:
        return _version_colour(versions.index(token.version))
    # Red above 1, blue below, full at a factor of e.
    strength = min(1.0, abs(math.log(max(token.ratio, 1e-30))))
    return f"hsl({0 if token.ratio > 1 else 220} 90% 55% / {0.75 * strength:.2f})"


def _version_colour(index: int) -> str:
    return f"hsl({HUES[index % len(HUES)]} 80% 55% / .3)"


def _legend(view: TrajectoryView, versions: list[int]) -> str:
    if any(token.ratio is not None for token in view.tokens):
        return "<p class=legend>Red: more likely under the model than when sampled; blue: less likely.</p>"
    marks = " ".join(
        f'<span style="background:{_version_colour(i)}">&nbsp;version {version}&nbsp;</span>'
        for i, version in enumerate(versions)
    )
    return f"<p class=legend>{marks}</p>"
