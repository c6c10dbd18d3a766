"""The simulation: scenarios as they are said, policies as they are known from theory, figures that add up."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tidegate.cli import main
from tidegate.core.errors import SettingsError
from tidegate.sizing.engine_model import Speed
from tidegate.sizing.job import Job
from tidegate.sizing.measures import jain, max_min, measure, most_in_time, quantile, shares
from tidegate.sizing.plots import draw, write
from tidegate.sizing.policies import BASELINES, Ordered, Policy, Refused, clairvoyant, edf, fair, fifo, shortest_predicted, shortest_prompt
from tidegate.sizing.scenario import KEYS, Scenario, differences, make_jobs, parse
from tidegate.sizing.simulate import MOST_TRIES, Simulation, policies, simulate
from tidegate.sizing.traces import FORMATS, Arrival, Trace

#: One slot, a token of the prompt is a millisecond, answers of one token: a request is its prompt.
PLAIN = Speed(slots=1, prefill=1000.0, decode=10.0, half=60.0, chunk=100)
lengths = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 300)), min_size=1, max_size=60)


def jobs(*prompts: int, tenants: str = "a", at_s: float = 0.0) -> list[Job]:
    at_ns = round(at_s * 1e9)
    return [Job(number, tenants[number % len(tenants)], prompt, 1, 1.0, 0, at_ns, at_ns) for number, prompt in enumerate(prompts)]


def order(policy: Policy, asked: list[Job], speed: Speed = PLAIN) -> list[int]:
    """The numbers in the order in which they started."""
    Simulation(asked, speed, policy).run()
    return [job.number for job in sorted(asked, key=lambda job: job.started_ns) if job.started_ns >= 0]


# -- what is asked --


def test_a_what_if_is_read() -> None:
    """Keys and values in any order, blanks allowed; what is not said is as usual; `differences` says it back."""
    scenario = parse(" slots=24, burst=2000,slo=2.5")
    assert (scenario.slots, scenario.burst, scenario.slo, scenario.returns) == (24, 2000, 2.5, Scenario().returns)
    assert parse(differences(scenario)) == scenario
    assert parse("") == Scenario()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("slot=3", "does not know 'slot'"), ("slots", "slots="), ("slots=many", "slots=many"), ("slots=0", "slots=0"), ("slots=-4", "slots=-4"),
        ("slots=1.5", "slots=1.5"), ("slots=1e9", "slots=1e9"), ("slo=nan", "slo=nan"), ("slo=inf", "slo=inf"), ("returns=1.1", "returns=1.1"),
        ("slots=4,slots=5", "slots twice"), ("=3", "does not know ''"),
    ],
)  # fmt: skip
def test_a_wrong_what_if_is_refused(said: str, words: str) -> None:
    """An unknown key, a value that is none, zero, negative, infinite, absurd or said twice: refused by name."""
    with pytest.raises(SettingsError, match=words):
        parse(said)


def test_every_key_is_described_and_its_usual_value_is_allowed() -> None:
    """A scenario has exactly the keys that are described, and the defaults lie within their bounds."""
    usual = {name: getattr(Scenario(), name) for name in Scenario.__dataclass_fields__}
    assert usual.keys() == KEYS.keys()
    assert all(KEYS[name][0] <= value <= KEYS[name][1] for name, value in usual.items())


def trace(count: int = 50, timed: bool = True) -> Trace:
    return Trace("made", tuple(Arrival(number * 0.5 if timed else 0.0, 10 + number % 7, number % 5) for number in range(count)), timed, False)


def test_a_burst_comes_at_one_instant_behind_what_is_not_counted() -> None:
    """All of a burst come at once, with lengths of the trace, after the warm-up has ended; more than the trace has are drawn again."""
    made = make_jobs(trace(), parse("burst=120,warm=40,slots=4"), 0)
    burst = [job for job in made if job.counted]
    assert (len(made), len(burst), len({job.asked_ns for job in burst})) == (160, 120, 1)
    assert {(job.prompt, job.output) for job in burst} == {(one.prompt, one.output) for one in trace().arrivals}
    assert [job.asked_ns for job in made] == sorted(job.asked_ns for job in made)


def test_rate_and_speed_move_the_arrivals() -> None:
    """`speed=2` halves the trace's own times; `rate` replaces them by a Poisson process of that rate."""
    assert make_jobs(trace(), parse("speed=2"), 0)[-1].asked_ns == pytest.approx(49 * 0.25e9)
    assert make_jobs(trace(2000), parse("rate=4"), 0)[-1].asked_ns / 1e9 == pytest.approx(500, rel=0.1)


def test_callers_tell_how_long_answers_may_be_where_they_do() -> None:
    """told=1: no answer is longer than what was told for it, and longer answers are told more; told=0: nothing is told."""
    made = make_jobs(trace(), parse("told=1,noise=0.3"), 0)
    assert all(job.told >= job.output for job in made)
    assert any(job.told > job.output for job in made)
    assert not any(job.told for job in make_jobs(trace(), Scenario(), 0))


def test_lengths_without_times_need_a_burst_or_a_rate() -> None:
    """A trace without times is not replayed at an invented pace."""
    with pytest.raises(SettingsError, match="no times"):
        make_jobs(trace(timed=False), Scenario(), 0)
    assert make_jobs(trace(timed=False), parse("rate=1"), 0)


def test_a_flood_is_one_tenants() -> None:
    """`flood=10`: the first tenant sends about ten times as much as each other one."""
    made = make_jobs(trace(13_000), parse("tenants=4,flood=10"), 0)
    counts = [sum(job.tenant == f"tenant-{number}" for job in made) for number in (1, 2, 3, 4)]
    assert counts[0] / 10 == pytest.approx(1000, rel=0.1)
    assert counts[1:] == [pytest.approx(1000, rel=0.15)] * 3


# -- policies --


def test_fifo_is_first_in_first_out() -> None:
    """Whatever they are, in the order in which they came."""
    assert order(fifo(PLAIN, 3.0), jobs(300, 100, 200)) == [0, 1, 2]


def test_the_shortest_prompt_goes_first() -> None:
    """The first finds the slot free; of those that wait, the shortest prompt."""
    assert order(shortest_prompt(PLAIN, 3.0), jobs(300, 500, 200, 400, 200)) == [0, 2, 4, 3, 1]


def test_the_shortest_predicted_goes_by_the_prediction() -> None:
    """Equal prompts: the one whose answer is predicted to be shorter, whatever is true."""
    asked = jobs(100, 100, 100)
    asked[1].predicted, asked[2].predicted = 50.0, 5.0
    assert order(shortest_predicted(PLAIN, 3.0), asked) == [0, 2, 1]


def test_earliest_deadline_first_refuses_the_late() -> None:
    """With an SLO of 1 s, requests of 0.6 s: those that begin by 1 s run, the others are refused and do not come back."""
    asked = jobs(600, 600, 600, 600)
    assert order(edf(PLAIN, 1.0), asked) == [0, 1]
    assert [job.refused for job in asked] == [False, False, True, True]


def test_fair_queueing_alternates_between_tenants() -> None:
    """Three requests of a, then three of b: they are served in turn, each tenant's in its own order."""
    asked = jobs(*[100] * 6)
    for job in asked[3:]:
        job.tenant = "b"
    assert order(fair(PLAIN, 3.0), asked) == [0, 3, 1, 4, 2, 5]


def test_fair_queueing_keeps_no_credit_for_who_was_away() -> None:
    """A tenant that comes when another has been served for a while takes turns with it from then on; what it did not ask for before is gone."""
    asked = jobs(*[100] * 20)
    for job in asked[12:]:
        job.tenant, job.asked_ns = "b", 550_000_000
    started = order(fair(PLAIN, 3.0), asked)
    assert sum(number >= 12 for number in started[6:12]) == 3


def test_fair_queueing_counts_work_and_not_requests() -> None:
    """A tenant with requests three times as long gets a third as many."""
    asked = jobs(*[300] * 8, *[100] * 8)
    for job in asked[8:]:
        job.tenant = "b"
    started = order(fair(PLAIN, 3.0), asked)[:8]
    assert sum(number < 8 for number in started) == 2


def test_the_clairvoyant_sees_all_who_come_at_once_and_starts_nobody_in_vain() -> None:
    """Of 0.9, 0.5 and 0.4 s with an SLO of 1 s, the two short ones are answered and the long one is refused, although it came first."""
    asked = jobs(900, 500, 400)
    [build, *_] = BASELINES["clairvoyant"]
    assert order(build(PLAIN, 1.0), asked) == [2, 1]
    assert asked[0].refused


def test_the_clairvoyant_knows_what_the_engine_still_has_to_read() -> None:
    """Three slots and an SLO of 1.1 s: behind two prompts of 0.3 s that are being read, one of 0.9 s would be late, and is not started."""
    asked = jobs(300, 300, 900)
    assert order(clairvoyant(0.0)(PLAIN, 1.1), asked, Speed(slots=3, prefill=1000.0, decode=10.0, half=60.0, chunk=100)) == [0, 1]
    assert asked[2].refused


@given(lengths, st.sampled_from(sorted(BASELINES)), st.integers(1, 8), st.floats(0.05, 5.0))
def test_no_request_is_lost_or_doubled(asked: list[tuple[int, int]], name: str, slots: int, gap_s: float) -> None:
    """Every request is answered once or refused, under every policy; `measure` finds none that is neither."""
    scenario = Scenario(slots=slots, prefill=1000.0, decode=10.0)
    made = [
        Job(number, "ab"[number % 2], prompt, output, output + 1.0, 0, round(number // 5 * gap_s * 1e9), 0)
        for number, (prompt, output) in enumerate(asked)
    ]
    Simulation(made, scenario.engine, BASELINES[name][-1](scenario.engine, 3.0)).run()
    figures = measure(made, scenario)
    assert figures.admitted + figures.refused == len(asked)
    assert all((job.done_ns >= 0) != job.refused for job in made)


@given(lengths)
def test_nobody_beats_the_bound(asked: list[tuple[int, int]]) -> None:
    """At one instant, no policy has more first tokens in time than the upper bound says."""
    scenario = Scenario(slots=3, prefill=4000.0, decode=50.0)
    for builds in BASELINES.values():
        made = [Job(number, "a", prompt, output, output + 1.0, 0, 0, 0) for number, (prompt, output) in enumerate(asked)]
        Simulation(made, scenario.engine, builds[-1](scenario.engine, scenario.slo)).run()
        assert measure(made, scenario).good <= most_in_time(made, scenario.engine, scenario.slo)


class Turns(Ordered):
    """Refuses everybody the first `times` times, telling them to come back in 1.2 s."""

    def __init__(self, times: int) -> None:
        super().__init__(lambda job: 0.0)
        self.times = times

    def come(self, job: Job, now_ns: int) -> Refused | None:
        return Refused(1.2) if job.tries <= self.times else super().come(job, now_ns)


def test_who_is_refused_comes_back_when_it_was_told() -> None:
    """`Retry-After` is whole seconds: told 1.2 s, a client comes back after 2 s and a little; its wait counts from then."""
    [job] = asked = jobs(100)
    Simulation(asked, PLAIN, Turns(1), returns=1.0).run()
    assert job.tries == 2
    assert 2.0 <= job.came_ns / 1e9 <= 2.1
    assert job.wait_s == 0.0
    figures = measure(asked, Scenario())
    assert (figures.good, figures.good_later, figures.returned, figures.passed, figures.kept) == (0, 1, 1, 1, 1.0)


def test_a_share_of_the_refused_comes_back() -> None:
    """returns=0.5: about half of them; returns=0: nobody; those who did not are refused for good."""
    for share, least, most in ((0.0, 0, 0), (0.5, 70, 130), (1.0, 200, 200)):
        asked = jobs(*[1] * 200)
        Simulation(asked, PLAIN, Turns(1), returns=share).run()
        figures = measure(asked, Scenario())
        assert least <= figures.returned <= most
        assert figures.refused == 200 - figures.returned


def test_who_comes_back_and_is_refused_again_has_not_passed() -> None:
    """Refused twice, then let in: two comings back, of which one passed. Refused for ever: none did."""
    for times, returned, passed in ((2, 2, 1), (10**9, MOST_TRIES - 1, 0)):
        asked = jobs(100)
        Simulation(asked, PLAIN, Turns(times), returns=1.0).run()
        figures = measure(asked, Scenario())
        assert (figures.returned, figures.passed) == (returned, passed)


def test_a_client_gives_up_some_time() -> None:
    """A policy that refuses for ever does not keep the simulation going for ever."""
    [job] = asked = jobs(100)
    Simulation(asked, PLAIN, Turns(10**9), returns=1.0).run()
    assert (job.tries, job.refused) == (MOST_TRIES, True)


def test_the_same_seed_gives_the_same_figures() -> None:
    """Twice the same to the last digit, and another seed is another load."""
    scenario = parse("burst=300,slots=4,noise=1,warm=20")
    one, same, other = (simulate(trace(), scenario, policies([]), seed) for seed in (1, 1, 2))
    assert {name: figures.as_json() for name, figures in one.items()} == {name: figures.as_json() for name, figures in same.items()}
    assert one["shortest-predicted"].as_json() != other["shortest-predicted"].as_json()


def test_the_clairvoyant_is_never_below_the_others() -> None:
    """On a load that mixes long prompts with long answers, the bound of comparison is the best of all."""
    mixed = Trace("made", tuple(Arrival(0.0, *((4000, 2), (50, 200), (300, 20))[number % 3]) for number in range(300)), False, False)
    figures = simulate(mixed, parse("burst=300,slots=8,warm=0"), policies([]))
    assert figures["clairvoyant"].good == max(one.good for one in figures.values())
    assert figures["clairvoyant"].good > figures["fifo"].good


def test_an_unknown_policy_is_refused() -> None:
    """By its name, with those that are known."""
    with pytest.raises(SettingsError, match="no policy 'lifo'") as caught:
        policies(["lifo"])
    assert "fifo" in (caught.value.hint or "")


# -- measures --


def test_jains_index() -> None:
    """1 where all have their share, 1/n where one has all, and a small wish that is filled is a full share."""
    assert jain(shares([5.0, 5.0], [10.0, 10.0])) == pytest.approx(1.0)
    assert jain(shares([10.0, 0.0], [10.0, 10.0])) == pytest.approx(0.5)
    assert jain(shares([9.0, 1.0], [100.0, 1.0])) == pytest.approx(1.0)
    assert math.isnan(jain(shares([0.0, 0.0], [1.0, 1.0])))


@given(st.floats(0.0, 100.0), st.lists(st.floats(0.0, 50.0), min_size=1, max_size=10))
def test_max_min_fairness(whole: float, wanted: list[float]) -> None:
    """Nobody gets more than it wants, all is dealt out where it is wanted, and who gets less than it wants gets no less than anybody."""
    due = max_min(whole, wanted)
    assert all(0 <= got <= want + 1e-9 for got, want in zip(due, wanted, strict=True))
    assert sum(due) == pytest.approx(min(whole, sum(wanted)), abs=1e-6)
    assert all(got >= max(due) - 1e-6 for got, want in zip(due, wanted, strict=True) if got < want - 1e-6)


def test_quantiles_are_values_that_were_measured() -> None:
    """By nearest rank."""
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.51, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    assert math.isnan(quantile([], 0.5))


def test_figures_of_a_known_run() -> None:
    """Four requests of 1 s on one slot, SLO 2 s: two in time, waits of 0 to 3 s."""
    asked = jobs(1000, 1000, 1000, 1000)
    Simulation(asked, PLAIN, fifo(PLAIN, 2.0)).run()
    figures = measure(asked, Scenario(slots=1, prefill=1000.0, slo=2.0))
    assert (figures.asked, figures.admitted, figures.good, figures.goodput, figures.starved) == (4, 4, 2, 0.5, 0)
    assert figures.wait_s["p50"] == pytest.approx(1.0)
    assert figures.longest_wait_s == pytest.approx(3.0)
    assert figures.took_s == pytest.approx(4.0)
    assert figures.within(2.5) == 0.5


def test_a_lost_request_is_an_error() -> None:
    """Figures of a run in which somebody was neither answered nor refused are not shown."""
    with pytest.raises(ValueError, match=r"requests \[0\]"):
        measure(jobs(100), Scenario())


def test_figures_are_json() -> None:
    """Without numbers that JSON does not know: what is not defined is null."""
    asked = jobs(100)
    asked[0].refused = True
    text = json.dumps(measure(asked, Scenario()).as_json(), allow_nan=False)
    assert json.loads(text)["wait_s"]["p50"] is None


# -- the picture --


def test_the_picture_shows_every_policy(tmp_path: Path) -> None:
    """A well-formed SVG with a curve and a name for each policy, the SLO, and the title as text; written to the file."""
    figures = simulate(trace(), parse("burst=100,warm=0"), policies(["fifo", "clairvoyant"]))
    write(tmp_path / "a.svg", [("<two> & one", 3.0, figures)])
    root = ET.parse(tmp_path / "a.svg").getroot()
    said = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<two> & one" in said
    assert "SLO 3 s" in said
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert (tmp_path / "a.svg").read_text() == draw([("<two> & one", 3.0, figures)])


def test_a_picture_of_nobody_can_be_drawn() -> None:
    """All refused: the curve lies on the ground."""
    asked = jobs(100)
    asked[0].refused = True
    ET.fromstring(draw([("none", 3.0, {"fifo": measure(asked, Scenario())})]))


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Another suffix, or a folder that is not there."""
    for path, words in ((tmp_path / "a.png", "writes SVG"), (tmp_path / "none" / "a.svg", "cannot be written")):
        with pytest.raises(SettingsError, match=words):
            write(path, [])


def test_clairvoyant_orders_are_several() -> None:
    """The bound of comparison weighs slots against reading in several ways."""
    assert len(BASELINES["clairvoyant"]) > 2
    assert clairvoyant(0.5)(PLAIN, 1.0).patient


# -- the command and its page --


def test_the_page_names_every_key_with_its_usual_value() -> None:
    """docs/simulate.md describes each key of --what-if as the code does, and each policy and format by its name."""
    page = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    for name, (_, _, what) in KEYS.items():
        assert f"| `{name}` | {getattr(Scenario(), name):g} | {what.removesuffix('; 0: the trace' + chr(39) + 's own')}" in page
    assert all(f"| `{name}` |" in page for name in [*BASELINES, "tidegate", *(one.name for one in FORMATS)])


def said(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["simulate", *args])
    return done.exit_code, done.output


def test_the_command_prints_a_table_for_each_scenario(tmp_path: Path) -> None:
    """Two scenarios, two tables with all policies; the plot is written."""
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,10\n2023-11-16 18:17:04.03,90,8\n")
    code, out = said("--trace", str(file), "--what-if", "burst=50", "--what-if", "burst=60,slots=2", "--plot", str(tmp_path / "p.svg"))
    assert code == 0, out
    assert "50 requests of azure-2023 on 16 slots: burst=50" in out
    assert "60 requests of azure-2023 on 2 slots: slots=2,burst=60" in out
    assert all(out.count(f"\n{name} ") == 2 for name in BASELINES)
    assert (tmp_path / "p.svg").is_file()


def test_the_command_prints_json(tmp_path: Path) -> None:
    """--json: the scenario in full and the figures of the chosen policy, nothing else on stdout."""
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,10\n")
    code, out = said("--trace", str(file), "--policy", "fifo", "--seed", "3", "--json")
    document = json.loads(out)
    [scenario] = document["scenarios"]
    assert (code, document["seed"], scenario["scenario"]["slots"], list(scenario["policies"])) == (0, 3, 16, ["fifo"])
    assert scenario["policies"]["fifo"]["good"] == 1


def test_the_command_takes_the_gateways_settings(tmp_path: Path) -> None:
    """A shorter bound refuses more of the same burst."""
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4800,100\n")
    refused = []
    for bound_s in ("1", "1000"):
        args = ("--policy", "tidegate", "--what-if", "burst=200,returns=0", "--json", "--set", f"admission.forecast_s={bound_s}")
        code, out = said("--trace", str(file), *args)
        assert code == 0, out
        refused.append(json.loads(out)["scenarios"][0]["policies"]["tidegate"]["refused"])
    assert refused[0] > refused[1] == 0


@pytest.mark.parametrize("args", [("--what-if", "slots=0"), ("--policy", "lifo"), ("--plot", "x.png"), ("--trace", "none.csv")])
def test_the_command_refuses_what_it_does_not_understand(tmp_path: Path, args: tuple[str, ...]) -> None:
    """Exit code 2, one sentence and a hint, no traceback."""
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,10\n")
    code, out = said("--trace", str(file), *args)
    assert code == 2
    assert "error:" in out
    assert "hint:" in out
