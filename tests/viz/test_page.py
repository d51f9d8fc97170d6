"""The HTML page in a real browser, the network blocked; state is read from data-* attributes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from minichunk.core.chrome_trace import chrome_trace
from minichunk.core.stalls import find_stalls
from minichunk.core.trace import Trace
from minichunk.viz.columns import columns
from minichunk.viz.html import page, to_html
from minichunk.viz.timeline import timeline
from tests.viz.crowded import crowded_trace
from tests.viz.scenes import big_trace, stall_scene

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {"whole prompts": stall_scene(), "chunked": stall_scene(1000)}


@pytest.fixture(scope="module")
def both(traces: dict[str, Trace]) -> str:
    return to_html(traces)


@pytest.fixture(scope="module")
def whole(traces: dict[str, Trace]) -> str:
    return to_html(traces["whole prompts"])


def step_starts(trace: Trace) -> list[float]:
    return [round(step.start, 7) for step in trace.steps]


def test_says_at_once_where_the_numbers_come_from(open_page: Open) -> None:
    shown = open_page(to_html({"a": stall_scene(), "b": stall_scene(clock="wall")}))
    badges = shown.page.locator(".mc-badge").all_inner_texts()
    assert badges == ["simulated llama-2-7b on a100-80g-sxm", "measured on NVIDIA A100, llama-2-7b"]


def test_counts_the_stalls_and_names_the_longest(
    open_page: Open, whole: str, traces: dict[str, Trace]
) -> None:
    shown = open_page(whole)
    stalls = find_stalls(traces["whole prompts"])
    assert shown.state()["stalls"] == str(len(stalls)) != "0"
    text = shown.page.locator(".mc-chip.mc-stalls").inner_text()
    assert f"{len(stalls)} stalls" in text
    assert f"{max(stall.gap for stall in stalls) * 1e3:.0f} ms" in text


def test_arrows_move_by_steps(open_page: Open, whole: str, traces: dict[str, Trace]) -> None:
    shown, starts = open_page(whole), step_starts(traces["whole prompts"])
    assert shown.press("ArrowRight", "ArrowRight", "ArrowRight")["step"] == "3"
    assert float(shown.press("ArrowLeft")["cursor"]) == pytest.approx(starts[2], abs=1e-6)
    assert shown.press("Shift+ArrowRight")["step"] == "12"
    assert shown.press("Shift+ArrowLeft")["step"] == "2"
    assert shown.press("End")["step"] == str(len(starts) - 1)
    assert shown.press("ArrowRight")["step"] == str(len(starts) - 1)
    assert shown.press("Home")["step"] == "0"


def test_brackets_visit_the_stalls(open_page: Open, both: str, traces: dict[str, Trace]) -> None:
    shown = open_page(both)
    found = [stall.start for trace in traces.values() for stall in find_stalls(trace)]
    first = shown.press("]")
    assert float(first["cursor"]) == pytest.approx(min(found), abs=1e-6)
    assert re.search(
        r"request 0: gap of \d+ ms = \d+× a decode step, waiting for chunk", first["live"]
    )
    assert "10 requests stall here" in first["live"]
    seen = {first["cursor"]}
    for _ in range(12):
        seen.add(shown.press("]")["cursor"])
    # Stalls that begin together are one stop; panes share the time axis.
    assert len(seen) == len({round(start, 6) for start in found})
    for _ in range(12):
        state = shown.press("[")
    assert float(state["cursor"]) == pytest.approx(min(found), abs=1e-6)


def test_click_puts_the_cursor_and_selects_the_lane(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    box = shown.box(".mc-lanes")
    shown.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 12)
    state = shown.state()
    start, end = float(state["viewStart"]), float(state["viewEnd"])
    assert float(state["cursor"]) == pytest.approx((start + end) / 2, rel=0.01)
    assert state["selection"] == "0"
    assert shown.press("Escape")["selection"] == ""


def test_hover_explains_a_stall_and_the_tooltip_leaves_with_the_pointer(
    open_page: Open, whole: str, traces: dict[str, Trace]
) -> None:
    shown = open_page(whole)
    stall = find_stalls(traces["whole prompts"])[0]
    box, state = shown.box(".mc-lanes"), shown.state()
    span = float(state["viewEnd"]) - float(state["viewStart"])
    x = box["x"] + box["width"] * ((stall.start + stall.end) / 2 - float(state["viewStart"])) / span
    shown.page.mouse.move(x, box["y"] + 12)
    assert shown.page.locator(".mc-tip").is_visible()
    assert stall.describe() in shown.state()["hover"]
    shown.page.mouse.move(box["x"] - 20, box["y"] + 12)
    name_tip = shown.state()["hover"]
    assert f"Longest stall: {stall.describe()}" in name_tip
    assert "64 prompt tokens, 60 output tokens" in name_tip
    shown.page.mouse.move(x, box["y"] + box["height"] + 30)
    assert "prefill" in shown.state()["hover"]
    shown.page.mouse.move(5, 5)
    assert shown.state()["hover"] == ""
    assert not shown.page.locator(".mc-tip").is_visible()


@pytest.mark.parametrize("modifier", ["Control", "Shift", "Alt"])
def test_wheel_zooms_with_a_modifier_only(open_page: Open, whole: str, modifier: str) -> None:
    shown = open_page(whole, height=300)
    before = shown.state()
    box = shown.box(".mc-lanes")
    shown.page.mouse.move(box["x"] + 200, box["y"] + 20)
    shown.page.keyboard.down(modifier)
    shown.page.mouse.wheel(0, -240)
    shown.page.keyboard.up(modifier)
    shown.page.wait_for_function(
        f"document.querySelector('.mc-timeline').dataset.viewEnd !== '{before['viewEnd']}'"
    )
    zoomed = shown.state()
    assert float(zoomed["viewEnd"]) < float(before["viewEnd"])
    assert shown.page.evaluate("scrollY") == 0
    shown.page.mouse.wheel(0, 200)
    shown.page.wait_for_function("scrollY > 100")
    after = shown.state()
    assert (after["viewStart"], after["viewEnd"]) == (zoomed["viewStart"], zoomed["viewEnd"])


def test_keys_and_buttons_zoom_about_the_cursor(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    full = shown.press("End")

    def width(state: dict[str, str]) -> float:
        return float(state["viewEnd"]) - float(state["viewStart"])

    once = shown.press("+")
    assert width(once) == pytest.approx(width(full) / 1.6, rel=1e-3)
    assert float(once["viewStart"]) <= float(once["cursor"]) <= float(once["viewEnd"])
    assert width(shown.press("-")) == pytest.approx(width(full), rel=1e-3)
    shown.page.click("[data-action=zoom-in]")
    shown.page.click("[data-action=zoom-in]")
    assert width(shown.state()) < width(once)
    assert width(shown.press("0")) == pytest.approx(width(full), rel=1e-6)
    shown.page.click("[data-action=zoom-out]")
    assert width(shown.state()) == pytest.approx(width(full), rel=1e-6)


def test_dragging_pans_lanes_and_scrubs_on_the_axis(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.press("+", "+", "+")
    before, box = shown.state(), shown.box(".mc-lanes")
    shown.page.mouse.move(box["x"] + 400, box["y"] + 60)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    shown.page.mouse.up()
    after = shown.state()
    width = float(before["viewEnd"]) - float(before["viewStart"])
    moved = float(after["viewStart"]) - float(before["viewStart"])
    assert moved == pytest.approx(width * 200 / box["width"], rel=0.02)
    assert after["cursor"] == before["cursor"]
    assert after["selection"] == ""
    axis = shown.box(".mc-axis")
    shown.page.mouse.move(box["x"] + 100, axis["y"] + 8)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 300, axis["y"] + 8, steps=4)
    shown.page.mouse.up()
    scrubbed = shown.state()
    expected = float(after["viewStart"]) + width * 300 / box["width"]
    assert float(scrubbed["cursor"]) == pytest.approx(expected, rel=0.01)


def test_panes_share_one_axis_and_one_scrubber(
    open_page: Open, both: str, traces: dict[str, Trace]
) -> None:
    shown = open_page(both)
    assert shown.page.locator(".mc-axis").count() == 1
    assert shown.page.locator("[role=slider]").count() == 1
    left, right = (shown.box(".mc-lanes", k) for k in (0, 1))
    assert (left["x"], left["width"]) == (right["x"], right["width"])
    shown.page.mouse.click(right["x"] + right["width"] * 0.4, right["y"] + 5)
    cursor = float(shown.state()["cursor"])
    lines = [shown.box(".mc-cursor", k)["x"] for k in (0, 1)]
    assert lines[0] == lines[1]
    for k, trace in enumerate(traces.values()):
        step = sum(start <= cursor for start in step_starts(trace)) - 1
        assert shown.page.locator(".mc-pane").nth(k).get_attribute("data-step") == str(step)
        heading = shown.page.locator(".mc-side h3").nth(k).inner_text()
        assert heading.startswith(f"Step {step}")
        assert f"of 0 to {len(trace.steps) - 1}" in heading


def test_side_panel_shows_batch_positions_and_who_was_left_out(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.press("]")
    panel = shown.page.locator(".mc-content")
    assert "chunk 1/1: 0–7,999 of 8,000" in panel.inner_text()
    assert "the policy did not offer it" in panel.inner_text()
    shown.press("ArrowRight")
    assert panel.locator("li", has_text="decode: ").count() == 11


def test_block_tables_follow_the_scrubber(
    open_page: Open, whole: str, traces: dict[str, Trace]
) -> None:
    shown, trace = open_page(whole), traces["whole prompts"]
    shown.page.click("[data-tab=blocks]")
    for keys in (("Home",), ("End",), ("[",)):
        step = int(shown.press(*keys)["step"])
        held: dict[str, int] = {}
        for event in trace.block_events:
            if event.step <= step:
                held[event.request_id] = held.get(event.request_id, 0) + len(event.blocks)
        lines = shown.page.locator(".mc-content li").all_inner_texts()
        counted = {}
        for line in lines:
            name, text = line.split("\n") if "\n" in line else line.split(" ", 1)
            counted[name.strip()] = int(re.search(r"([\d,]+) block", text)[1].replace(",", ""))
        assert counted == held
    assert shown.page.locator("canvas.mc-pool").count() == 1


def test_the_pool_grid_agrees_with_the_engines_own_count(open_page: Open) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    trace = crowded_trace(seed)
    assert any(event.kind == "preempt" for event in trace.events)
    assert any(event.kind == "share" for event in trace.block_events)
    shown = open_page(to_html(trace))
    shown.page.click("[data-tab=blocks]")
    for key in ("Home", *["Shift+ArrowRight"] * 12, "ArrowLeft", "End"):
        step = int(shown.press(key)["step"])
        used = shown.page.locator("canvas.mc-pool").get_attribute("data-used")
        assert int(used) == trace.steps[step].used_blocks


def test_roofline_has_a_dot_per_step(open_page: Open, whole: str, traces: dict[str, Trace]) -> None:
    shown = open_page(whole)
    shown.page.click("[data-tab=roofline]")
    shown.settle()
    # Two more dots mark the step at the scrubber.
    dots = shown.page.locator(".mc-content circle").count()
    assert dots == len(traces["whole prompts"].steps) + 2


def test_space_plays_and_pauses(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.page.select_option("[data-action=speed]", "1")
    assert shown.press(" ")["playing"] == "true"
    shown.page.wait_for_function("+document.querySelector('.mc-timeline').dataset.cursor > 0.1")
    state = shown.press(" ")
    assert state["playing"] == "false"
    shown.page.wait_for_timeout(120)
    assert shown.state()["cursor"] == state["cursor"]


def test_reduced_motion_plays_step_by_step(
    open_page: Open, whole: str, traces: dict[str, Trace]
) -> None:
    shown = open_page(whole, calm=True)
    shown.press(" ")
    shown.page.wait_for_function("+document.querySelector('.mc-timeline').dataset.step >= 1")
    state = shown.press(" ")
    starts = step_starts(traces["whole prompts"])
    assert min(abs(float(state["cursor"]) - start) for start in starts) < 1e-6


def test_handled_keys_go_no_further_and_others_do(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.page.evaluate(
        "window.heard = []; document.addEventListener('keydown', e => window.heard.push(e.key))"
    )
    shown.press("ArrowRight", "0", "]", " ", " ", "Home", "b", "Control+ArrowRight")
    assert shown.page.evaluate("window.heard.filter(k => k !== 'Control')") == ["b", "ArrowRight"]
    # JupyterLab reads keys first; this mark on what has the focus keeps it from acting on them.
    focusable = "button, select, input, summary, [tabindex]"
    marked = shown.page.locator("[data-lm-suppress-shortcuts]").count()
    assert shown.page.locator(focusable).count() == marked


def test_keys_work_from_the_toolbar_but_not_in_fields(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.page.click("[data-action=zoom-in]")
    shown.page.keyboard.press("ArrowRight")
    assert shown.state()["step"] == "1"
    shown.page.keyboard.press(" ")  # the button's own key: zooms again, plays nothing
    state = shown.state()
    assert state["playing"] == "false"
    assert float(state["viewEnd"]) - float(state["viewStart"]) < 1.2
    shown.page.focus("[data-action=speed]")
    shown.page.keyboard.press("ArrowRight")
    assert shown.state()["step"] == "1"


def test_predict_hides_the_future_and_scores_the_answer(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.press("]", "ArrowLeft")
    shown.page.click("[data-action=predict]")
    shown.settle()
    assert shown.page.locator(".mc-veil").is_visible()
    assert not shown.page.locator(".mc-chips").is_visible()
    box = shown.box(".mc-plot")
    shown.page.mouse.move(box["x"] + 20, box["y"] + 12)
    assert shown.state()["hover"] == "request 0\n64 prompt tokens"
    assert shown.press("]")["live"] == "Stalls are hidden while you predict."
    step = int(shown.state()["step"])
    boxes = shown.page.locator(".mc-predict input")
    assert boxes.count() == 11
    boxes.nth(0).check()  # wrong: the ten decodes stand still while the prompt takes the step
    shown.page.click(".mc-predict button[type=submit]")
    state = shown.state()
    assert int(state["step"]) == step + 1
    assert state["score"] == "9/11"
    assert "request 10 got chunk 1/1 (8,000 tokens)" in state["live"]


@pytest.mark.parametrize("dark", [False, True])
def test_follows_the_colour_scheme(open_page: Open, whole: str, dark: bool) -> None:
    shown = open_page(whole, dark=dark)
    assert shown.state()["theme"] == ("dark" if dark else "light")
    shown.page.emulate_media(color_scheme="light" if dark else "dark")
    assert shown.state()["theme"] == ("light" if dark else "dark")


def test_follows_a_hosts_theme_variables(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.page.evaluate(
        "document.documentElement.style.setProperty('--jp-layout-color0', '#111111')"
    )
    assert shown.state()["theme"] == "dark"
    background = "getComputedStyle(document.querySelector('.mc-frame')).backgroundColor"
    assert shown.page.evaluate(background) == "rgb(17, 17, 17)"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("dark", "grounds"), [(False, ["#ffffff"]), (True, ["#111111", "#1e1e1e"])]
)
def test_colours_stand_out_from_the_ground(
    open_page: Open, whole: str, dark: bool, grounds: list[str]
) -> None:
    shown = open_page(whole, dark=dark)
    shown.settle()
    names = ["queued", "decode", "prefill", "preempted", "interference", "stall", "muted", "text"]
    colours = shown.page.evaluate(
        "names => names.map(n => getComputedStyle(document.querySelector('.mc-timeline'))"
        ".getPropertyValue('--mc-' + n).trim())",
        names,
    )
    for name, colour in zip(names, colours, strict=True):
        for ground in grounds:
            needed = 4.5 if name in ("muted", "text") else 3.0
            assert contrast(colour, ground) >= needed, (name, colour, ground)


def test_redraws_on_resize_and_is_narrow_without_overflow(open_page: Open, both: str) -> None:
    shown = open_page(both)
    wide = shown.box(".mc-lanes")["width"]
    for width in (1600, 700, 420):
        shown.page.set_viewport_size({"width": width, "height": 900})
        narrow = str(width <= 720).lower()
        shown.page.wait_for_selector(f".mc-timeline[data-narrow={narrow}]")
        shown.settle()
        assert shown.box(".mc-lanes")["width"] != wide
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
        frame, plot = shown.box(".mc-frame"), shown.box(".mc-plot")
        assert plot["x"] + plot["width"] <= frame["x"] + frame["width"] - 10
        ratio = shown.page.evaluate(
            "(c => c.width / c.getBoundingClientRect().width)(document.querySelector('.mc-lanes'))"
        )
        assert ratio == pytest.approx(1, abs=0.02)


def test_draws_again_when_it_was_hidden_or_detached(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.page.evaluate(
        "window.kept = document.querySelector('.mc-timeline');"
        "window.at = window.kept.parentNode; window.kept.remove()"
    )
    shown.page.set_viewport_size({"width": 1000, "height": 700})
    shown.page.evaluate("window.draws = +window.kept.dataset.draws; window.at.append(window.kept)")
    shown.page.wait_for_function("+window.kept.dataset.draws > window.draws")
    inked = """(c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n })
      (document.querySelector('.mc-lanes'))"""
    # Its new size is observed a frame later: the canvas may be empty once more before it is drawn.
    shown.page.wait_for_function(f"{inked} > 1000")


def test_two_instances_share_no_id(open_page: Open, whole: str) -> None:
    shown = open_page(whole)
    shown.page.evaluate("""async () => {
      const source = document.getElementById('minichunk-source').textContent;
      const blob = new Blob([source], { type: 'text/javascript' });
      const { mount } = await import(URL.createObjectURL(blob));
      const { payload } = JSON.parse(document.getElementById('minichunk-data').textContent);
      const el = document.createElement('div'); document.body.append(el); mount(el, payload);
    }""")
    shown.page.wait_for_function("document.querySelectorAll('.mc-frame').length >= 2")
    ids = shown.page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    shown.page.locator(".mc-main").nth(1).focus()
    shown.page.keyboard.press("ArrowRight")
    shown.settle()
    steps = shown.page.locator(".mc-timeline").evaluate_all("all => all.map(t => t.dataset.step)")
    assert steps[:2] == ["0", "1"]


HOSTILE = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">'


def test_names_and_texts_from_users_stay_text(open_page: Open) -> None:
    names = [HOSTILE, "</script><script>window.hacked=2</script>", "$& {{title}} \\u003c"]
    names += [f"r{i}" for i in range(8)]
    trace = stall_scene(1000, names=names)
    trace.requests[HOSTILE].note = HOSTILE
    trace.requests[HOSTILE].tenant = HOSTILE
    trace.meta["model"] = HOSTILE
    shown = open_page(to_html({HOSTILE: trace, "plain": trace}))
    shown.press("]")
    box = shown.box(".mc-plot")
    shown.page.mouse.move(box["x"] + 20, box["y"] + 12)
    assert HOSTILE in shown.state()["hover"]
    shown.page.click("summary:has-text('table')")
    for tab in ("step", "blocks", "roofline"):
        shown.page.locator(f"[data-tab={tab}]").first.click()
    shown.settle()
    assert shown.page.evaluate("window.hacked") is None
    assert shown.page.locator(".mc-title").first.inner_text() == HOSTILE
    svg = download(shown, "SVG")
    assert "<script" not in svg
    assert "<img" not in svg


def test_is_operable_and_readable_without_seeing_it(open_page: Open, both: str) -> None:
    shown = open_page(both)
    assert shown.page.locator("[role=status][aria-live=polite]").count() == 1
    nameless = shown.page.evaluate("""
      [...document.querySelectorAll('button, select, canvas, [role]')]
        .filter(e => !e.hidden && e.getAttribute('role') !== 'status' && !(e.textContent.trim()
          || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')))
        .map(e => e.outerHTML.slice(0, 80))""")
    assert nameless == []
    shown.page.click("summary:has-text('table')")
    assert shown.page.locator("table").count() == 2
    assert shown.page.locator("table").first.locator("tbody tr").count() == 11
    assert "748 ms" in shown.page.locator("table").first.inner_text()
    shown.press("ArrowRight")
    slider = shown.page.locator("[role=slider]")
    assert slider.get_attribute("aria-valuetext").startswith("Step 1 at")
    assert shown.page.locator("[role=status]").inner_text().startswith("Step 1 at")


def download(shown: Any, label: str) -> str:
    shown.page.click(".mc-menu summary")
    with shown.page.expect_download() as waiting:
        shown.page.click(f"[data-export='{label}']")
    return waiting.value.path().read_bytes().decode("latin-1" if label == "PNG" else "utf-8")


def test_exports_a_picture_as_svg_and_png(open_page: Open, both: str) -> None:
    shown = open_page(both)
    svg = download(shown, "SVG")
    assert svg.startswith("<svg xmlns=")
    assert svg.count("-hatch)") >= 90
    assert "whole prompts" in svg
    assert "simulated llama-2-7b" in svg
    assert "budget" in svg
    assert ">8,192</text>" in svg
    assert ">1,024</text>" in svg
    png = download(shown, "PNG")
    assert png.startswith("\x89PNG")
    assert len(png) > 20_000


@pytest.mark.parametrize("scene", ["chunked", "crowded"])
def test_chrome_export_agrees_with_python(
    open_page: Open, traces: dict[str, Trace], scene: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    trace = traces["chunked"] if scene == "chunked" else crowded_trace(seed)
    shown = open_page(to_html(trace))
    mine = json.loads(download(shown, "Chrome trace"))["traceEvents"]
    theirs = chrome_trace(trace)["traceEvents"]
    assert len(mine) == len(theirs)
    for ours, other in zip(mine, theirs, strict=True):
        for key in ("ts", "dur"):
            assert ours.pop(key, 0) == pytest.approx(other.pop(key, 0), abs=0.25)
        assert ours == other


def test_exported_html_is_a_page_of_its_own(open_page: Open, both: str) -> None:
    shown = open_page(both)
    cursor = shown.press("]")["cursor"]
    again = open_page(download(shown, "HTML"))
    state = again.state()
    assert state["cursor"] == cursor
    assert state["panes"] == "2"
    assert again.press("ArrowRight")["step"] != state["step"]


def test_the_iframe_for_hosts_without_widgets_is_the_same_page(
    open_page: Open, traces: dict[str, Trace]
) -> None:
    outer = f"<!doctype html><p>A notebook's page</p>{timeline(traces).iframe()}"
    shown = open_page(outer, wait_for="iframe")
    frame = shown.page.frame_locator("iframe")
    inner = frame.locator(".mc-timeline[data-draws]")
    inner.wait_for()
    assert inner.get_attribute("data-panes") == "2"
    frame.locator(".mc-main").focus()
    shown.page.keyboard.press("ArrowRight")
    frame.locator(".mc-timeline[data-step='1']").wait_for()
    # Nothing is cut off: the frame is as high as what is in it.
    overflow = "document.documentElement.scrollHeight - window.innerHeight"
    assert shown.page.frames[1].evaluate(overflow) <= 0


def test_many_lanes_scroll_or_fit(open_page: Open) -> None:
    shown = open_page(to_html(big_trace(300, 3000)))
    lanes = shown.page.locator(".mc-pane").get_attribute
    first = lanes("data-lanes")
    assert shown.page.locator(".mc-scroll").is_visible()
    shown.press("PageDown")
    assert lanes("data-lanes") != first
    shown.page.click("[data-action=lanes]")
    shown.settle()
    assert lanes("data-lanes") == "0-300"
    assert not shown.page.locator(".mc-scroll").is_visible()


CLASHES = """
[...document.querySelectorAll('.mc-timeline svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')], frame = svg.getBoundingClientRect(), found = [];
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
  boxes.forEach(([a, p], i) => {
    const out = p.left < frame.left - 0.5 || p.right > frame.right + 0.5;
    if (out && !svg.matches('.mc-marks')) found.push(['clipped', a]);
    boxes.slice(i + 1).forEach(([b, q]) => {
      const across = p.left < q.right - 1 && q.left < p.right - 1;
      if (across && p.top < q.bottom - 3 && q.top < p.bottom - 3) found.push([a, b]);
    });
  });
  return found;
})"""


@pytest.mark.parametrize("count", [10, 60, 300])
@pytest.mark.parametrize("width", [420, 1280])
def test_labels_never_overlap(open_page: Open, count: int, width: int) -> None:
    names = [f"a-rather-long-request-name-{i}" if i % 2 else str(i) for i in range(count + 1)]
    scene = {"num_decodes": count, "names": names, "output_tokens": 40}
    traces = {"whole": stall_scene(None, **scene), "chunked": stall_scene(1000, **scene)}
    shown = open_page(to_html(traces), width=width)
    shown.page.locator("[data-tab=roofline]").first.click()
    shown.press("]", "+", "+")
    clashes = shown.page.evaluate(CLASHES)
    assert clashes == []


def test_empty_and_unfinished_traces_are_drawn(open_page: Open) -> None:
    trace = stall_scene()
    cut = len(trace.steps) // 2
    last = trace.steps[cut - 1].end
    partial = Trace(meta=dict(trace.meta), steps=trace.steps[:cut])
    for record in trace.requests.values():
        partial.requests[record.request_id] = type(record)(
            record.request_id, record.arrival, record.prompt_tokens, record.max_tokens,
            token_times=[t for t in record.token_times if t <= last],
        )  # fmt: skip
    partial.spans = [span for span in trace.spans if span.last_step < cut]
    partial.events = [event for event in trace.events if event.time < last]
    shown = open_page(to_html({"nothing": Trace(meta={"clock": "wall"}), "cut": partial}))
    assert shown.press("End", "]", "+", "0", "Home")["panes"] == "2"


KEY_TO_FRAME = """key => new Promise(done => {
  const began = performance.now(), event = new KeyboardEvent('keydown', { key, bubbles: true });
  document.querySelector('.mc-main').dispatchEvent(event);
  const frame = requestAnimationFrame;
  frame(() => frame(() => done(performance.now() - began)));
})"""


STALL_PIXELS = """() => {
  const c = document.querySelector('.mc-lanes');
  const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, columns = new Set();
  for (let i = 0; i < d.length; i += 4) {
    const warm = d[i] > 190 && d[i + 2] < 120 && d[i] - d[i + 1] > 60;
    if (warm) columns.add((i / 4) % c.width);
  }
  return columns.size;
}"""


def test_a_stall_narrower_than_a_pixel_is_seen_and_not_exaggerated(open_page: Open) -> None:
    trace = big_trace(20, 20_000)
    calm = open_page(to_html(trace))
    assert calm.state()["stalls"] == "0"
    assert calm.page.evaluate(STALL_PIXELS) == 0
    middle = len(trace.steps) // 2
    trace.steps[middle] = trace.steps[middle]._replace(decode_floor=0.02)
    shown = open_page(to_html(trace))
    assert int(shown.state()["stalls"]) == 10
    assert 1 <= shown.page.evaluate(STALL_PIXELS) <= 4


@pytest.fixture(scope="module")
def huge() -> str:
    return page(columns(big_trace(300, 100_000)))


def test_a_hundred_thousand_spans_draw_within_a_second(open_page: Open, huge: str) -> None:
    shown, again = open_page(huge), open_page(huge)
    # Other work on the machine stretches single draws: the better of two counts, and of the
    # redraws the lower quartile.
    first = min(float(one.state()["firstDrawMs"]) for one in (shown, again))
    shown.page.bring_to_front()
    print(f"first draw {first:.0f} ms")
    assert first <= 1000
    times = []
    for key in ["+"] * 6 + ["-"] * 3 + ["0"] + ["+"] * 6:
        shown.page.focus(".mc-main")
        # From the key to the frame after the one that drew.
        times.append(shown.page.evaluate(KEY_TO_FRAME, key))
    times.sort()
    print(f"redraw on zoom: median {times[len(times) // 2]:.0f} ms, longest {times[-1]:.0f} ms")
    assert times[len(times) // 4] <= 60
