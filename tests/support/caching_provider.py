"""A provider's prompt cache by its written rules, as a second opinion beside the simulator.

It knows prompts as the JSON bodies that providers get, and nothing of this package. A prompt is a
list of content blocks; a mark stands behind one. What is stored is the whole prefix up to a mark.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Json = dict[str, Any]
Protocol = Literal["anthropic", "openai"]

LIFETIMES = {"5m": 300.0, "1h": 3_600.0, "30m": 1_800.0}
MOST_MARKS = 4
LOOK_BACK = 20
MOST_CONSIDERED = 80


class RefusedError(Exception):
    """The provider answers with status 400."""


class Piece(NamedTuple):
    """One content block of a prompt, with the lifetime that is written on it, if it is marked."""

    content: str
    tokens: int
    mark: str | None = None


@dataclass(frozen=True)
class Usage:
    """Prompt tokens by what is paid for them; together they are the prompt."""

    uncached: int = 0
    read: int = 0
    written: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.uncached + self.read + sum(self.written.values())

    def bill(self) -> float:
        factors = {"5m": 1.25, "1h": 2.0, "30m": 1.25}
        paid = sum(factors[ttl] * tokens for ttl, tokens in self.written.items())
        return self.uncached + 0.1 * self.read + paid


def count_tokens(text: str) -> int:
    """Words and signs; those of two texts that part between words add up."""
    return len(re.findall(r"\w+|[^\w\s]", text))


class Provider:
    """The cache of one model.

    Args:
        protocol: Whose rules.
        minimum: Shortest prefix that is stored, in tokens.
    """

    def __init__(self, protocol: Protocol, minimum: int = 1_024) -> None:
        self.protocol = protocol
        self.minimum = minimum
        self._dies_at: dict[bytes, float] = {}
        self._lifetimes: dict[bytes, float] = {}

    def take(self, body: Json, now: float) -> Usage:
        """Reckon one request, and store what it writes at once."""
        usage, stored = self.read(body, now)
        self.store(stored, now)
        return usage

    def read(self, body: Json, now: float) -> tuple[Usage, dict[bytes, float]]:
        """Reckon one request; return also for how long each prefix is to be stored."""
        pieces, implicit = self._pieces(body)
        hashes, ends = self._prefixes(pieces, str(body.get("prompt_cache_key") or ""))
        marks = [n for n, piece in enumerate(pieces, 1) if piece.mark is not None]
        if self.protocol == "anthropic":
            looked_at = {n - back for n in marks for back in range(LOOK_BACK) if n > back}
            written = marks
        else:
            looked_at = set(marks[-MOST_CONSIDERED:])
            written = marks[-(MOST_MARKS - 1) :] if implicit else marks[-MOST_MARKS:]
            if implicit and pieces:
                looked_at.add(len(pieces))
                written = sorted({*written, len(pieces)})
        alive = [n for n in looked_at if self._dies_at.get(hashes[n], 0.0) > now]
        hit = max(alive, default=0)
        stored: dict[bytes, float] = {}
        if hit:
            stored[hashes[hit]] = 0.0  # whatever it lived for
        paid: dict[str, int] = {}
        reached = ends[hit]
        for n in written:
            ttl = pieces[n - 1].mark or "30m"
            if ends[n] < self.minimum:
                continue
            stored[hashes[n]] = LIFETIMES[ttl]
            if ends[n] > reached:
                paid[ttl] = paid.get(ttl, 0) + ends[n] - reached
                reached = ends[n]
        return Usage(ends[-1] - reached, ends[hit], paid), stored

    def store(self, stored: dict[bytes, float], now: float) -> None:
        """Store what a request writes: what it reads begins to live anew."""
        for prefix, lifetime in stored.items():
            lifetime = lifetime or self._lifetimes[prefix]
            self._lifetimes[prefix] = lifetime
            self._dies_at[prefix] = now + lifetime

    def _prefixes(self, pieces: list[Piece], before: str) -> tuple[list[bytes], list[int]]:
        hashes, ends = [hashlib.sha256(before.encode()).digest()], [0]
        for piece in pieces:
            whole = hashes[-1] + piece.content.encode("utf-8", "surrogatepass")
            hashes.append(hashlib.sha256(whole).digest())
            ends.append(ends[-1] + piece.tokens)
        return hashes, ends

    def _pieces(self, body: Json) -> tuple[list[Piece], bool]:
        """Return a prompt's content blocks, and whether there is a mark at its end anyway."""
        if self.protocol == "anthropic":
            return self._anthropic_pieces(body), False
        options = body.get("prompt_cache_options") or {}
        messages = body.get("messages")
        if messages is None:
            given = body["input"]
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            if body.get("instructions"):
                messages = [{"role": "system", "content": body["instructions"]}, *messages]
        pieces = [Piece(f"tool {_canonical(one)}", 5) for one in body.get("tools") or ()]
        for number, message in enumerate(messages):
            content = message.get("content") or ""
            for block in [content] if isinstance(content, str) else content:
                where = f"{number} {message.get('role')} "
                if isinstance(block, str):
                    pieces.append(Piece(where + block, count_tokens(block)))
                    continue
                mark = block.get("prompt_cache_breakpoint")
                if mark is not None and mark != {"mode": "explicit"}:
                    raise RefusedError("prompt_cache_breakpoint must be {'mode': 'explicit'}")
                text = block.get("text")
                bare = {name: block[name] for name in block if name != "prompt_cache_breakpoint"}
                said = text if isinstance(text, str) else _canonical(bare)
                ttl = None if mark is None else options.get("ttl", "30m")
                pieces.append(Piece(where + said, count_tokens(said), ttl))
        return pieces, options.get("mode", "implicit") == "implicit"

    def _anthropic_pieces(self, body: Json) -> list[Piece]:
        blocks = [("tools", one) for one in body.get("tools") or ()]
        system = body.get("system") or []
        blocks += [("system", one) for one in ([system] if isinstance(system, str) else system)]
        for number, message in enumerate(body["messages"]):
            content = message["content"]
            if message["role"] not in ("user", "assistant"):
                raise RefusedError("messages: role must be user or assistant")
            where = f"{number} {message['role']}"
            blocks += [(where, one) for one in ([content] if isinstance(content, str) else content)]
        pieces = []
        for where, block in blocks:
            if isinstance(block, str):
                if not block.strip():
                    raise RefusedError("text content blocks must be non-empty")
                pieces.append(Piece(f"{where} {block}", count_tokens(block)))
                continue
            if block.get("type") == "text" and not block["text"].strip():
                raise RefusedError("text content blocks must contain non-whitespace text")
            mark = block.get("cache_control")
            if mark is not None and mark.get("type") != "ephemeral":
                raise RefusedError("cache_control: type must be ephemeral")
            ttl = None if mark is None else mark.get("ttl", "5m")
            bare = {name: block[name] for name in block if name != "cache_control"}
            said = bare["text"] if set(bare) == {"type", "text"} else _canonical(bare)
            pieces.append(Piece(f"{where} {said}", count_tokens(said), ttl))
        if "cache_control" in body:  # the provider puts a mark behind the last block by itself
            ttl = (body["cache_control"] or {}).get("ttl", "5m")
            pieces[-1] = pieces[-1]._replace(mark=pieces[-1].mark or ttl)
        marks = [piece.mark for piece in pieces if piece.mark is not None]
        if len(marks) > MOST_MARKS:
            raise RefusedError(
                f"A maximum of 4 blocks with cache_control may be provided. Found {len(marks)}."
            )
        if sorted(marks, key=lambda ttl: -LIFETIMES[ttl]) != marks:
            raise RefusedError("a ttl='1h' cache_control block must not come after a ttl='5m' one")
        return pieces


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)
