# Copyright 2026 The transformers_dflash2 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A generate call taken apart, as data, as text for a terminal and as an HTML page."""

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .generation import DFlash2Stats


# What became of a token. "unused" ones were drafted behind the last token that was wanted.
_MEANINGS = {
    "accepted": "drafted and kept",
    "rejected": "drafted and refused",
    "unused": "drafted behind the end",
    "bonus": "the target's own",
}
# Kinds differ in more than colour: refused tokens are struck through, the target's own are underlined.
_ANSI = {"accepted": "\033[32m", "rejected": "\033[31;9m", "unused": "\033[2m", "bonus": "\033[34;4m"}
_ANSI_END = "\033[0m"
_MARKS = {"accepted": ("", ""), "rejected": ("~", "~"), "unused": ("(", ")"), "bonus": ("[", "]")}
_SHOWN_CANDIDATES = 6
_BAR = 40


@dataclass
class TracedRound:
    """
    One block.

    Args:
        proposed (`list[int]`): The drafted tokens.
        accepted (`int`): How many of them were committed.
        bonus (`int`, *optional*): The target's own token behind them; `None` where the text ended before it.
        candidate_ids (`list[list[int]]`): The tokens that each slot chose from.
        q (`list[list[float]]`):
            The drafter's probability of each candidate, given the slots before: the one it drew from, and for a greedy
            choice that at temperature 1.
        p (`list[list[float]]`):
            The target's probability of each candidate, after the request's processors. Slots behind the first refused
            one have none: the target was asked about them with a prefix that did not come true.
    """

    proposed: list[int]
    accepted: int
    bonus: int | None
    candidate_ids: list[list[int]]
    q: list[list[float]]
    p: list[list[float]] = field(default_factory=list)

    @property
    def committed(self) -> int:
        """Tokens that the round added to the text."""
        return self.accepted + (self.bonus is not None)

    def tokens(self) -> Iterator[tuple[int, str]]:
        """Every token of the round with its kind, refused ones between the accepted ones and the target's own."""
        for token in self.proposed[: self.accepted]:
            yield token, "accepted"
        for token in self.proposed[self.accepted :]:
            yield token, "unused" if self.bonus is None else "rejected"
        if self.bonus is not None:
            yield self.bonus, "bonus"


@dataclass
class Trace:
    """
    One `generate` call, taken apart.

    Args:
        prompt_ids (`list[int]`): The prompt.
        new_ids (`list[int]`): The text that was generated; its first token is the prefill's.
        rounds (`list[TracedRound]`): The blocks, in order.
        stats ([`DFlash2Stats`]): Figures of the call.
        tokenizer (*optional*): Turns ids into text for the renderings.
    """

    prompt_ids: list[int]
    new_ids: list[int]
    rounds: list[TracedRound]
    stats: DFlash2Stats
    tokenizer: Any = None

    def text_of(self, token: int) -> str:
        """A token as text, or its id where there is no tokenizer."""
        if self.tokenizer is None:
            return f"{token} "
        text = self.tokenizer.decode([token])
        # Part of a character.
        return self.tokenizer.convert_ids_to_tokens([token])[0] if "\ufffd" in text else text

    def acceptance_by_position(self) -> list[float]:
        """Share of rounds in which the token at offset 1, 2, ... of the block was committed, of those that had one."""
        drafted, accepted = self.stats.drafted_per_position, self.stats.accepted_per_position
        return [kept / offered for kept, offered in zip(accepted, drafted, strict=False) if offered]

    def committed_by_round(self) -> list[int]:
        """Tokens that each round committed, its bonus included."""
        return [entry.committed for entry in self.rounds]

    def to_text(self, *, color: bool = True, block: int | None = None) -> str:
        """
        The trace for a terminal.

        Args:
            color (`bool`, *optional*, defaults to `True`): Use ANSI colours; otherwise marks tell the kinds apart.
            block (`int`, *optional*): Number of a round, from 1, whose candidates are listed.
        """
        return _render_text(self, color=color, block=block)

    def __str__(self) -> str:
        return self.to_text(color=False)

    def to_html(self, *, block: int | None = None) -> str:
        """The trace as one HTML page that needs nothing else; `block` is the round it opens with."""
        return _render_html(self, block=block)

    def save_html(self, path: str | Path, *, block: int | None = None) -> None:
        """Write [`to_html`] to a file."""
        Path(path).write_text(self.to_html(block=block), encoding="utf-8")


def _chosen(trace: Trace, block: int | None) -> int | None:
    """Index of the round to show: the one that is asked for, or the first one that was refused in part."""
    if block is not None:
        if not 1 <= block <= len(trace.rounds):
            raise ValueError(f"block={block} is outside of the {len(trace.rounds)} rounds of this trace, from 1 on.")
        return block - 1
    refused = (i for i, entry in enumerate(trace.rounds) if entry.accepted < len(entry.proposed))
    return next(refused, 0 if trace.rounds else None)


def _summary(trace: Trace) -> str:
    stats = trace.stats
    return (
        f"{len(trace.new_ids)} tokens in {stats.target_passes} target passes; {stats.rounds} rounds, "
        f"{stats.mean_accepted_length:.2f} tokens per round, {stats.accepted} of {stats.drafted} drafted tokens kept"
    )


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")


def _spelled(trace: Trace, token: int) -> str:
    """A token on its own, its spaces visible."""
    return _visible(trace.text_of(token)).replace(" ", "·")


def _candidates(entry: TracedRound, slot: int) -> list[tuple[int, float, float | None]]:
    """Candidates of a slot by the drafter's probability: id, q, p."""
    p = entry.p[slot] if slot < len(entry.p) else [None] * len(entry.q[slot])
    rows = zip(entry.candidate_ids[slot], entry.q[slot], p, strict=True)
    ranked = sorted(rows, key=lambda row: (-row[1], -(row[2] or 0.0)))
    return ranked[:_SHOWN_CANDIDATES]


def _fate(entry: TracedRound, slot: int) -> str:
    return [kind for _, kind in entry.tokens()][slot]


# ------------------------------------------------------------------------------------------------ terminal


def _render_text(trace: Trace, *, color: bool, block: int | None) -> str:
    def styled(text: str, kind: str) -> str:
        if color:
            return f"{_ANSI[kind]}{text}{_ANSI_END}"
        before, after = _MARKS[kind]
        return f"{before}{text}{after}"

    def shown(token: int) -> str:
        return _visible(trace.text_of(token))

    lines = [_summary(trace), "  ".join(styled(meaning, kind) for kind, meaning in _MEANINGS.items()), ""]
    lines.append(f"{'round':>5}  {'kept':>5}  tokens")
    if trace.new_ids:
        lines.append(f"{'':>5}  {'':>5}  {styled(shown(trace.new_ids[0]), 'bonus')}")
    for number, entry in enumerate(trace.rounds, start=1):
        tokens = "".join(styled(shown(token), kind) for token, kind in entry.tokens())
        kept = f"{entry.accepted}/{len(entry.proposed)}"
        lines.append(f"{number:>5}  {kept:>5}  {tokens}")

    lines += ["", "kept, by position in the block"]
    for position, share in enumerate(trace.acceptance_by_position(), start=1):
        lines.append(f"{position:>5}  {'█' * round(_BAR * share):<{_BAR}}  {share:4.0%}")
    lines += ["", f"tokens per round, in order: {' '.join(map(str, trace.committed_by_round()))}"]

    index = _chosen(trace, block)
    if index is not None:
        entry = trace.rounds[index]
        lines += ["", f"round {index + 1}: candidates with the drafter's and the target's probability"]
        for slot, token in enumerate(entry.proposed):
            cells = [
                f"{_spelled(trace, candidate)} {q:.2f}/{'-' if p is None else f'{p:.2f}'}"
                for candidate, q, p in _candidates(entry, slot)
            ]
            drafted = styled(_spelled(trace, token), _fate(entry, slot))
            lines.append(f"{slot + 1:>5}  {drafted}  |  {'  '.join(cells)}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ page

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --line: #d5dae0; --soft: #f4f6f8;
  --accepted: #d3efdc; --rejected: #f9d7d5; --unused: #e8eaed; --bonus: #d4e3fb; --bar: #2f7d4f; --mark: #2a5db0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16191c; --line: #3a4046; --soft: #1f2327;
  --accepted: #1f4a30; --rejected: #5a2523; --unused: #33383d; --bonus: #1f3b69; --bar: #57b27d; --mark: #7aa7f0; } }
body { font: 15px/1.6 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.tokens { font: 14px/2 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
.t { border-radius: 4px; padding: 2px 1px; color: inherit; text-decoration: none; }
.accepted { background: var(--accepted); }
.rejected { background: var(--rejected); text-decoration: line-through; }
.unused { background: var(--unused); opacity: .7; }
.bonus { background: var(--bonus); border-bottom: 2px solid var(--mark); }
.legend .t { padding: 2px 6px; margin-right: .6rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { margin: 0; flex: 1 1 22rem; } figcaption { font-size: .85rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg .bar { fill: var(--bar); } svg .axis { stroke: var(--line); }
section.round { display: none; } section.round:target, body:not(:has(section.round:target)) section.chosen
  { display: block; }
table { border-collapse: collapse; font: 13px ui-monospace, monospace; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.c { white-space: pre; } td.c small { opacity: .75; }
"""


def _render_html(trace: Trace, *, block: int | None) -> str:
    chosen = _chosen(trace, block)
    legend = " ".join(f'<span class="t {kind}">{meaning}</span>' for kind, meaning in _MEANINGS.items())
    body = [
        "<h1>Speculative decoding, token by token</h1>",
        f"<p>{html.escape(_summary(trace))}</p>",
        f'<p class="legend">{legend}</p>',
        f'<div class="tokens">{_token_spans(trace)}</div>',
        "<p>A token links to the candidates of its round.</p>",
    ]
    if trace.rounds:
        body += [
            '<div class="plots">',
            _figure(
                _position_plot(trace.acceptance_by_position()), "Share of rounds that kept the token, by position"
            ),
            _figure(_time_plot(trace.committed_by_round()), "Tokens per round over time, the target's own included"),
            "</div>",
        ]
    body += [_round_section(trace, index, is_chosen=index == chosen) for index in range(len(trace.rounds))]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>DFlash 2 trace</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _token_spans(trace: Trace) -> str:
    def text(token: int, *, in_output: bool) -> str:
        visible = html.escape(_visible(trace.text_of(token)))
        # A line break of the text itself breaks the line here as well.
        return visible.replace("⏎", "⏎\n") if in_output else visible

    spans = []
    if trace.new_ids:
        spans.append(f'<span class="t bonus" title="prefill">{text(trace.new_ids[0], in_output=True)}</span>')
    for number, entry in enumerate(trace.rounds, start=1):
        title = f"round {number}: {entry.accepted} of {len(entry.proposed)} kept"
        spans += [
            f'<a class="t {kind}" href="#round-{number}" title="{title}">'
            f"{text(token, in_output=kind in ('accepted', 'bonus'))}</a>"
            for token, kind in entry.tokens()
        ]
    return "".join(spans)


def _round_section(trace: Trace, index: int, *, is_chosen: bool) -> str:
    entry = trace.rounds[index]
    rows = []
    for slot, token in enumerate(entry.proposed):
        cells = "".join(
            f'<td class="c">{html.escape(_spelled(trace, candidate))} '
            f"<small>{q:.2f} / {'–' if p is None else f'{p:.2f}'}</small></td>"
            for candidate, q, p in _candidates(entry, slot)
        )
        drafted = f'<span class="t {_fate(entry, slot)}">{html.escape(_spelled(trace, token))}</span>'
        rows.append(f"<tr><td>{slot + 1}</td><td>{drafted}</td>{cells}</tr>")
    bonus = "" if entry.bonus is None else html.escape(_spelled(trace, entry.bonus))
    own = f' The target went on with <span class="t bonus">{bonus}</span>.' if bonus else ""
    return (
        f'<section id="round-{index + 1}" class="round{" chosen" if is_chosen else ""}"><h2>Round {index + 1}</h2>'
        f"<p>{entry.accepted} of {len(entry.proposed)} drafted tokens kept.{own} Each candidate has the drafter's and "
        "the target's probability; behind the first refused token the target has none.</p>"
        f'<table><tr><th></th><th>drafted</th><th colspan="{_SHOWN_CANDIDATES}">candidates</th></tr>'
        f"{''.join(rows)}</table></section>"
    )


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _position_plot(shares: list[float]) -> str:
    width, height, base = 420, 190, 160
    step = (width - 20) / max(len(shares), 1)
    parts = [f'<line class="axis" x1="10" y1="{base}" x2="{width - 10}" y2="{base}"/>']
    for index, share in enumerate(shares):
        tall, left = 130 * share, 10 + index * step
        middle = left + step / 2
        parts.append(
            f'<rect class="bar" x="{left + step * 0.15:.1f}" y="{base - tall:.1f}" width="{step * 0.7:.1f}" '
            f'height="{tall:.1f}"/><text x="{middle:.1f}" y="{base - tall - 5:.1f}" text-anchor="middle">'
            f'{share:.0%}</text><text x="{middle:.1f}" y="{base + 16}" text-anchor="middle">{index + 1}</text>'
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _time_plot(committed: list[int]) -> str:
    width, height, base = 420, 190, 160
    step, top = (width - 40) / max(len(committed), 1), max(committed, default=1)
    parts = [
        f'<line class="axis" x1="30" y1="{base}" x2="{width - 10}" y2="{base}"/>',
        f'<text x="24" y="{base - 126}" text-anchor="end">{top}</text>',
        f'<text x="24" y="{base}" text-anchor="end">0</text>',
        f'<text x="30" y="{base + 16}">round 1</text>',
        f'<text x="{width - 10}" y="{base + 16}" text-anchor="end">{len(committed)}</text>',
    ]
    for index, count in enumerate(committed):
        tall = 130 * count / top
        parts.append(
            f'<rect class="bar" x="{30 + index * step:.1f}" y="{base - tall:.1f}" width="{max(step - 1, 0.5):.1f}" '
            f'height="{tall:.1f}"><title>round {index + 1}: {count}</title></rect>'
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


__all__ = ["Trace", "TracedRound"]
