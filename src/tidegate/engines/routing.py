"""The choice among the instances of one model.

Least tokens in flight, not requests: a prompt of 30,000 tokens is not one unit. A request goes where its prefix or capability went before, for the
KV cache that is there, unless that instance is the busier by `affinity_tokens`. Long and short requests go to the instances sized for them.

The rule for breakers: an open breaker keeps requests away only while another instance can take them. Where none can, the least ill is asked, so that
a slow engine does not become a dead service by our own doing. What an engine asked for by `Retry-After` holds in any case.

Choosing costs about a microsecond for a few instances: whatever depends on states is brought into tiers when a state changes, and a request looks
through its tier once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.core.ask import Ask
from tidegate.core.errors import EngineDown, EngineError, EngineNotAdmitted, EngineRefused
from tidegate.core.memory import Words
from tidegate.engines.breaker import NEVER_NS
from tidegate.engines.homes import MOST_INSTANCES, Homes, came_back
from tidegate.engines.member import UNBOUNDED, Member
from tidegate.engines.size import answer_tokens, prompt_tokens

#: An instance, and its own name for the model.
Entry = tuple[Member, str]
Tier = list[Entry]

#: Prefixes whose home is remembered, and characters of a prefix that tell it from others.
MOST_HOMES = 16_384
PREFIX_CHARS = 1024
#: Seconds after which one comes back whom no instance has room for.
FULL_RETRY_S = 1.0
#: Seconds after which a member that failed a check is checked again.
AGAIN_S = 60.0


class Route:
    """The instances of one public model name, in the order of the settings."""

    def __init__(
        self, model: str, entries: Sequence[Entry], long_tokens: int, affinity_tokens: int, owner: str = "", homes: Words | None = None
    ) -> None:
        """`owner`: the tenant whose own instances these are; `homes`: where all workers remember what went where, see Homes."""
        self.model = model
        self.owner = owner
        self.entries = list(entries)
        self._long_tokens = long_tokens
        self._affinity_tokens = affinity_tokens
        self._reserves = any(member.high_value_for for member, _ in entries)
        self._scales = any(member.from_requests for member, _ in entries)
        alone = len(entries) == 1
        member = entries[0][0]
        #: Whether there is nothing to choose: one instance, whatever its state.
        self._alone = alone and not member.high_value_for and member.most_tokens == UNBOUNDED and not member.kept
        #: The instance where there is nothing to choose just now.
        self.sole: Entry | None = None
        #: When the tiers have to be made anew, if nothing makes it earlier.
        self.due_ns = 0
        self._shared = member.ledger.workers > 1
        # the number of the newest change that any worker made, and that of the tiers
        self._words, self._seen = member.ledger.words, 0
        self._short: list[Tier] = []
        self._long: list[Tier] = []
        self._weak: list[Tier] = []
        self._reserved: Tier = []
        self._reserved_weak: Tier = []
        self._probes: Tier = []
        self._homes: dict[int, Entry] | Homes = Homes(homes, entries) if homes is not None and len(entries) <= MOST_INSTANCES else {}
        if not alone:
            for one, _ in entries:
                one.counts = True

    # -- states

    def refresh(self, now_ns: int) -> None:
        """Make the tiers anew: an entry of each is as good as the next, and the first tier is the best."""
        self._seen = self._words[0]
        due_ns = NEVER_NS
        roles: dict[str, Tier] = {"any": [], "short": [], "long": [], "fallback": []}
        weak: list[Tier] = [[], [], []]
        self._probes, self._reserved, self._reserved_weak = [], [], []
        asked = False
        for entry in self.entries:
            member = entry[0]
            due_ns = min(due_ns, member.refresh(now_ns))
            if not member.admitted or member.drained or member.held_until_ns > now_ns:
                continue
            asked = True
            state = member.breaker.state
            if member.up is False or member.suspect:
                badness = 2
            elif state == "closed":
                badness = 0 if member.busy_until_ns > now_ns else -1
            else:
                badness = 1
                if state == "half_open" and member.section.role not in ("high_value", "fallback"):
                    self._probes.append(entry)
            if member.high_value_for:
                (self._reserved if badness < 0 else self._reserved_weak).append(entry)
            elif badness < 0:
                roles[member.section.role].append(entry)
            else:
                weak[badness].append(entry)
        self._short = [tier for tier in (roles["any"] + roles["short"], roles["long"], roles["fallback"]) if tier]
        self._long = [tier for tier in (roles["any"] + roles["long"], roles["short"], roles["fallback"]) if tier]
        self._weak = [tier for tier in weak if tier]
        self.sole = self.entries[0] if self._alone and asked else None
        self.due_ns = due_ns

    def slots(self) -> int:
        """Requests that may run at once, as of the last `refresh`; 0: no bound. Instances that only help out are not counted while others are
        there.
        """
        counted = self._counted()
        return 0 if any(member.slots_now == UNBOUNDED for member in counted) else sum(member.slots_now for member in counted)

    def slots_of(self, keepers: Mapping[str, int]) -> dict[str, int]:
        """The same by tenant, where `keepers` have so many slots of each instance; those of all others under ""."""
        counted = self._counted()
        each = {tenant: sum(min(kept, member.slots_now) for member in counted) for tenant, kept in keepers.items()}
        return {"": max(1, self.slots() - sum(each.values())), **each} if counted else {"": 0, **each}

    def _counted(self) -> list[Member]:
        tiers = self._short or self._weak
        counted = [entry[0] for tier in tiers for entry in tier if entry[0].section.role != "fallback"]
        return counted or [entry[0] for tier in tiers for entry in tier] or [entry[0] for entry in self._reserved + self._reserved_weak]

    def is_stale(self, now_ns: int) -> bool:
        """Whether the tiers have to be made anew: for the time that passed, or for what another worker found."""
        return now_ns >= self.due_ns or self._words[0] != self._seen

    def forget(self, member: Member) -> None:
        """It came back: its KV cache is empty."""
        if isinstance(self._homes, Homes):
            came_back(member)
        else:
            self._homes = {key: entry for key, entry in self._homes.items() if entry[0] is not member}

    # -- a request

    def choose(self, ask: Ask | None) -> Entry:
        """The instance for a request. Raises EngineRefused (429) where all asked to be left alone or have no room, EngineDown where all are drained,
        EngineNotAdmitted.
        """
        now_ns = time.perf_counter_ns()
        if now_ns >= self.due_ns or self._words[0] != self._seen:
            self.refresh(now_ns)
        if self.sole is not None:
            return self.sole
        if self._shared:
            self._see_others()
        tokens, keys, known = self._need(ask)
        tenant = ask.caller.tenant if ask is not None else ""
        tiers, weak = self._tiers(ask, tokens)
        for entry in self._probes:
            member = entry[0]
            if (
                member.breaker.probing and member.has_room(tokens) and tokens <= member.longest and (not member.kept or member.has_slot(tenant))
                and member.breaker.claim(now_ns)
            ):  # fmt: skip
                return entry
        for tier in tiers:
            found = self._least(tier, tokens, tenant)
            if found is not None:
                return self._at_home(tier, found, keys, tokens, self._affinity_tokens + known, tenant) if keys else found
        # Nobody has a slot: a gate before us has let it pass all the same, so the least busy one has it. Nobody has a healthy breaker: the least ill.
        # What was too big lately may fit now, and the engine says best that it does not.
        for all_sizes in (False, True):
            for tier in (*tiers, *weak):
                found = self._least(tier, tokens, tenant, all_slots=True, all_sizes=all_sizes)
                if found is not None:
                    return found
        raise self._refusal(now_ns, (*tiers, *weak))

    def instances(self, ask: Ask | None) -> list[Entry]:
        """All that may be asked, the best first. Raises as `choose` does."""
        now_ns = time.perf_counter_ns()
        if self.is_stale(now_ns):
            self.refresh(now_ns)
        if self._shared:
            self._see_others()
        tokens, _, _ = self._need(ask)
        tiers, weak = self._tiers(ask, tokens)
        listed = [entry for tier in (*tiers, *weak) for entry in sorted(tier, key=_busyness)]
        tenant = ask.caller.tenant if ask is not None else ""
        listed = [entry for entry in listed if entry[0].has_room(tokens) and (not entry[0].kept or entry[0].has_slot(tenant))]
        if not listed:
            raise self._refusal(now_ns, (*tiers, *weak))
        fitting = [entry for entry in listed if tokens <= entry[0].longest]
        return fitting + [entry for entry in listed if entry not in fitting]

    # --

    def _see_others(self) -> None:
        for member, _ in self.entries:
            member.see_others()

    def _least(self, tier: Tier, tokens: int, tenant: str, *, all_slots: bool = False, all_sizes: bool = False) -> Entry | None:
        """The one with the least tokens in flight for its weight; of equals the one that was asked longest ago. Slots that are kept for somebody are
        nobody else's in any case."""
        best: Entry | None = None
        least = 0.0
        last_ns = 0
        for entry in tier:
            member = entry[0]
            score = (member.tokens + member.other_tokens + member.foreign + tokens) * member.slowness
            if best is not None and (score > least or (score == least and member.last_ns >= last_ns)):
                continue
            if member.kept:
                if not member.has_slot(tenant):
                    continue
            elif member.requests + member.other_requests >= member.slots_now and not all_slots:
                continue
            if member.tokens + tokens + member.other_tokens > member.most_tokens and not member.has_room(tokens):
                continue
            if tokens > member.longest and not all_sizes:
                continue
            if member.from_requests and not all_slots and self._elsewhere(member) < member.from_requests:
                continue
            best, least, last_ns = entry, score, member.last_ns
        return best

    def _at_home(self, tier: Tier, least: Entry, keys: tuple[int, ...], tokens: int, bound: int, tenant: str) -> Entry:
        """Where the request's prefix went before, unless that is the busier by `bound` tokens; else the least busy, which is its home from now on."""
        homes = self._homes
        chosen, known = least, homes.get(keys[0])
        for key in keys:
            home = known if key == keys[0] else homes.get(key)
            if home is None:
                continue
            if home is least:
                break
            member, other = home[0], least[0]
            if (
                member.load * member.slowness - other.load * other.slowness <= bound * member.slowness
                and member.has_slot(tenant) and member.has_room(tokens) and home in tier and tokens <= member.longest
            ):  # fmt: skip
                chosen = home
                break
        if known is not chosen:
            homes[keys[0]] = chosen
        if len(keys) > 1:
            homes.setdefault(keys[1], chosen)
        while len(homes) > MOST_HOMES and isinstance(homes, dict):
            del homes[next(iter(homes))]
        return chosen

    def _need(self, ask: Ask | None) -> tuple[int, tuple[int, ...], int]:
        """Tokens of prompt and expected answer; what its KV cache could be found by, the closest first; and tokens that would have to be read again
        elsewhere: of a conversation that goes on nearly all, else nobody knows.
        """
        call = ask.call if ask is not None else None
        if ask is None or call is None:
            return 0, (), 0
        body = call.body
        prompt = prompt_tokens(call)
        tokens = prompt + answer_tokens(body, self.entries[0][0].mean_answer)
        if ask.capability:
            return tokens, (hash(ask.capability),), 0
        messages = body.get("messages")
        if not messages:
            text = _text(body.get("prompt"))
            return tokens, (hash(text),) if text else (), 0
        first = messages[0]
        key = hash(_text(first.get("content")))
        known = prompt if len(messages) > 2 else 0
        if len(messages) > 1 and first.get("role") != "user":
            # a conversation is known by its first question too; a system prompt alone is what many share
            return tokens, (hash((key, _text(messages[1].get("content")))), key), known
        return tokens, (key,), known

    def _tiers(self, ask: Ask | None, tokens: int) -> tuple[list[Tier], list[Tier]]:
        """The tiers for a request of this size, the healthy and the others: those kept for it come first."""
        tiers, weak = self._long if tokens >= self._long_tokens else self._short, self._weak
        if not self._reserves:
            return tiers, weak
        if ask is None:  # nobody is asked yet: it is only looked whom there is
            return tiers, [*weak, self._reserved, self._reserved_weak]
        capability, tenant = ask.capability, ask.caller.tenant
        own = [entry for entry in self._reserved if entry[0].serves(capability, tenant)]
        own_weak = [entry for entry in self._reserved_weak if entry[0].serves(capability, tenant)]
        return [own, *tiers], [*weak, own_weak]

    def _elsewhere(self, member: Member) -> int:
        return sum(entry[0].requests + entry[0].other_requests for entry in self.entries if entry[0] is not member)

    def _refusal(self, now_ns: int, tiers: Sequence[Tier]) -> EngineError:
        """Why nobody may be asked."""
        members = [entry[0] for entry in self.entries if not entry[0].high_value_for] or [entry[0] for entry in self.entries]
        if any(tiers):
            return EngineRefused(
                f"No engine that serves {self.model!r} has room for this request: max_tokens_in_flight is reached, or all slots that are not kept "
                "for others are taken.", engine_status=429,
                engine_code="engine_full", hint="Come back after Retry-After, or ask for less.", retry_after_s=FULL_RETRY_S,
            )
        held = [member for member in members if member.held_until_ns > now_ns and member.admitted and not member.drained]
        if held:
            first = min(held, key=lambda member: member.held_until_ns)
            status, code = first.ledger.held
            return EngineRefused(
                f"The engine {first.name!r} that serves {self.model!r} asked not to be asked yet.",
                engine_status=status or 429, engine_code=code or None,
                hint="Come back after Retry-After.", retry_after_s=(first.held_until_ns - now_ns) / 1e9,
            )
        drained = [member.name for member in members if member.drained]
        if drained:
            return EngineDown(
                f"No engine that serves {self.model!r} takes requests: {', '.join(map(repr, drained))} is being drained.",
                hint="Its operator ends that with POST /api/v1/engines/NAME/resume, or the setting drain.",
            )
        failed = next((member for member in members if not member.admitted), None)
        if failed is None:
            return EngineNotAdmitted(
                f"The engines that serve {self.model!r} are kept for others (high_value_for).",
                hint="Ask for another model, or give it another engine.",
            )
        return EngineNotAdmitted(
            f"No engine that serves {self.model!r} is admitted: {failed.name!r} failed the check {failed.why}.",
            hint=f"`tidegate check {failed.section.url}` shows all checks; it is checked again every {AGAIN_S:g} s. "
            f'engines.{failed.name}.conformance = "warn" uses it all the same.',
            retry_after_s=AGAIN_S,
        )


def _busyness(entry: Entry) -> tuple[bool, float]:
    member = entry[0]
    return member.full, member.load * member.slowness


def _text(content: Any) -> str:
    """The beginning of a message's text or of a prompt."""
    if content.__class__ is str:
        return content[:PREFIX_CHARS]
    if content.__class__ is list and content:
        first = content[0]
        return _text(first.get("text")) if first.__class__ is dict else str(content[:PREFIX_CHARS])
    return ""
