"""The page in a real Chromium, as people use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stand_in import ADMIN, ANSWER, DATA, MS, SECRET, House, record, serving, stored
from tests.waiting import until_blocking as until

from tidegate.api.page.session import COOKIE, new_session

pytestmark = pytest.mark.browser
SUPPORT = "#panel-support-answer"
ASSESS = "#panel-underwriting-assess"


class Desk:
    """A signed-in browser window, and what it complained of."""

    def __init__(self, browser: Any, site: str, width: int = 1440, scheme: str = "light", caller: Any = ADMIN) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.context.set_default_timeout(10_000)
        self.context.add_cookies([{"name": COOKIE, "value": new_session(caller, SECRET), "url": site, "httpOnly": True}])
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.site = site
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def go(self, path: str = "/") -> Any:
        self.page.goto(self.site + path)
        return self.page

    def ask(self, panel: str = SUPPORT, example: int = 0) -> None:
        """Fill the form of a panel with one of its examples, and send it."""
        self.page.click(f"{panel} .example >> nth={example}")
        self.page.click(f"{panel} button.main")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))


@pytest.fixture
def desk(browser: Any, site: str, house: House) -> Iterator[Desk]:
    house.live.records = [record(n) for n in range(30)]
    desk = Desk(browser, site)
    yield desk
    desk.context.close()


def test_an_answer_streams_with_its_passages_beside_it(desk: Desk, house: House) -> None:
    """An example fills the form; tokens come one by one; citations lead to passages; the times and the flight's link follow."""
    house.pace_s = 0.02
    page = desk.go()
    desk.ask()
    until(lambda: len(desk.text(f"{SUPPORT} .answer")) > 10)
    assert page.get_attribute(f"{SUPPORT} .answer", "aria-busy") == "true"
    assert "Home insurance: water damage" in desk.text(f"{SUPPORT} .passages")
    assert "page 4" in desk.text(f"{SUPPORT} .passages")
    page.wait_for_selector(f"{SUPPORT} .to-flight")
    assert house.bodies == [{"question": "How many days do I have to report a water leak?"}]
    assert desk.text(f"{SUPPORT} .answer").replace("\n", " ") == ANSWER.replace(" [", "").replace("]", "")
    assert "First token" in desk.text(f"{SUPPORT} .measured")
    assert "612, 44" in desk.text(f"{SUPPORT} .measured")
    page.click(f"{SUPPORT} .mark-n >> nth=2")
    assert page.evaluate("document.activeElement.id") == "support-answer-passage-2"
    assert page.get_attribute(f"{SUPPORT} .to-flight", "href") == "/flights/" + record(100_002).id
    assert desk.complaints == []


def test_a_form_becomes_typed_fields_and_the_answer_is_a_table(desk: Desk, house: House) -> None:
    """Numbers, booleans, lists and nested objects reach the route as such."""
    page = desk.go("/#underwriting-assess")
    page.click(f"{ASSESS} .example >> nth=1")
    page.select_option(f"{ASSESS} [name='address.country']", "CN")
    page.click(f"{ASSESS} button.main")
    page.wait_for_selector(f"{ASSESS} .to-flight")
    conditions = ["hypertension", "type 2 diabetes"]
    assert house.bodies == [
        {"age": 71, "smoker": True, "sum_insured": 90000, "medical_history": conditions, "address": {"country": "CN"}},
    ]
    assert "risk class" in desk.text(f"{ASSESS} .answer")
    assert "Age above 65" in desk.text(f"{ASSESS} .answer")
    assert desk.complaints == []


def test_an_empty_list_can_be_said(desk: Desk, house: House) -> None:
    """A list that is empty is not one that is not given."""
    page = desk.go("/#underwriting-assess")
    desk.ask(ASSESS)
    page.wait_for_selector(f"{ASSESS} .to-flight")
    page.check(f"{ASSESS} [data-none=medical_history]")
    page.click(f"{ASSESS} button.main")
    until(lambda: len(house.bodies) == 2)
    assert [body.get("medical_history") for body in house.bodies] == [None, []]


def test_what_the_contract_refuses_is_shown_at_its_field(desk: Desk, house: House) -> None:
    """The message, the code and the trace, and the field that is wrong has the focus."""
    page = desk.go("/#underwriting-assess")
    page.click(f"{ASSESS} .example >> nth=1")
    page.fill(f"{ASSESS} [name=medical_history]", "")
    page.click(f"{ASSESS} button.main")
    page.wait_for_selector(f"{ASSESS} .problem:not([hidden])")
    said = desk.text(f"{ASSESS} .problem")
    assert "Above 65 the medical history is needed." in said
    assert "input_invalid" in said
    assert "02" * 16 in said
    assert page.evaluate("document.activeElement.name") == "medical_history"


def answers_again(desk: Desk, house: House) -> None:
    """Asked once more, the server answers in full, and what was said before is gone."""
    house.mode = "answer"
    desk.page.click(f"{SUPPORT} button.main")
    desk.page.wait_for_selector(f"{SUPPORT} .mark-n")
    assert desk.page.is_hidden(f"{SUPPORT} .problem")


@pytest.mark.parametrize(("mode", "said"), [
    ("error", "The engine's stream ended before its end."), ("cut", "The stream ended before the answer was complete."),
    ("refuse", "Try again in 12 s."), ("message", "Ticket T-01A22A-2818EA-623AF1"),
])
def test_a_failure_is_told_and_the_next_asking_works(desk: Desk, house: House, mode: str, said: str) -> None:
    """Text that had come stays; an error event, a stream without its end and a refusal each say what happened."""
    house.mode = mode
    page = desk.go()
    desk.ask()
    page.wait_for_selector(f"{SUPPORT} .problem:not([hidden])")
    assert said in desk.text(f"{SUPPORT} .problem")
    assert (mode in ("refuse", "message")) != desk.text(f"{SUPPORT} .said").startswith("Answer\nYou have seven days")
    answers_again(desk, house)


def test_a_lower_rung_says_so_over_its_answer(desk: Desk, house: House) -> None:
    """The rung's own sentence, as a warning and not as a failure, and the answer below it; the next full answer is without."""
    house.mode = "rung"
    page = desk.go()
    desk.ask()
    page.wait_for_selector(f"{SUPPORT} .to-flight")
    assert desk.text(f"{SUPPORT} .problem.warn:not(.bad)") == "From our list of frequent questions."
    assert desk.text(f"{SUPPORT} .answer").startswith("You have seven days")
    answers_again(desk, house)


def test_stop_stops_the_request(desk: Desk, house: House) -> None:
    """The server sees the client leave."""
    house.mode = "hang"
    page = desk.go()
    desk.ask()
    until(lambda: len(desk.text(f"{SUPPORT} .answer")) > 10)
    page.click(f"{SUPPORT} .stop")
    until(lambda: house.left == ["answer"])
    assert desk.text(f"{SUPPORT} .status") == "Stopped"


def test_a_session_that_is_over_says_so(desk: Desk, house: House) -> None:
    """The ask box tells to sign in again."""
    page = desk.go()
    desk.context.clear_cookies()
    desk.ask()
    page.wait_for_selector(f"{SUPPORT} .problem:not([hidden])")
    assert "sign in again" in desk.text(f"{SUPPORT} .problem")


def test_what_models_and_documents_say_is_never_run(desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markup in tokens, answers and passages is text."""
    hostile = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"
    monkeypatch.setattr("stand_in.ANSWER", hostile)
    passage = {"n": 1, "id": "a", "document": "d", "title": hostile, "page": 1, "score": 0.5, "text": hostile}
    monkeypatch.setattr("stand_in.PASSAGES", [passage])
    page = desk.go()
    desk.ask()
    page.wait_for_selector(f"{SUPPORT} .to-flight")
    assert desk.text(f"{SUPPORT} .answer") == hostile
    assert page.locator(f"{SUPPORT} .run img, {SUPPORT} .run b").count() == 0
    assert desk.complaints == []


def test_a_flight_appears_by_itself_and_focus_stays(desk: Desk, house: House) -> None:
    """The list grows at its head while somebody stands on a row with the keyboard."""
    page = desk.go()
    page.wait_for_selector("#live[data-state=on]")
    page.focus("#rows li:nth-child(3) a")
    stood = page.evaluate("document.activeElement.getAttribute('href')")
    house.live.add(record(31, capability="support/answer"))
    page.wait_for_selector(f"#f-{record(31).id}")
    assert page.get_attribute("#rows li:first-child a", "href") == f"/flights/{record(31).id}"
    assert page.evaluate("document.activeElement.getAttribute('href')") == stood
    assert desk.complaints == []


def test_the_list_is_live_however_late_a_script_comes(desk: Desk) -> None:
    """Half a second for the extension alone: htmx waits for it."""
    def late(route: Any) -> None:
        desk.page.wait_for_timeout(500)
        route.continue_()

    desk.page.route("**/hx-sse.min.js*", late)
    desk.go().wait_for_selector("#live[data-state=on]")


def test_a_filter_narrows_the_list_and_keeps_it_live(desk: Desk, house: House) -> None:
    """Without a reload; the address can be shared; what the filter does not take does not appear."""
    page = desk.go()
    page.wait_for_selector("#live[data-state=on]")
    page.select_option("#by-end", "cut")
    until(lambda: {text[:3] for text in page.locator("#rows .tone").all_inner_texts()} == {"cut"})
    assert "end=cut" in page.url
    page.wait_for_selector("#live[data-state=on]")
    house.live.add(record(31, end="stop"))
    house.live.add(record(32, end="cut"))
    page.wait_for_selector(f"#f-{record(32).id}")
    assert page.locator(f"#f-{record(31).id}").count() == 0
    assert house.page is not None
    until(lambda: house.page is not None and house.page.live.listeners == 1)


def test_a_closed_window_leaves_no_listener(browser: Any, site: str, house: House) -> None:
    """Three windows, then none."""
    desks = [Desk(browser, site) for _ in range(3)]
    for desk in desks:
        desk.go().wait_for_selector("#live[data-state=on]")
    assert house.page is not None
    assert house.page.live.listeners == 3
    for desk in desks:
        desk.context.close()
    until(lambda: house.page is not None and house.page.live.listeners == 0)


def test_a_stop_does_not_wait_for_open_pages(browser: Any, house: House) -> None:
    """The server ends while a window still looks, and the window says that the list is no longer live."""
    with serving(house) as address:
        desk = Desk(browser, address)
        page = desk.go()
        page.wait_for_selector("#live[data-state=on]")
    page.wait_for_selector("#live[data-state=off]")
    desk.context.close()


def test_the_list_comes_back_after_a_lost_connection(desk: Desk, house: House) -> None:
    """What ended meanwhile is there, once."""
    page = desk.go()
    page.wait_for_selector("#live[data-state=on]")
    desk.context.set_offline(True)
    assert house.page is not None
    page.evaluate("document.querySelector('#flights')._htmx.sse.reader.cancel()")
    page.wait_for_selector("#live[data-state=off]")
    house.live.add(record(31))
    desk.context.set_offline(False)
    page.wait_for_selector(f"#f-{record(31).id}")
    page.wait_for_selector("#live[data-state=on]")
    assert page.locator(f"#f-{record(31).id}").count() == 1


def test_one_signs_in_with_the_keyboard_and_out_again(browser: Any, site: str, house: House) -> None:
    """A wrong key says so; the right one leads on; signing out leads back."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(site + "/")
    page.keyboard.type("tg_wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert]")
    page.keyboard.type("tg_acme")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rows", state="attached")
    assert page.evaluate("document.cookie") == ""
    page.click("text=Sign out")
    page.wait_for_url(site + "/login")
    page.goto(site + "/")
    assert page.locator("#rows").count() == 0
    context.close()


def test_a_printed_link_leads_to_the_overview(browser: Any, site: str, house: House) -> None:
    """And leaves no token in the address."""
    assert house.tokens is not None
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{site}/login?token={house.tokens.issue(DATA)}")
    page.wait_for_url(site + "/")
    assert page.locator("#flights").count() == 1
    context.close()


def test_tabs_work_with_arrow_keys(desk: Desk) -> None:
    """Right and left go round, and the chosen panel is the one that is seen."""
    page = desk.go()
    page.focus("#tab-support-answer")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-underwriting-assess"
    assert page.is_visible(ASSESS)
    assert page.is_hidden(SUPPORT)
    page.keyboard.press("ArrowRight")
    assert page.is_visible(SUPPORT)


def test_control_and_enter_ask(desk: Desk, house: House) -> None:
    """In Chinese, too."""
    page = desk.go()
    page.fill(f"{SUPPORT} textarea", "车险理赔需要准备哪些材料?")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(f"{SUPPORT} .to-flight")
    assert house.bodies == [{"question": "车险理赔需要准备哪些材料?"}]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 768, 1440])
def test_nothing_sticks_out(browser: Any, site: str, house: House, width: int, scheme: str) -> None:
    """No page scrolls sideways, whatever the width, also with long names and a running answer."""
    long = "a-name-that-somebody-thought-would-be-short-enough/" * 3
    house.live.records = [record(n) for n in range(60)] + [record(61, capability=long, model=long, error_code=long[:60], end="error")]
    house.flights.down = True
    desk = Desk(browser, site, width, scheme)
    page = desk.go()
    desk.ask()
    page.wait_for_selector(f"{SUPPORT} .to-flight")
    outside = """[...document.querySelectorAll("body *")].filter((one) => !one.closest(".sr, .skip, .row small") &&
        one.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map((one) => one.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside) == []
    for path in ["/#underwriting-assess", f"/flights/{record(6).id}", f"/flights/{record(61).id}", "/flights/none", "/login"]:
        desk.go(path)
        assert page.evaluate(outside) == [], path
    desk.context.close()


def test_the_waterfall_is_to_scale(desk: Desk, house: House) -> None:
    """A part of half the time is half as wide as the whole, and begins where it began."""
    house.live.records = [record(6, laps=[("read", 25 * MS), ("engine.first_token", 50 * MS), ("close", 25 * MS)], whole_ns=100 * MS)]
    page = desk.go(f"/flights/{record(6).id}")
    boxes = [page.locator(".waterfall tbody svg").nth(n).bounding_box() for n in range(3)]
    bars = [page.locator(".waterfall tbody rect").nth(n).bounding_box() for n in range(3)]
    assert bars[1]["width"] == pytest.approx(boxes[1]["width"] / 2, abs=1)
    assert bars[1]["x"] - boxes[1]["x"] == pytest.approx(boxes[1]["width"] / 4, abs=1)


def test_the_page_asks_nobody_else(desk: Desk) -> None:
    """Every request of both pages goes to our own host: it works without internet."""
    desk.go().wait_for_selector("#live[data-state=on]")
    desk.go(f"/flights/{record(6).id}")
    assert [url for url in desk.asked if not url.startswith(desk.site)] == []
    assert desk.complaints == []


# -- passages on their pages


def places_on_screen(page: Any, figure: str) -> list[dict[str, float]]:
    """The highlighted rectangles, in points of the sheet as it lies on the screen."""
    return page.evaluate("""(figure) => {
        const paper = document.querySelector(figure).querySelector("img");
        const at = paper.getBoundingClientRect();
        const scale = paper.getAttribute("width") / at.width;
        return [...document.querySelectorAll(figure + " rect")].map((rect) => {
            const box = rect.getBoundingClientRect();
            return { x0: (box.left - at.left) * scale, top: (box.top - at.top) * scale, x1: (box.right - at.left) * scale,
                bottom: (box.bottom - at.top) * scale };
        });
    }""", figure)


def lies_on_the_passage(page: Any, item: str) -> None:
    """The picture came, and each highlight lies where the loader found its row."""
    page.wait_for_function("(item) => document.querySelector(item + ' .paper img')?.naturalWidth > 0", arg=item)
    boxes = stored()["claims#2"].boxes
    shown = places_on_screen(page, f"{item} .paper")
    assert len(shown) == len(boxes) > 5
    for place, box in zip(shown, boxes, strict=True):
        assert [place["x0"], place["top"], place["x1"], place["bottom"]] == pytest.approx(box[1:], abs=1.5)


@pytest.mark.parametrize("width", [390, 1440])
def test_a_passage_of_a_flight_is_shown_on_its_page(browser: Any, site: str, house: House, width: int) -> None:
    """A click puts the picture below the passage, highlighted where it stands; a second one takes it away; nothing sticks out."""
    house.live.records = [record(2)]
    desk = Desk(browser, site, width)
    page = desk.go(f"/flights/{record(2).id}")
    item = "li[id='passage-claims#2']"
    page.click(f"{item} .place")
    lies_on_the_passage(page, item)
    assert page.get_attribute(f"{item} .place", "aria-expanded") == "true"
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.url == f"{desk.site}/flights/{record(2).id}"
    page.click(f"{item} .place")
    assert page.is_hidden(f"{item} .paper")
    assert desk.complaints == []
    assert [url for url in desk.asked if not url.startswith(desk.site)] == []
    desk.context.close()


def test_an_answer_leads_to_the_page_that_it_rests_on(desk: Desk, house: House) -> None:
    """In the ask box, as soon as the answer is complete; a passage without a place has no such link."""
    house.live.records = [record(100_002)]
    page = desk.go()
    desk.ask()
    page.wait_for_selector(f"{SUPPORT} .to-flight")
    assert page.locator(f"{SUPPORT} .passages .place").count() == 2
    page.click("#support-answer-passage-2 .place")
    lies_on_the_passage(page, "#support-answer-passage-2")
    page.click("#support-answer-passage-3 .place")
    page.wait_for_selector("#support-answer-passage-3 .shown")
    assert "The file of this document is not kept." in desk.text("#support-answer-passage-3 .shown")
    assert desk.complaints == []


def test_a_flight_that_is_known_a_moment_later_is_asked_for_again(desk: Desk, house: House) -> None:
    """Another worker may have had the answer: the first look finds no flight, the second one does, and nobody has to know."""
    house.live.records = []
    page = desk.go()
    desk.ask()
    page.wait_for_selector(f"{SUPPORT} .to-flight")
    looks = 0

    def look(route: Any) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            house.live.records = [record(100_002)]
        route.continue_()

    page.route("**/passages/claims*", look)
    page.click("#support-answer-passage-2 .place")
    lies_on_the_passage(page, "#support-answer-passage-2")
    assert looks == 2


def test_the_page_of_a_passage_needs_no_script(browser: Any, site: str, house: House) -> None:
    """Its address can be shared: without any JavaScript the picture is there, highlighted."""
    house.live.records = [record(2)]
    context = browser.new_context(java_script_enabled=False)
    context.add_cookies([{"name": COOKIE, "value": new_session(DATA, SECRET), "url": site, "httpOnly": True}])
    page = context.new_page()
    page.goto(f"{site}/flights/{record(2).id}")
    page.click("li[id='passage-claims#2'] .place")
    page.wait_for_selector(".paper img")
    assert page.url.endswith("/passages/claims%232")
    assert page.locator(".paper rect").count() == len(stored()["claims#2"].boxes)
    context.close()


def test_a_picture_that_cannot_be_drawn_now_may_be_later(desk: Desk, house: House) -> None:
    """The sentence stands in its place; closed and opened again, it is asked for again."""
    house.live.records = [record(2)]
    files, house.files.files = house.files.files, {}
    page = desk.go(f"/flights/{record(2).id}")
    item = "li[id='passage-claims#2']"
    page.click(f"{item} .place")
    page.wait_for_selector(f"{item} .shown .notice")
    assert "The file is no longer there." in desk.text(f"{item} .shown")
    house.files.files = files
    page.click(f"{item} .place")
    page.click(f"{item} .place")
    lies_on_the_passage(page, item)


def test_a_session_that_is_over_leads_to_the_login(desk: Desk, house: House) -> None:
    """And from there to the passage."""
    house.live.records = [record(2)]
    page = desk.go(f"/flights/{record(2).id}")
    desk.context.clear_cookies()
    page.click("li[id='passage-claims#2'] .place")
    page.wait_for_selector("#key")
    assert page.get_attribute("input[name=then]", "value") == f"/flights/{record(2).id}/passages/claims#2"
