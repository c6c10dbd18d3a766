"""Marks of prompt injection: phrases by which a text tries to make a model leave its instructions, tell them, or play somebody without rules.

Two lists give points: rules, patterns of what is said in the usual words, and cues (`cues.py`), phrases that are frequent in such prompts and seldom
elsewhere. A mark is a reason to look, not a proof, and its absence proves nothing. docs/door.md says how often it is right.

A pattern is only tried around words without which it cannot match, so the time grows with the length of the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tidegate.guard.cues import CUES
from tidegate.guard.normal import rough_form
from tidegate.guard.phrases import Phrases, Place

#: Points from which a text is marked.
ENOUGH = 2
#: Characters in which they must stand together: long enough for the prompts that are met, and no whole book.
TOGETHER = 4096
#: Characters on either side of a word in which its pattern is tried. No pattern reaches further.
REACH = 160
#: Texts of fewer characters hold no pattern.
_SHORTEST = 8
#: Of a longer text this much of its beginning and of its end is looked at, so that a request of megabytes holds nobody up.
_END = 1 << 18
#: Places of one rule's words at which it is tried, half of them the first, half the last. No text has as many but one that is made to be slow.
_MOST_PLACES = 2000
#: What is found without a rule.
WORDING = "wording"

_FEW = r"(?:\S+ ){0,4}?"
_ORDERS = (
    r"(?:instruct\w*|prompts?|rules?|guidelines?|directions?|directives?|orders|commands?|programming|training|constraints|restrictions"
    r"|safeguards|guardrails|polic(?:y|ies)|filters?)"
)
_OLD = (
    r"(?:previous|prior|preceding|above|earlier|former|past|foregoing|original|initial|current|existing|system|all|any|your|these|those|every"
    r"|openai'?s?)"
)
_HIDDEN = r"(?:system|initial|original|starting|hidden|secret|initiali[sz]ation|internal|underlying|developer|pre-?prompt|base)"
#: The words of that list.
_HIDING = "system|initial|original|starting|hidden|secret|initialization|initialisation|internal|underlying|developer|preprompt|pre-prompt|base"


def _each(firsts: str, seconds: str) -> str:
    return "|".join(f"{first} {second}" for first in firsts.split("|") for second in seconds.split("|"))


class Rule(NamedTuple):
    """A pattern over the rough form, the points that it gives, and words of which every match of it holds one."""

    name: str
    points: int
    words: tuple[str, ...]
    pattern: re.Pattern[str]


def _rule(name: str, points: int, words: str | tuple[str, ...], pattern: str) -> Rule:
    return Rule(name, points, tuple(words.split("|")) if isinstance(words, str) else words, re.compile(pattern))


RULES = (
    _rule(
        "override", 2, "ignor|disregard|forget|overrid|bypass|overlook|abandon|neglect|discard",
        rf"\b(?:ignor|disregard|forget|overrid|bypass|overlook|abandon|neglect|discard)\w*,? (?:\S+ ){{0,3}}?{_OLD} {_FEW}{_ORDERS}\b",
    ),
    _rule("override", 2, "adher|obey |obeyi|to follow|" + _each("not|n't|nt|ever|stop|longer|cease", "follow"),
          rf"\b(?:don'?t|do not|stop|never|no longer|not have to|don'?t have to|need not|cease) (?:\S+ )?"
          rf"(?:follow|obey|adher)\w* (?:to )?(?:the |any |your |all )*(?:{_OLD} )+{_FEW}{_ORDERS}\b"),
    _rule("override", 2, "ignor|disregard|forget", r"\b(?:ignore|disregard|forget) (?:about )?(?:all|everything|anything|what) (?:of )?"
          r"(?:that |which )?(?:the above|above|before|i said|was said|(?:you|we|i)(?:'ve| have| were|'re)? (?:been |just )?(?:learn\w*"
          r"|told|said|know|knew|wrote))"),
    _rule("override", 2, "new instr|new task|new order|new rule", r"\b(?:here (?:are|is)|these are|follow|obey|your"
        r"|the following are) (?:your |my |the |these )*"
          r"new (?:instructions?|tasks?|orders|rules)\b"),
    _rule("extraction", 2, _each(_HIDING, "prompt|instr|messa|config|direc|guidel|rules|string|system p|system m|system i|system c"),
          r"\b(?:show|reveal|print|repeat|output|display"
        r"|tell|give"
        r"|write|encode|translate|leak|"
          r"dump|disclose|share|recite|summari[sz]e|paraphrase|list|see|read|say|spell|expose|extract|return|provide|send|continue"
          r"|what(?:'s| is| are| were| was))\b"
          rf"[^.?!]{{0,60}}?\b{_HIDDEN} (?:system )?(?:prompts?|instructions?|messages?|configuration|directives?|guidelines|string|rules)\b"),
    _rule("extraction", 2, "instructions|rules|prompt", r"\b(?:reveal|repeat|output|print|recite|disclose|leak|dump|what(?: exactly)? (?:are"
        r"|were|is|was)) (?:\S+ ){0,2}?"
          r"your (?:\S+ )?(?:instructions|prompt|rules)\b"),
    _rule("extraction", 2, "above|you were given|you were told|you have been given|you have been told",
          r"\b(?:repeat|output|print|encode|copy|echo|reproduce"
        r"|recite)\b[^.?!]{0,40}?\b(?:text|words?|everything|"
          r"instructions?|sentences?|content|message|prompt)\b (?:that |which )?(?:\S+ ){0,2}?(?:above\b|you (?:were|have been) (?:given|told))"),
    _rule("extraction", 2, "were you told before|instructed to|not supposed to tell|start of this conv|beginning of this conv|entire conv|whole conv"
        "|system_prompt|systemprompt",
          r"(?:what were you told before|\bi was instructed to\b|not supposed to tell (?:me|us)|(?:start|beginning) of this conversation"
          r"|repeat (?:\S+ ){0,3}?(?:entire|whole) conversation|\bsystem_prompt\b|\bsystemprompt\b)"),
    _rule("persona", 2, "do anything now|developer mode|jailbr|god mode|dan mode|sudo mode|opposite mode|maintenance mode|admin mode"
        "|evil mode|strive to avoid norms",
          r"\b(?:do anything now|developer mode (?:enabled|output|v2|on|policy)|(?:with|in|enter|enable|activate"
          r"|as) (?:\S+ ){0,2}?(?:developer|god|dan|sudo|opposite|"
          r"maintenance|admin|evil) mode|jailbr(?:eak|oken)(?:ed)? (?:mode|version|prompt|ai|enabled|chat\w*|yourself|gpt)"
          r"|strive to avoid norms|dan mode)\b"),
    _rule("persona", 2, "confines|" + _each("openai|ai|al|openai's|ai's|al's", "rules|restr|limitat"),
          r"\b(?:broken|breaks?|breaking|freed|free) (?:free )?(?:of "
        r"|from )?(?:the )?(?:typical |usual |all )?"
          r"(?:confines of (?:ai|al|a\.i)|confines|(?:openai|ai|al)(?:'s)? (?:rules|restrictions|limitations))"),
    _rule("persona", 2, "unfiltered|uncensored|amoral|unethical|unrestricted|unbound", r"\b(?:unfiltered|uncensored|amoral|unethical"
        r"|unrestricted|unbound)(?:,| and| or)? (?:\S+ ){0,3}?"
          r"(?:ai|al|a\.i\.|model|chatbot|bot|assistant|responses?|answers?|version|language model|character|robot)\b"),
    _rule("persona", 2, "ethical|moral|openai|censorship|" +
          _each("content|safety", "guidel|restr|filter|limitat|limits|rules|constr|polic|consid|princ|bound"),
          r"\b(?:no|without|not bound by|free (?:of|from)"
        r"|bypass\w*|lacks?|lacking|zero|beyond)"
          r" (?:\S+ ){0,2}?(?:ethical|moral|content|openai|censorship|safety)(?:,? (?:and|or) \S+)? (?:guidelines?|restrictions?|filters?"
          r"|filtering|limits?|"
          r"limitations?|rules|constraints|polic(?:y|ies)|considerations|principles|boundaries)\b"),
    _rule("persona", 1, "from now on", r"\bfrom now on,? (?:you|act|respond|answer|your|every|in all|i want you)\b"),
    _rule("persona", 1, "pretend|immers|roleplay|role-play|act as|act like|respond as|simulat|play the role|persona", r"\b(?:you (?:are"
        r"|will|must|should|shall"
        r"|have to|re) (?:now )?|"
          r"(?:i want|ask|need|would like) you to |your task is to |going to |about to |please |let'?s )(?:\S+ ){0,2}?(?:pretend"
          r"|immerse yourself|roleplay|role-play|act as|act like|simulate|"
          r"play the role|take on the persona|respond as)\b"),
    _rule("persona", 1, "stay in character|in character|stay a dan|as an ai|as an al|break character|breaking character|content polic"
        "|openai", r"\b(?:stay (?:in character|a dan)|(?:break|breaking) character|as an a[il] "
          r"language model|openai(?:'s)? (?:\S+ )?(?:polic\w+|guidelines|rules|restrictions)|content polic\w+)\b"),
    _rule("persona", 1, "cannot refuse|never refuse|not refuse|can't refuse|no matter how|without hesitation|no warning|any warning"
        "|anything you want|never say", r"\b(?:(?:cannot|never|not|can't) refuse|"
          r"no matter how (?:\S+ )?(?:illegal|unethical|immoral|dangerous|harmful|offensive)|(?:no|without any) warnings?"
          r"|never say (?:that )?(?:you|it) can)"),
    _rule("persona", 1, "[dan]|[gpt]|chatgpt]|normal]|jailbreak]|stan]|dude]|dan can|dan has|dan is |[🔒|(🔒|🔒c|🔒n|[🔓|(🔓|🔓j|🔓d",
          r"(?:\[(?:dan|gpt|chatgpt|normal|jailbreak|stan"
        r"|dude)\]|[\[(][🔒🔓]|🔒[cn]|🔓[jd]|\bdan (?:can|has|is) )"),
    _rule("authority", 2, "override|you are now in", r"\b(?:(?:administrator|admin|system|developer"
        r"|root|security) override\b"
          r"|you are now in (?:\S+ )?(?:maintenance|debug\w*|admin\w*|developer|test) mode)"),
    _rule("role", 2, ("<|im_", "<|system", "<|user", "<|assist", "<|start_h", "<|eot", "<|endof", "[inst]", "[/inst]", "<<sys", "<</sys"),
          r"<\|(?:im_start|im_end|system|user|assistant|start_header_id|end_header_id|eot_id|endoftext)\|>|\[/?inst\]|<</?sys>>"),
    _rule("role", 2, _each("#", "syst|inst|assi|huma") + "|#syst|#inst|#assi|#huma|<system|[system|" + _each("system|user", "prompt|input|message"),
          r"###? ?(?:system"
        r"|instruction|assistant|human)s?(?: prompt"
        r"| message)? ?:|<system(?:_prompt|_message)?>|\[system(?: message| prompt)?\]"
          r"|-{2,} ?(?:begin|end) (?:of )?(?:system|user) (?:prompt|input|message)"),
    _rule("exfiltration", 2, "](http|] (http|]( http|](<http",
          r"!\[[^\]]{0,80}\] ?\( ?<?https?:[^) ]{0,100}(?:<message>|\{\{?\w+\}?\}|\$\{|\[\w[\w ]*\]|%7b)"),
    # The same in other languages.
    _rule("override", 2, "ignor|vergiss|oublie|olvida|missacht", r"\b(?:ignorier\w*|ignora|ignore[zs]?|ignoriert|vergiss|oublie[zs]?|olvida"
        r"|missachte\w*) (?:\S+ ){0,4}?"
          r"(?:anweisung\w*|vorgaben|befehle|instrucciones|instructions|indicaciones|istruzioni|regole|instrucoes|consignes|regeln)\b"),
    _rule("override", 2, "忽略|无视|忘记|忘掉|不要遵守|不用遵守", r"(?:忽略|无视|忘记|忘掉|不要遵守|不用遵守)[^。！？]{0,12}?(?:指令|指示"
        r"|提示|规则|要求|设定|限制|内容)"),
    _rule("extraction", 2, "系统提示|初始指令|系统指令|初始提示", r"(?:告诉|输出|显示|重复|打印|透露|泄露|说出|翻译|复述"
        r"|什么)[^。！？]{0,16}?(?:系统提示|初始指令|系统指令|初始提示)"
          r"|(?:系统提示|初始指令|系统指令|初始提示)词?[^。！？]{0,8}?(?:是什么|告诉|输出|发给|显示)"),
    _rule("persona", 2, "越狱|开发者模式|不受任何|没有任何限制|不受限制", r"越狱(?:模式|版)|(?:进入|开启|启用)[^。！？]{0,6}?开发者模式"
        r"|你[^。！？]{0,24}?(?:不受任何|没有任何|不受)(?:\S{0,6})(?:限制|约束|规则)"),
)  # fmt: skip


#: What is looked for: words of rules, then cues; for each the rules that need it, and the points that it gives itself.
_WORDS = tuple(dict.fromkeys(word for rule in RULES for word in rule.words))
_PHRASES = tuple(dict.fromkeys((*_WORDS, *CUES)))
_KNOWN = tuple((len(phrase), tuple(number for number, rule in enumerate(RULES) if phrase in rule.words), CUES.get(phrase, 0)) for phrase in _PHRASES)
#: The place of each cue among all of them.
_CUES = tuple(_PHRASES.index(cue) for cue in CUES)
_find_all, _find_words, _find_cues = Phrases(_PHRASES).find, Phrases(_WORDS).find, Phrases(tuple(CUES)).find
#: Points are added up in hundredths, as cues have them.
_HUNDRED = 100


class _Found(NamedTuple):
    """Something that gives points, in hundredths. `what`: the number of a rule, or of a cue behind all rules; each counts once."""

    at: int
    what: int
    points: int


def injection(text: str) -> list[str]:
    """The names of the patterns in a text, each once and sorted, where they are enough to mark it; else none.

    Case, homoglyphs, characters that cannot be seen and runs of blanks make no difference. The time grows with the length of the text alone. Of a
    text of more than 524,288 characters the first and the last half of that are looked at; cues count at both ends of a long text.
    """
    if len(text) < _SHORTEST:
        return []
    if len(text) > 2 * _END:
        text = text[:_END] + " " + text[-_END:]
    form = rough_form(text)
    places = _find_all(form) if len(form) <= 2 * TOGETHER else _find_in_long(form)
    return _judge(form, places) if places else []


def _find_in_long(form: str) -> list[Place]:
    """What rules need, anywhere; cues at both ends."""
    places = _find_words(form)
    for begin, end in ((0, TOGETHER), (len(form) - TOGETHER, len(form))):
        places += [(at + begin, _CUES[cue]) for at, cue in _find_cues(form[begin:end])]
    return sorted(places)


def _judge(form: str, places: list[Place]) -> list[str]:
    found = sorted([*_rules(form, places), *_cues(form, places)])
    if not _is_enough(found):
        return []
    rules = {one.what for one in found if one.what < len(RULES)}
    names = {RULES[what].name for what in rules}
    return sorted(names if sum(RULES[what].points for what in rules) >= ENOUGH else {*names, WORDING})


def _is_enough(found: list[_Found]) -> bool:
    """Whether somewhere enough stands together."""
    counts: dict[int, int] = {}
    points = first = 0
    for one in found:  # each as the last of those that stand together
        while one.at - found[first].at > TOGETHER:
            gone = found[first]
            counts[gone.what] -= 1
            points -= 0 if counts[gone.what] else gone.points
            first += 1
        counts[one.what] = counts.get(one.what, 0) + 1
        points += one.points if counts[one.what] == 1 else 0
        if points >= ENOUGH * _HUNDRED:
            return True
    return False


def _rules(form: str, places: list[Place]) -> Iterator[_Found]:
    by_rule: dict[int, list[int]] = {}
    for end, phrase in places:
        for number in _KNOWN[phrase][1]:
            by_rule.setdefault(number, []).append(end)
    for number, ends in by_rule.items():
        if len(ends) > _MOST_PLACES:
            del ends[_MOST_PLACES // 2 : -_MOST_PLACES // 2]
        spans: list[list[int]] = []  # around the words, those that touch each other as one: nothing is tried twice
        for end in ends:
            if spans and end - REACH <= spans[-1][1]:
                spans[-1][1] = end + REACH
            else:
                spans.append([max(0, end - REACH), end + REACH])
        rule = RULES[number]
        for begin, end in spans:
            if match := rule.pattern.search(form, begin, end):
                yield _Found(match.start(), number, rule.points * _HUNDRED)


def _cues(form: str, places: list[Place]) -> Iterator[_Found]:
    for end, phrase in places:
        size, _, points = _KNOWN[phrase]
        if points and not _goes_on(form[end : end + 1]) and (end == size or not _goes_on(form[end - size - 1])):
            yield _Found(end, len(RULES) + phrase, points)


def _goes_on(character: str) -> bool:
    return character.isalnum() or character == "'"
