"""Marks of prompt injection: phrases by which a text tries to make a model leave its instructions, tell them, or play somebody without rules.

It is a list of patterns, so it finds what is said in the usual words and nothing else: a mark is a reason to look, not a proof, and its absence
proves nothing. docs/door.md says how often it is right.

An Aho-Corasick automaton (Aho and Corasick 1975) finds the words without which no pattern can match; a pattern is only tried around them, so the
time grows with the length of the text alone.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import ahocorasick

from tidegate.guard.normal import rough_form

#: Points from which a text is marked.
ENOUGH = 2
#: Characters on either side of a word in which its pattern is tried. No pattern reaches further.
REACH = 160
#: Texts of fewer characters hold no pattern.
_SHORTEST = 8
#: Of a longer text this much of its beginning and of its end is looked at, so that a request of megabytes holds nobody up.
_END = 1 << 18

_FEW = r"(?:\S+ ){0,4}?"
_SOME = r"(?:\S+ ){0,7}?"
_ORDERS = (
    r"(?:instruct\w*|prompts?|rules?|guidelines?|directions?|directives?|orders|commands?|programming|training|constraints|restrictions"
    r"|safeguards|guardrails|polic(?:y|ies)|filters?)"
)
_OLD = (
    r"(?:previous|prior|preceding|above|earlier|former|past|foregoing|original|initial|current|existing|system|all|any|your|these|those|every"
    r"|openai'?s?)"
)
_HIDDEN = r"(?:system|initial|original|starting|hidden|secret|initiali[sz]ation|internal|underlying|developer|pre-?prompt|base)"


class Rule(NamedTuple):
    """A pattern over the rough form, the points that it gives, and words of which every match of it holds one."""

    name: str
    points: int
    words: tuple[str, ...]
    pattern: re.Pattern[str]


def _rule(name: str, points: int, words: str, pattern: str) -> Rule:
    return Rule(name, points, tuple(words.split("|")), re.compile(pattern))


RULES = (
    _rule(
        "override", 2, "ignor|disregard|forget|overrid|bypass|overlook|abandon|neglect|discard",
        rf"\b(?:ignor|disregard|forget|overrid|bypass|overlook|abandon|neglect|discard)\w*,? (?:\S+ ){{0,3}}?{_OLD} {_FEW}{_ORDERS}\b",
    ),
    _rule("override", 2, "follow|obey|adher", rf"\b(?:don'?t|do not|stop|never|no longer|not have to|don'?t have to|need not|cease) (?:\S+ )?"
          rf"(?:follow|obey|adher)\w* (?:to )?(?:the |any |your |all )*(?:{_OLD} )+{_FEW}{_ORDERS}\b"),
    _rule("override", 2, "ignor|disregard|forget", r"\b(?:ignore|disregard|forget) (?:about )?(?:all|everything|anything|what) (?:of )?"
          r"(?:that |which )?(?:the above|above|before|i said|was said|(?:you|we|i)(?:'ve| have| were|'re)? (?:been |just )?(?:learn\w*"
          r"|told|said|know|knew|wrote))"),
    _rule("override", 2, "new instr|new task|new order|new rule", r"\b(?:here (?:are|is)|these are|follow|obey|your"
        r"|the following are) (?:your |my |the |these )*"
          r"new (?:instructions?|tasks?|orders|rules)\b"),
    _rule("extraction", 2, "prompt|instruct|messag|config|directive|guideline|rules|string", r"\b(?:show|reveal|print|repeat|output|display"
        r"|tell|give"
        r"|write|encode|translate|leak|"
          r"dump|disclose|share|recite|summari[sz]e|paraphrase|list|see|read|say|spell|expose|extract|return|provide|send|continue"
          r"|what(?:'s| is| are| were| was))\b"
          rf"[^.?!]{{0,60}}?\b{_HIDDEN} (?:system )?(?:prompts?|instructions?|messages?|configuration|directives?|guidelines|string|rules)\b"),
    _rule("extraction", 2, "instruct|rules|prompt", r"\b(?:reveal|repeat|output|print|recite|disclose|leak|dump|what(?: exactly)? (?:are"
        r"|were|is|was)) (?:\S+ ){0,2}?"
          r"your (?:\S+ )?(?:instructions|prompt|rules)\b"),
    _rule("extraction", 2, "above|given|instruct|told", r"\b(?:repeat|output|print|encode|copy|echo|reproduce"
        r"|recite)\b[^.?!]{0,40}?\b(?:text|words?|everything|"
          r"instructions?|sentences?|content|message|prompt)\b (?:that |which )?(?:\S+ ){0,2}?(?:above\b|you (?:were|have been) (?:given|told))"),
    _rule("extraction", 2, "told before|instructed to|not supposed to tell|start of this conv|beginning of this conv|entire conv|whole conv"
        "|system_prompt|systemprompt",
          r"(?:what were you told before|\bi was instructed to\b|not supposed to tell (?:me|us)|(?:start|beginning) of this conversation"
          r"|repeat (?:\S+ ){0,3}?(?:entire|whole) conversation|\bsystem_prompt\b|\bsystemprompt\b)"),
    _rule("persona", 2, "do anything now|developer mode|jailbr|god mode|dan mode|sudo mode|opposite mode|maintenance mode|admin mode"
        "|evil mode|strive to avoid norms",
          r"\b(?:do anything now|developer mode (?:enabled|output|v2|on|policy)|(?:with|in|enter|enable|activate"
          r"|as) (?:\S+ ){0,2}?(?:developer|god|dan|sudo|opposite|"
          r"maintenance|admin|evil) mode|jailbr(?:eak|oken)(?:ed)? (?:mode|version|prompt|ai|enabled|chat\w*|yourself|gpt)"
          r"|strive to avoid norms|dan mode)\b"),
    _rule("persona", 2, "confines|free|broken|break", r"\b(?:broken|breaks?|breaking|freed|free) (?:free )?(?:of "
        r"|from )?(?:the )?(?:typical |usual |all )?"
          r"(?:confines of (?:ai|al|a\.i)|confines|(?:openai|ai|al)(?:'s)? (?:rules|restrictions|limitations))"),
    _rule("persona", 2, "unfiltered|uncensored|amoral|unethical|unrestricted|unbound", r"\b(?:unfiltered|uncensored|amoral|unethical"
        r"|unrestricted|unbound)(?:,| and| or)? (?:\S+ ){0,3}?"
          r"(?:ai|al|a\.i\.|model|chatbot|bot|assistant|responses?|answers?|version|language model|character|robot)\b"),
    _rule("persona", 2, "restrict|filter|limit|guideline|rule|censor|polic|ethic|moral", r"\b(?:no|without|not bound by|free (?:of|from)"
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
    _rule("persona", 1, "[dan|dan can|dan has|dan is|gpt]|normal]|jailbreak]|stan]|dude]|🔒|🔓", r"(?:\[(?:dan|gpt|chatgpt|normal|jailbreak|stan"
        r"|dude)\]|(?:🔒|🔓)|\bdan (?:can|has|is) )"),
    _rule("authority", 2, "override| mode", r"\b(?:(?:administrator|admin|system|developer"
        r"|root|security) override\b"
          r"|you are now in (?:\S+ )?(?:maintenance|debug\w*|admin\w*|developer|test) mode)"),
    _rule("role", 2, "<|im_|<|system|<|user|<|assist|<|start_h|<|eot|<|endof|[inst]|[/inst]|<<sys|<</sys",
          r"<\|(?:im_start|im_end|system|user|assistant|start_header_id|end_header_id|eot_id|endoftext)\|>|\[/?inst\]|<</?sys>>"),
    _rule("role", 2, "###|<system|[system|system prompt|user prompt|system input|user input|system message|user message", r"###? ?(?:system"
        r"|instruction|assistant|human)s?(?: prompt"
        r"| message)? ?:|<system(?:_prompt|_message)?>|\[system(?: message| prompt)?\]"
          r"|-{2,} ?(?:begin|end) (?:of )?(?:system|user) (?:prompt|input|message)"),
    _rule("exfiltration", 2, "![", r"!\[[^\]]{0,80}\] ?\( ?<?[^) ]{0,100}(?:<message>|\{\{?\w+\}?\}|\$\{|\[\w[\w ]*\]|%7b)"),
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


def _automaton() -> ahocorasick.Automaton:
    by_word: dict[str, list[int]] = {}
    for number, rule in enumerate(RULES):
        for word in rule.words:
            by_word.setdefault(word, []).append(number)
    automaton = ahocorasick.Automaton()
    for word, numbers in by_word.items():
        automaton.add_word(word, numbers)
    automaton.make_automaton()
    return automaton


_places = _automaton().iter


def injection(text: str) -> list[str]:
    """The names of the patterns in a text, each once and sorted, where they are enough to mark it; else none.

    Case, homoglyphs, characters that cannot be seen and runs of blanks make no difference. The time grows with the length of the text alone; of
    a text of more than 524,288 characters the first and the last half of that are looked at.
    """
    if len(text) < _SHORTEST:
        return []
    if len(text) > 2 * _END:
        text = text[:_END] + " " + text[-_END:]
    form = rough_form(text)
    for blank in "\n\t\r":
        if blank in form:
            form = form.replace(blank, " ")
    while "  " in form:  # patterns part words by one blank; each time half of them go
        form = form.replace("  ", " ")
    for _ in _places(form):
        return _closely(form)
    return []


def _closely(form: str) -> list[str]:
    around: dict[int, list[list[int]]] = {}  # by pattern the places around its words, those that touch each other as one: nothing is tried twice
    for end, numbers in _places(form):
        for number in numbers:
            places = around.setdefault(number, [])
            if places and end - REACH <= places[-1][1]:
                places[-1][1] = end + REACH
            else:
                places.append([max(0, end - REACH), end + REACH])
    points: dict[str, int] = {}
    for number, places in around.items():
        rule = RULES[number]
        if any(rule.pattern.search(form, begin, end) for begin, end in places):
            points[rule.name] = points.get(rule.name, 0) + rule.points
    return sorted(points) if sum(points.values()) >= ENOUGH else []
