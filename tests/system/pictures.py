"""Checks of pages and pictures. usage: pictures.py WHAT ARGUMENTS...; called by pictures.sh.

run PAGE RUN.h5 REPORT.json      plan PAGE PLAN.h5 PLAN.json COMPARE.json WHAT-IF.json      windows PAGE PLAN.h5      cluster SVG CLUSTER.json
hostile CLUSTER.json RUN.h5 NEW.h5, large PROFILE.h5 STAGES COUNT: make inputs      hostile_page PAGE      look PAGE PNG: in $BROWSER"""
import html.parser
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "<b>&\"'x</text><script>alert(1)</script>\u0001\u202e\ufffe"
PIXEL = 0.011  # coordinates have two or three digits


class Page(html.parser.HTMLParser):
    """Elements as (tag, attributes, text); refuses unbalanced tags and anything that loads or runs something."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open
        ids = [attributes["id"] for _, attributes, _ in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids)), "an id stands twice"
        for _, attributes, _ in self.elements:
            for name in attributes.get("aria-labelledby", "").split():
                assert name in ids, name

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), attrs
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "image", "use", "b", "foreignobject"), tag
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "srcset", "action", "data", "style"), (tag, name)
            assert name not in ("href", "xlink:href") or value.startswith("#"), value
            assert "url(" not in (value or ""), value
        element = [tag, attributes, ""]
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, (tag, self.open[-1:])
        self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data
        if self.open and self.open[-1][0] == "style":
            assert "@import" not in data and "url(" not in data and "http" not in data

    def of_class(self, name, tag=None):
        return [e[1] for e in self.elements if name in e[1].get("class", "").split() and tag in (None, e[0])]

    def text(self):
        return "".join(e[2] + "\n" for e in self.elements if e[0] != "style")


def check_svg(root):
    """Each text and rect lies inside the view box; widths of texts are estimated from below (the browser measures them)."""
    left, top, width, height = (float(x) for x in root.get("viewBox").split())
    names = [child.tag.split("}")[-1] for child in root][:2]
    assert names == ["title", "desc"] and all(child.text for child in root[:2])
    for element in root.iter():
        tag = element.tag.split("}")[-1]
        if tag == "text":
            x, y = float(element.get("x")), float(element.get("y"))
            wide = 0.45 * float(element.get("font-size")) * len(element.text or "")
            start = x - {"start": 0, "middle": wide / 2, "end": wide}[element.get("text-anchor")]
            assert left <= start and start + wide <= left + width and top < y < top + height, (element.text, x, y)
        elif tag == "rect":
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            w, h = float(element.get("width")), float(element.get("height"))
            assert w >= 0 and left <= x and x + w <= left + width + PIXEL and top <= y and y + h <= top + height + PIXEL, element.attrib


def read_page(path):
    text = open(path, encoding="ascii").read()  # characters beyond are references
    assert text.startswith("<!DOCTYPE html>") and "<title>" in text
    page = Page(text)
    figures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert figures
    for figure in figures:
        check_svg(ElementTree.fromstring(figure))
    return page


def number(attributes, name):
    return float(attributes["data-" + name])


def tasks_of(page, origin):
    return [t for t in page.of_class("task") if t["data-origin"] == origin]


def check_scale(page):
    """Tasks lie in a window of their timeline, and x is linear in time there."""
    text_windows = page.of_class("window")
    assert text_windows
    for at, (tag, attributes, _) in enumerate(page.elements):
        if "window" not in attributes.get("class", "").split():
            continue
        first, end = number(attributes, "first-s"), number(attributes, "end-s")
        frame = next(e[1] for e in page.elements[at:] if e[1].get("class") == "frame")
        scale = float(frame["width"]) / (end - first)
        for element in page.elements[at + 1:]:
            if element[0] == "g":
                break
            if "task" in element[1].get("class", "").split():
                task = element[1]
                start, stop = max(number(task, "start-s"), first), min(number(task, "end-s"), end)
                clipped = number(task, "start-s") < first or number(task, "end-s") > end
                assert clipped == ("data-clipped" in task), task
                assert abs(float(frame["x"]) + scale * (start - first) - float(task["x"])) < 3 * PIXEL, task
                assert abs(scale * (stop - start) - float(task["width"])) < 3 * PIXEL, task


def check_bars(page, figure):
    """Bars begin at one place, follow each other, and are as long as their numbers, on one scale."""
    at = next(i for i, e in enumerate(page.elements) if e[1].get("id") == figure)
    end = next((i for i, e in enumerate(page.elements) if i > at and e[0] == "svg"), len(page.elements))
    bars = [e[1] for e in page.elements[at:end] if "bar" in e[1].get("class", "").split()]
    zero = min(float(bar["x"]) for bar in bars)
    longest = max(bars, key=lambda bar: number(bar, "value"))
    scale = float(longest["width"]) / number(longest, "value") if number(longest, "value") > 0 else 0
    sums = {}
    for bar in bars:
        before = sums.get((bar["data-of"], bar["y"]), 0)
        assert abs(zero + scale * before - float(bar["x"])) < 3 * PIXEL, bar
        assert abs(scale * number(bar, "value") - float(bar["width"])) < 3 * PIXEL, bar
        sums[bar["data-of"], bar["y"]] = before + number(bar, "value")
    return {key: value for (key, _), value in sums.items()}, bars


def check_plan(page, plan):
    """The plan's tables, as memory bars and as sentences; `plan`: the group of a file."""
    stages = page.of_class("stage", "li")
    assert len(stages) == len(plan["stage_layers"])
    for i, stage in enumerate(stages):
        assert int(stage["data-stage"]) == i and int(stage["data-warmup"]) == plan["stage_warmup"][i]
        assert [int(stage["data-first-layer"]), int(stage["data-end-layer"])] == list(plan["stage_layers"][i])
        for name, column in (("compute-s", "stage_compute"), ("comm-s", "stage_comm"), ("memory-bytes", "stage_memory_bytes")):
            assert number(stage, name) == plan[column][i], (i, name)
    _, bars = check_bars(page, "device-memory")
    for i in range(len(stages)):
        parts = {b["data-part"]: number(b, "value") for b in bars if b["data-of"] == str(i)}
        assert parts["parameters"] == plan["stage_parameter_bytes"][i]
        assert math.isclose(parts["parameters"] + parts["activations"] + parts.get("waiting", 0), plan["stage_memory_bytes"][i], rel_tol=1e-12)
    limits = [number(e, "value") for e in page.of_class("limit", "line")]
    assert set(limits) == set(plan["stage_device_memory_bytes"][...])
    assert number(page.of_class("step")[0], "simulated-s") == plan.attrs["simulated"]


def check_predicted(page, plan):
    """A whole predicted step: each pass once, as long as the plan says, and the last task ends with the step."""
    tasks = tasks_of(page, "predicted")
    count = int(plan.attrs["microbatches"])
    for i in range(len(plan["stage_layers"])):
        forward = [t for t in tasks if int(t["data-stage"]) == i and t["data-kind"] == "forward"]
        assert sorted(int(t["data-microbatch"]) for t in forward) == list(range(count)), i
        for task in forward:
            assert math.isclose(number(task, "end-s") - number(task, "start-s"), plan["stage_forward"][i], rel_tol=1e-6, abs_tol=1e-12), task
    assert math.isclose(max(number(t, "end-s") for t in tasks), plan.attrs["simulated"], rel_tol=0.5)


def run(path, run_path, report_path):
    import h5py
    page, told = read_page(path), json.load(open(report_path))["train"]
    with h5py.File(run_path) as file:
        check_plan(page, file["plan"])
        check_predicted(page, file["plan"])
        check_scale(page)
        losses = {int(c["data-step"]): number(c, "value") for c in page.of_class("loss", "circle")}
        assert losses == {i + 1: x for i, x in enumerate(file["train/loss"][...])} and list(losses.values()) == told["loss"]
        held = {int(c["data-step"]): number(c, "value") for c in page.of_class("validation", "rect") if "data-step" in c}
        assert held == {v["step"]: v["loss"] for v in told["validation"]} and len(held) > 2
        _, bars = check_bars(page, "device-memory")
        measured = [number(b, "value") for b in bars if b["data-part"] == "measured"]
        assert measured == list(file["train/memory_measured"][...]) == [s["measured_bytes"] for s in told["stages"]]
        trace = {name: file["trace/" + name][...] for name in ("rank", "stage", "step", "microbatch", "begin", "end")}
        kind = [k.decode() for k in file["trace/kind"][...]]
        cluster = {name: file["topology"][name] for name in file["topology"]}
    assert cluster
    # The measured lane of a stage: the events of its lowest rank in the last step, from the first begin of all lanes.
    last, shown = trace["step"].max(), {"forward", "backward", "weight", "reduce", "exchange", "norm", "update"}
    events = [i for i in range(len(kind)) if trace["step"][i] == last and kind[i] in shown]
    begin = min(trace["begin"][i] for i in events)
    rank = {s: min(trace["rank"][i] for i in events if trace["stage"][i] == s) for s in set(trace["stage"])}
    want = sorted((kind[i], int(trace["stage"][i]), int(trace["microbatch"][i]), trace["begin"][i] - begin, trace["end"][i] - begin)
                  for i in events if trace["rank"][i] == rank[trace["stage"][i]] and trace["end"][i] > trace["begin"][i])
    tasks = tasks_of(page, "measured")
    have = sorted((t["data-kind"], int(t["data-stage"]), int(t["data-microbatch"]), number(t, "start-s"), number(t, "end-s")) for t in tasks)
    assert have == want and len(have) >= 20, (have[:2], want[:2])
    summary = page.of_class("summary")[0]
    assert number(summary, "step-s") == told["step_time_s"] and number(summary, "predicted-step-s") == told["predicted_step_time_s"]
    for row, stage in zip(page.of_class("stage", "tr"), told["stages"]):
        for name in ("busy", "idle", "reduce", "comm", "microbatch"):
            assert number(row, name + "-s") == stage[name + "_s"], name
    text = page.text()
    assert "m.h5 (gpt)" in text and "run.h5" in text and "hapt 0." in text


def plan(path, plan_path, plan_json, compare_json, what_if_json):
    import h5py
    page, told = read_page(path), json.load(open(plan_json))
    with h5py.File(plan_path) as file:
        check_plan(page, file)
        check_predicted(page, file)
    check_scale(page)
    assert not tasks_of(page, "measured")
    for stage, said in zip(page.of_class("stage", "li"), told["stages"]):
        assert number(stage, "compute-s") == said["compute_s"] and number(stage, "memory-bytes") == said["memory_bytes"]
    rows = json.load(open(compare_json))["rows"]
    shown = page.of_class("rival", "tr")
    assert [r["data-name"] for r in shown] == [r["name"] for r in rows] and len(rows) > 10
    sums, _ = check_bars(page, "rival-steps")
    for row, said in zip(shown, rows):
        assert ("data-simulated-s" in row) == ("simulated_s" in said), row
        if "simulated_s" in said:
            assert number(row, "simulated-s") == said["simulated_s"] == sums[said["name"]], said["name"]
        if said.get("pipelines"):
            assert sums[said["name"] + ", pipelines"] == said["pipelines"]["simulated_s"]
    sweep = json.load(open(what_if_json))["what_if"][0]
    points = {number(c, "value"): number(c, "simulated-s") for c in page.of_class("point", "circle")}
    assert points == {p["value"]: p["simulated_s"] for p in sweep["points"]} and len(points) >= 5
    knees = [number(m, "value") for m in page.of_class("knee", "line")]
    assert knees == ([sweep["knee"]] if sweep["knee"] is not None else []), (knees, sweep["knee"])


def windows(path, plan_path):
    """A step of too many passes: three windows of equal length, at both ends and in the middle."""
    import h5py
    page = read_page(path)
    with h5py.File(plan_path) as file:
        check_plan(page, file)
        step_s = file.attrs["simulated"]
    check_scale(page)
    spans = [(number(w, "first-s"), number(w, "end-s")) for w in page.of_class("window")]
    lengths = [b - a for a, b in spans]
    assert len(spans) == 3 and math.isclose(min(lengths), max(lengths), rel_tol=1e-9) and spans[0][0] == 0
    assert all(a[1] < b[0] for a, b in zip(spans, spans[1:])) and spans[2][1] <= step_s * (1 + 1e-9)
    passes_end_s = max(number(t, "end-s") for t in page.of_class("task") if int(t["data-microbatch"]) >= 0)
    assert spans[2][0] < passes_end_s <= spans[2][1] and {int(t["data-microbatch"]) for t in page.of_class("task")} >= {0, 1023}
    assert "three windows" in page.text() and os.path.getsize(path) < 8e6
    stages = {int(t["data-stage"]) for t in page.of_class("task")}
    assert stages == set(range(len(page.of_class("stage", "li")))), stages


def cluster(path, cluster_path):
    text, told = open(path, encoding="ascii").read(), json.load(open(cluster_path))
    root = ElementTree.fromstring(text)
    check_svg(root)
    page = Page(text.split("-->", 1)[1])
    boxes = {c["name"]: c for c in told["subclusters"]}
    clean = {re.sub("[\x00-\x1f\x7f-\x9f\u202e\ufffe]", "\ufffd", name): c for name, c in boxes.items()}
    shown = {e.get("data-name"): e for e in root.iter() if e.get("class") == "subcluster"}
    assert set(shown) == set(clean), (set(shown), set(clean))
    for name, box in shown.items():
        assert int(box.get("data-nodes")) == clean[name]["nodes"] and int(box.get("data-devices-per-node")) == clean[name]["devices_per_node"]
    links = {frozenset((e.get("data-from"), e.get("data-to"))): e for e in root.iter() if "link" in (e.get("class") or "").replace("-", " ").split()}
    assert len(links) == len(shown) * (len(shown) - 1) // 2
    for link in told["links"]:
        ends = frozenset(re.sub("[\x00-\x1f\x7f-\x9f\u202e\ufffe]", "\ufffd", name) for name in link["between"])
        if len(ends) == 2:
            assert links[ends].get("data-bandwidth") is not None and float(links[ends].get("data-bandwidth")) == link["bandwidth"], link
    assert page.of_class("subcluster")


def hostile(cluster_path, run_path, new_path):
    import h5py
    names = [HOSTILE[:24] + str(i) for i in range(3)] + ["W" * 63] + ["name-%d" % i for i in range(5)]
    json.dump({"format": "hapt-cluster", "version": 1, "subclusters": [
        {"name": name, "nodes": 1 + 100 * i, "devices_per_node": 1 + 5 * i, "device": "V100-16GB"} for i, name in enumerate(names)]}, open(cluster_path, "w"))
    shutil.copy(run_path, new_path)
    with h5py.File(new_path, "r+") as file:
        file["settings"].attrs["model"] = HOSTILE


def hostile_page(path):
    text = open(path, encoding="ascii").read()
    assert "alert" in text and "<script" not in text and "&#xFFFD;" in text and "&#x202E;" not in text
    read_page(path)


def large(path, stages_path, count):
    """`count` stages on as many devices, by the writer of jobs/case-study.py."""
    import h5py
    spec = importlib.util.spec_from_file_location("case_study", os.path.join(os.path.dirname(__file__), "../../jobs/case-study.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    half = int(count) // 2
    module.write_profile(path, [("old", half, 1, 1e14), ("new", half, 1, 2e14)], 2 * half, 1e13, 0.01)
    with h5py.File(path, "r+") as file:
        for c in range(2):
            file["cluster_%d/parameter_bytes" % c][...] += 1e11 * (c + 1)
            file["cluster_%d/activation_bytes" % c][...] += 2e9
    open(stages_path, "w").write(",".join("%d-%d@%s:1x1" % (i, i + 1, "old" if i < half else "new") for i in range(2 * half)))


LOOK = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const all = [...document.querySelectorAll('svg')].map(svg => ({box: box(svg), id: svg.id,
  texts: [...svg.querySelectorAll('text')].map(t => ({box: box(t), text: t.textContent, size: parseFloat(getComputedStyle(t).fontSize)})),
  tasks: [...svg.querySelectorAll('.task')].map(t => ({box: box(t), start: +t.dataset.startS, end: +t.dataset.endS, clipped: 'clipped' in t.dataset,
    window: [...svg.querySelectorAll('.window')].indexOf(t.parentNode)})),
  bars: [...svg.querySelectorAll('.bar')].map(t => ({box: box(t), value: +t.dataset.value}))}));
const out = document.createElement('pre');
out.id = 'geometry';
out.textContent = JSON.stringify({svgs: all, wide: document.documentElement.scrollWidth, room: innerWidth, color: getComputedStyle(document.body).color});
document.body.append(out);
</script>"""


def browse(arguments, path):
    return subprocess.run([os.environ["BROWSER"], "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--user-data-dir=" + os.path.dirname(path)]
                          + arguments + ["file://" + path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=600, check=True).stdout.decode()


def overlaps(texts):
    order = sorted(texts, key=lambda t: t["box"][0])
    for i, one in enumerate(order):
        for other in order[i + 1:]:
            if other["box"][0] >= one["box"][2] - 0.5:
                break
            a, b = one["box"], other["box"]
            # The box of a text has the font's ascent and descent; digits and letters fill less of it.
            if min(a[3], b[3]) - max(a[1], b[1]) > 0.3 * min(one["size"], other["size"]):
                yield one["text"], other["text"]


def linear(pairs):
    """The largest distance in px of (value, px) from the line through its ends."""
    low, high = min(pairs), max(pairs)
    if high[0] == low[0]:
        return 0
    scale = (high[1] - low[1]) / (high[0] - low[0])
    return max(abs(low[1] + scale * (value - low[0]) - px) for value, px in pairs)


def look(path, png):
    """As a browser shows it: texts inside their picture, none over another, times and bars linear in their numbers."""
    folder = tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(png)))
    copy = os.path.join(folder, "page.html")
    text = open(path).read()
    if not path.endswith(".html"):
        text = "<!DOCTYPE html><body style='margin:0'>" + text.split("-->", 1)[1] + "</body>"
    open(copy, "w").write(text.replace("</body>", LOOK + "</body>"))
    for width in (1180, 700):
        dom = browse(["--dump-dom", "--window-size=%d,900" % width], copy)
        seen = json.loads(html.unescape(re.search(r'<pre id="geometry">(.*?)</pre>', dom, re.S).group(1)))
        if path.endswith(".html"):
            assert seen["wide"] <= seen["room"] == width, (seen["wide"], seen["room"])
        assert seen["svgs"]
        for svg in seen["svgs"]:
            outer = svg["box"]
            for text in svg["texts"]:
                inner = text["box"]
                assert outer[0] - 0.5 <= inner[0] and inner[2] <= outer[2] + 0.5 and outer[1] - 0.5 <= inner[1] and inner[3] <= outer[3] + 0.5, (width, svg["id"], text, outer)
                assert width < 1180 or text["size"] >= 8, text
            crossing = list(overlaps([t for t in svg["texts"] if t["text"]]))
            assert not crossing, (width, svg["id"], crossing[:5])
            for at in {t["window"] for t in svg["tasks"]}:
                mine = [t for t in svg["tasks"] if t["window"] == at and not t["clipped"]]
                assert linear([(t["start"], t["box"][0]) for t in mine] + [(t["end"], t["box"][2]) for t in mine]) < 0.1, (svg["id"], at)
            if svg["bars"]:
                widest = max(svg["bars"], key=lambda b: b["value"])
                assert widest["value"] > 0, svg["id"]
                for bar in svg["bars"]:
                    assert abs((bar["box"][2] - bar["box"][0]) - bar["value"] / widest["value"] * (widest["box"][2] - widest["box"][0])) < 0.1, bar
    browse(["--screenshot=" + os.path.abspath(png), "--window-size=1180,2600"], os.path.abspath(path) if path.endswith(".html") else copy)
    assert open(png, "rb").read(8) == b"\x89PNG\r\n\x1a\n" and os.path.getsize(png) > 5000
    shutil.rmtree(folder, ignore_errors=True)


{f.__name__: f for f in (run, plan, windows, cluster, hostile, hostile_page, large, look)}[sys.argv[1]](*sys.argv[2:])
