"""What the output parser says, in order of generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More answer text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. index counts the calls of one sequence from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON text; all of a call's pieces together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. A call without this event was cut and must not be run."""

    index: int


OutputEvent = ReasoningDelta | ContentDelta | CallStart | CallArguments | CallEnd


def merge_events(events: list[OutputEvent]) -> list[OutputEvent]:
    """Join neighbouring pieces of the same text, so that one step gives one piece of each."""
    merged: list[OutputEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        match last, event:
            case ReasoningDelta(before), ReasoningDelta(after):
                merged[-1] = ReasoningDelta(before + after)
            case ContentDelta(before), ContentDelta(after):
                merged[-1] = ContentDelta(before + after)
            case CallArguments(index, before), CallArguments(same, after) if index == same:
                merged[-1] = CallArguments(index, before + after)
            case _:
                merged.append(event)
    return merged
