// The decode stall, made visible: lanes per request, one bar per step, one scrubber for all.
//
// One framework-free ES module. `mount(element, payload, options)` draws the columns that
// `viz/columns.py` writes; the default export is the same thing as an anywidget. Lanes and bars are
// painted on canvas because there may be 100,000 of them; axes, labels and cursor are SVG and DOM,
// so that they stay sharp, readable by machines and reachable by keyboard.
//
//   1. words and numbers     4. painters      7. exports
//   2. elements              5. drawing       8. mount
//   3. the indexed trace     6. panel, tips   9. anywidget

// ── 1. Words and numbers ─────────────────────────────────────────────────────────────────────────

const QUEUED = 0,
  DECODE = 1,
  PREFILL = 2,
  PREEMPTED = 3,
  INTERFERENCE = 4,
  STALL = 5;
const COLOURS = ["queued", "decode", "prefill", "preempted", "interference", "stall"];
const LEGEND = [
  ["queued", "queued"],
  ["prefill", "prefill chunk"],
  ["decode", "decode"],
  ["interference", "interference"],
  ["stall", "stall"],
  ["preempted", "preempted"],
];
const REASONS = {
  budget: "the step's token budget was spent",
  slots: "all slots are taken (max_num_seqs)",
  blocks: "not enough free KV blocks",
  whole: "wants its whole prompt in one step, which does not fit the rest",
  preempted: "its blocks were taken in this step",
  held: "held: enough long prompts are in progress",
  policy: "the policy did not offer it",
  behind: "queues behind the head, and nobody overtakes",
};
const SPEEDS = [
  [1, "real time"],
  [0.5, "1/2"],
  [0.2, "1/5"],
  [0.1, "1/10"],
  [0.02, "1/50"],
];
const MIN_VIEW = 1e-5;

const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const grouped = (n) => Math.round(n).toLocaleString("en-US");

/** A duration for people: three digits, the unit that suits. */
export function duration(seconds) {
  const s = Math.abs(seconds);
  if (s >= 100) return `${seconds.toFixed(0)} s`;
  if (s >= 1) return `${seconds.toFixed(2)} s`;
  if (s >= 0.1) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (s >= 1e-3) return `${(seconds * 1e3).toFixed(1)} ms`;
  return s === 0 ? "0 s" : `${(seconds * 1e6).toFixed(0)} µs`;
}

const times = (x) => (x >= 9.95 ? x.toFixed(0) : x.toFixed(1));
const plural = (n, word) => `${grouped(n)} ${word}${n === 1 ? "" : "s"}`;
const bulk = (n) =>
  n >= 1e12
    ? `${+(n / 1e12).toPrecision(3)} T`
    : n >= 1e9
      ? `${+(n / 1e9).toPrecision(3)} G`
      : n >= 1e6
        ? `${+(n / 1e6).toPrecision(3)} M`
        : `${+n.toPrecision(3)} `;

/** First index in [low, high) whose value is above x; the array ascends there. */
function above(array, x, low = 0, high = array.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

const escapeXml = (text) =>
  String(text).replace(
    /[&<>"']/g,
    (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c],
  );

/** JSON that may stand inside a <script> element: no text in it can end the element. */
const scriptSafe = (value) =>
  JSON.stringify(value).replace(
    /[<>&\u2028\u2029]/g,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"),
  );

/** Round steps for an axis: 1, 2 or 5 times a power of ten. */
function tickStep(span, count) {
  const raw = span / Math.max(1, count),
    power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
}

// ── 2. Elements ──────────────────────────────────────────────────────────────────────────────────

const FOCUSABLE = new Set(["button", "select", "input", "summary"]);
const SVG_NS = "http://www.w3.org/2000/svg";

/** An element with attributes and children; texts become text nodes, never markup. */
function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node =
    name === "svg" ? document.createElementNS(SVG_NS, name) : document.createElement(name);
  if (classes.length) node.setAttribute("class", classes.map((c) => `mc-${c}`).join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child != null));
  // JupyterLab looks at keys before we do, and at the focused element itself before its parents:
  // whatever can have the focus must say that its keys are its own.
  if (attributes.tabindex || FOCUSABLE.has(name))
    node.setAttribute("data-lm-suppress-shortcuts", "true");
  return node;
}

let instances = 0;

// ── 3. The indexed trace ─────────────────────────────────────────────────────────────────────────

/** Segments as they are found, column by column: a hundred thousand small arrays would be slow. */
class Segments {
  constructor() {
    Object.assign(this, { lane: [], start: [], stop: [], kind: [], row: [] });
  }
  add(lane, start, stop, kind, row) {
    this.lane.push(lane);
    this.start.push(start);
    this.stop.push(stop);
    this.kind.push(kind);
    this.row.push(row);
  }
  /** The same by lane and time: lane i is [offsets[i], offsets[i + 1]). A counting sort. */
  byLane(lanes) {
    const n = this.lane.length,
      offsets = new Int32Array(lanes + 1),
      order = new Int32Array(n);
    for (let i = 0; i < n; i++) offsets[this.lane[i] + 1]++;
    for (let lane = 0; lane < lanes; lane++) offsets[lane + 1] += offsets[lane];
    const next = offsets.slice();
    for (let i = 0; i < n; i++) order[next[this.lane[i]]++] = i;
    for (let lane = 0; lane < lanes; lane++) {
      const mine = order.subarray(offsets[lane], offsets[lane + 1]);
      // Rows mostly come in the order of time already.
      const sorted = mine.every((i, k) => !k || this.start[mine[k - 1]] <= this.start[i]);
      if (!sorted) mine.sort((i, j) => this.start[i] - this.start[j]);
    }
    const pick = (Kind, column) => Kind.from(order, (i) => column[i]);
    return {
      start: pick(Float64Array, this.start),
      stop: pick(Float64Array, this.stop),
      kind: pick(Uint8Array, this.kind),
      row: pick(Int32Array, this.row),
      offsets,
    };
  }
}

/** A pane's columns plus what drawing asks again and again. */
function indexPane(columns) {
  const { requests, steps, spans, events, stalls, gaps } = columns;
  const count = requests.id.length,
    work = new Segments(),
    waits = new Segments(),
    excess = new Segments();
  spans.request.forEach((request, i) => {
    const begin = steps.start[spans.first[i]],
      end = steps.end[spans.last[i]];
    if (spans.prefill[i]) waits.add(request, begin, end, PREFILL, i);
    else work.add(request, begin, end, DECODE, i);
  });
  const lastTime = steps.end.length ? steps.end[steps.end.length - 1] : 0;
  const since = requests.arrival.map((time) => [time, QUEUED]),
    first = Array(count).fill(null);
  events.request.forEach((request, i) => {
    const kind = events.kind[i],
      time = events.time[i];
    if (kind === "preempt") since[request] = [time, PREEMPTED];
    if (["admit", "resume", "cancel", "timeout", "finish"].includes(kind) && since[request]) {
      const [start, state] = since[request];
      if (time > start) (state === QUEUED ? work : waits).add(request, start, time, state, i);
      if (state === QUEUED) first[request] = time;
      since[request] = null;
    }
  });
  since.forEach((open, request) => {
    if (open && lastTime > open[0]) {
      (open[1] === QUEUED ? work : waits).add(request, open[0], lastTime, open[1], -1);
    }
  });
  const key = (request, token) => request * 2 ** 32 + token;
  const stalled = new Set(stalls.request.map((request, i) => key(request, stalls.token[i])));
  gaps.request.forEach((request, i) => {
    if (stalled.has(key(request, gaps.token[i]))) return;
    const end = gaps.start[i] + gaps.excess[i];
    excess.add(request, gaps.start[i], end, INTERFERENCE, i);
  });
  stalls.request.forEach((request, i) => {
    excess.add(request, stalls.start[i], stalls.start[i] + stalls.excess[i], STALL, i);
  });
  const byTime = stalls.start.map((_, i) => i).sort((a, b) => stalls.start[a] - stalls.start[b]);
  const finish = requests.finish.map((time, i) => time ?? Math.max(lastTime, requests.arrival[i]));
  return {
    ...columns,
    count,
    first,
    finish,
    base: work.byLane(count),
    excess: excess.byLane(count),
    front: waits.byLane(count),
    stallOrder: byTime,
    start: Math.min(...requests.arrival.slice(0, 1), ...steps.start.slice(0, 1)),
    end: finish.reduce((a, b) => Math.max(a, b), lastTime),
    most: steps.budget.reduce(
      (a, b, i) => Math.max(a, b || 0, steps.prefill[i] + steps.decode[i]),
      1,
    ),
    byStep: null,
    owners: null,
  };
}

/** The step in progress at a time, or the last one before it; -1 before the first. */
const stepAt = (pane, time) => above(pane.steps.start, time) - 1;

/** Rows of `spans` by step, built on first use: which requests were in the batch. */
function batchAt(pane, step) {
  if (!pane.byStep) {
    const { first, last } = pane.spans;
    const order = first.map((_, i) => i).sort((a, b) => first[a] - first[b]);
    const longest = new Int32Array(order.length); // running maximum of last steps: where to stop
    order.forEach((row, i) => {
      longest[i] = Math.max(last[row], i ? longest[i - 1] : 0);
    });
    pane.byStep = { order, longest, first: order.map((row) => first[row]) };
  }
  const { order, longest, first } = pane.byStep,
    rows = [];
  for (let i = above(first, step) - 1; i >= 0 && longest[i] >= step; i--) {
    if (pane.spans.last[order[i]] >= step) rows.push(order[i]);
  }
  return rows.sort(
    (a, b) =>
      pane.spans.prefill[b] - pane.spans.prefill[a] ||
      pane.spans.request[a] - pane.spans.request[b],
  );
}

/** Block tables and holders after a step, by replaying the block events. Snapshots make it quick. */
function poolAt(pane, step) {
  const { blocks, num_blocks: size } = pane;
  if (!blocks || !size) return null;
  const every = 512;
  pane.owners ??= [];
  const upto = above(blocks.step, step);
  let from = Math.min(Math.floor(upto / every), pane.owners.length);
  let state = from
    ? pane.owners[from - 1]
    : { holders: new Uint16Array(size), tables: new Map(), owner: new Int32Array(size).fill(-1) };
  let row = from * every;
  state = {
    holders: state.holders.slice(),
    owner: state.owner.slice(),
    tables: new Map([...state.tables].map(([k, v]) => [k, v.slice()])),
  };
  for (; row < upto; row++) {
    if (row && row % every === 0 && pane.owners.length < row / every) {
      pane.owners.push({
        holders: state.holders.slice(),
        owner: state.owner.slice(),
        tables: new Map([...state.tables].map(([k, v]) => [k, v.slice()])),
      });
    }
    const request = blocks.request[row],
      kind = blocks.kind[row];
    if (kind === "publish") continue;
    if (!state.tables.has(request)) state.tables.set(request, []);
    const table = state.tables.get(request);
    for (let r = blocks.offsets[row]; r < blocks.offsets[row + 1]; r += 2) {
      for (let b = blocks.runs[r]; b < blocks.runs[r] + blocks.runs[r + 1]; b++) {
        if (kind === "free") {
          state.holders[b] = Math.max(0, state.holders[b] - 1);
          const at = table.lastIndexOf(b);
          if (at >= 0) table.splice(at, 1);
          if (!state.holders[b]) state.owner[b] = -1;
        } else {
          state.holders[b] += 1;
          state.owner[b] = request;
          table.push(b);
        }
      }
    }
  }
  return state;
}

const nameOf = (pane, request) => {
  const id = pane.requests.id[request];
  return /^\d+$/.test(id) ? `request ${id}` : id;
};

// ── 4. Painters: the same drawing on a canvas (screen, PNG) or as SVG (screen labels, export) ────

class CanvasPainter {
  constructor(context, palette, ratio) {
    Object.assign(this, { context, palette, x: 0, y: 0 });
    const tile = document.createElement("canvas"),
      size = Math.round(7 * ratio);
    tile.width = tile.height = size;
    const c = tile.getContext("2d");
    c.fillStyle = palette.stallTint;
    c.fillRect(0, 0, size, size);
    c.strokeStyle = palette.stall;
    c.lineWidth = 2.6 * ratio;
    c.beginPath();
    for (const k of [-size, 0, size]) {
      c.moveTo(k - 1, size + 1);
      c.lineTo(k + size + 1, -1);
    }
    c.stroke();
    this.pattern = context.createPattern(tile, "repeat");
    this.pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  }
  rect(x, y, w, hgt, colour, alpha = 1) {
    const c = this.context;
    c.globalAlpha = alpha;
    c.fillStyle = colour === "hatch" ? this.pattern : (this.palette[colour] ?? colour);
    c.fillRect(this.x + x, this.y + y, w, hgt);
    c.globalAlpha = 1;
  }
  frame(x, y, w, hgt, colour) {
    this.context.strokeStyle = this.palette[colour] ?? colour;
    this.context.lineWidth = 1;
    this.context.strokeRect(this.x + x + 0.5, this.y + y + 0.5, w - 1, hgt - 1);
  }
  line(x1, y1, x2, y2, colour, width = 1, dash = []) {
    const c = this.context;
    c.strokeStyle = this.palette[colour] ?? colour;
    c.lineWidth = width;
    c.setLineDash(dash);
    c.beginPath();
    c.moveTo(this.x + x1, this.y + y1);
    c.lineTo(this.x + x2, this.y + y2);
    c.stroke();
    c.setLineDash([]);
  }
  dot(x, y, r, colour, alpha = 1) {
    const c = this.context;
    c.globalAlpha = alpha;
    c.fillStyle = this.palette[colour] ?? colour;
    c.beginPath();
    c.arc(this.x + x, this.y + y, r, 0, 7);
    c.fill();
    c.globalAlpha = 1;
  }
  text(
    x,
    y,
    string,
    { size = 11, anchor = "start", colour = "text", weight = 400, halo = false } = {},
  ) {
    const c = this.context;
    c.font = `${weight} ${size}px system-ui, sans-serif`;
    c.textAlign = { start: "left", middle: "center", end: "right" }[anchor];
    c.textBaseline = "alphabetic";
    if (halo) {
      c.strokeStyle = this.palette.background;
      c.lineWidth = 3;
      c.lineJoin = "round";
      c.strokeText(string, this.x + x, this.y + y);
    }
    c.fillStyle = this.palette[colour] ?? colour;
    c.fillText(string, this.x + x, this.y + y);
  }
}

class SvgPainter {
  constructor(palette, prefix) {
    Object.assign(this, { palette, prefix, x: 0, y: 0, parts: [] });
  }
  static n(value) {
    return +value.toFixed(2);
  }
  paint(colour) {
    return colour === "hatch"
      ? `url(#${this.prefix}-hatch)`
      : escapeXml(this.palette[colour] ?? colour);
  }
  rect(x, y, w, hgt, colour, alpha = 1) {
    const n = SvgPainter.n;
    this.parts.push(
      `<rect x="${n(this.x + x)}" y="${n(this.y + y)}" width="${n(w)}" height="${n(hgt)}" fill="${this.paint(colour)}"${alpha < 1 ? ` fill-opacity="${n(alpha)}"` : ""}/>`,
    );
  }
  frame(x, y, w, hgt, colour) {
    const n = SvgPainter.n;
    this.parts.push(
      `<rect x="${n(this.x + x + 0.5)}" y="${n(this.y + y + 0.5)}" width="${n(Math.max(0, w - 1))}" height="${n(Math.max(0, hgt - 1))}" fill="none" stroke="${this.paint(colour)}"/>`,
    );
  }
  line(x1, y1, x2, y2, colour, width = 1, dash = []) {
    const n = SvgPainter.n;
    this.parts.push(
      `<line x1="${n(this.x + x1)}" y1="${n(this.y + y1)}" x2="${n(this.x + x2)}" y2="${n(this.y + y2)}" stroke="${this.paint(colour)}" stroke-width="${width}"${dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : ""}/>`,
    );
  }
  dot(x, y, r, colour, alpha = 1) {
    const n = SvgPainter.n;
    this.parts.push(
      `<circle cx="${n(this.x + x)}" cy="${n(this.y + y)}" r="${r}" fill="${this.paint(colour)}" fill-opacity="${alpha}"/>`,
    );
  }
  text(
    x,
    y,
    string,
    { size = 11, anchor = "start", colour = "text", weight = 400, halo = false } = {},
  ) {
    const n = SvgPainter.n;
    const around = halo
      ? ` stroke="${this.paint("background")}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"`
      : "";
    this.parts.push(
      `<text x="${n(this.x + x)}" y="${n(this.y + y)}" font-size="${size}" font-weight="${weight}" text-anchor="${anchor}" fill="${this.paint(colour)}"${around}>${escapeXml(string)}</text>`,
    );
  }
  hatchDefinition() {
    return `<defs><pattern id="${this.prefix}-hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="5" fill="${this.paint("stallTint")}"/><rect width="2" height="5" fill="${this.paint("stall")}"/></pattern></defs>`;
  }
}

// ── 5. Drawing ───────────────────────────────────────────────────────────────────────────────────

const ratioOf = () => Math.max(1, window.devicePixelRatio || 1);
const textWidth = (string, size = 11) => string.length * size * 0.56;

/**
 * The visible segments of one lane as rectangles. What is narrower than a cell is summed up per
 * cell and drawn with the opacity of its share of time, so that a zoomed-out picture neither hides
 * nor exaggerates; a stall is never thinner than a cell.
 */
function eachRun(segments, lane, view, width, emit) {
  const { start, stop, kind, row, offsets } = segments,
    scale = width / (view.t1 - view.t0),
    cell = 2;
  let i = above(stop, view.t0, offsets[lane], offsets[lane + 1]);
  let cellAt = -1,
    covered = 0,
    cellKind = 0,
    open = null;
  const flush = () => {
    if (cellAt < 0) return;
    const level =
      cellKind === STALL ? 1 : Math.max(0.25, Math.min(1, Math.ceil((covered / cell) * 4) / 4));
    if (
      open &&
      open[4] === level &&
      open[2] === cellKind &&
      Math.abs(open[1] - cellAt * cell) < 0.01
    )
      open[1] += cell;
    else {
      if (open) emit(...open);
      open = [cellAt * cell, (cellAt + 1) * cell, cellKind, -1, level];
    }
    cellAt = -1;
    covered = 0;
    cellKind = 0;
  };
  for (; i < offsets[lane + 1] && start[i] < view.t1; i++) {
    const x0 = Math.max(0, (start[i] - view.t0) * scale),
      x1 = Math.min(width, (stop[i] - view.t0) * scale);
    if (x1 - x0 >= cell) {
      flush();
      if (open) {
        emit(...open);
        open = null;
      }
      emit(x0, x1, kind[i], row[i], 1);
      continue;
    }
    const at = Math.floor(x0 / cell);
    if (at !== cellAt) {
      flush();
      cellAt = at;
    }
    covered += x1 - x0;
    cellKind = Math.max(cellKind, kind[i]);
  }
  flush();
  if (open) emit(...open);
}

/** Where a lane's parts lie: the bar, and the strip below it for the TTFT bracket. */
function laneBox(layout, lane) {
  const y = lane * layout.lane - layout.scroll,
    tall = layout.lane >= 20;
  const pad =
    layout.lane >= 8 ? Math.max(1, Math.round(layout.lane * 0.09)) : layout.lane > 3 ? 0.5 : 0;
  return { y: y + pad, height: layout.lane - 2 * pad - (tall ? 8 : 0), tall };
}

function visibleLanes(pane, layout) {
  return [
    Math.max(0, Math.floor(layout.scroll / layout.lane)),
    Math.min(pane.count, Math.ceil((layout.scroll + layout.height) / layout.lane)),
  ];
}

function paintLanes(p, pane, layout, view, state) {
  const [from, to] = visibleLanes(pane, layout),
    { width } = layout;
  for (let lane = from; lane < to; lane++) {
    const { y, height } = laneBox(layout, lane);
    if (state.selection === pane.requests.id[lane])
      p.rect(0, lane * layout.lane - layout.scroll, width, layout.lane, "selected");
    eachRun(pane.base, lane, view, width, (x0, x1, kind, row, alpha) => {
      if (kind === QUEUED) {
        const thin = Math.max(1, Math.min(3, height * 0.25));
        p.rect(x0, y + (height - thin) / 2, Math.max(0.5, x1 - x0), thin, "queued", alpha);
      } else p.rect(x0, y, Math.max(0.7, x1 - x0), height, "decode", alpha);
    });
    eachRun(pane.excess, lane, view, width, (x0, x1, kind, row, alpha) => {
      const w = Math.max(kind === STALL ? 2 : 0.7, x1 - x0);
      p.rect(x0, y, w, height, kind === STALL ? "hatch" : "interference", alpha);
      if (kind === STALL && w > 5 && height > 5) p.frame(x0, y, w, height, "stall");
    });
    eachRun(pane.front, lane, view, width, (x0, x1, kind, row, alpha) => {
      if (kind === PREEMPTED) {
        const thin = Math.max(1.5, height * 0.4);
        p.rect(x0, y + (height - thin) / 2, Math.max(1, x1 - x0), thin, "preempted", alpha);
      } else {
        const gap = x1 - x0 > 5 ? 1 : 0;
        p.rect(x0, y, Math.max(1, x1 - x0 - gap), height, "prefill", alpha);
      }
    });
    paintTokenTicks(p, pane, lane, layout, view, y, height);
  }
}

/** ITL ticks: one per token, as soon as they can be told apart. */
function paintTokenTicks(p, pane, lane, layout, view, y, height) {
  const { token_offsets: offsets, token_times: at } = pane.requests,
    scale = layout.width / (view.t1 - view.t0);
  const steps = stepAt(pane, view.t1) - Math.max(0, stepAt(pane, view.t0)) + 1;
  if (height < 6 || layout.width / steps < 5) return; // the same answer for every lane
  const from = above(at, view.t0 - 1e-12, offsets[lane], offsets[lane + 1]);
  const to = above(at, view.t1, from, offsets[lane + 1]);
  for (let i = from; i < to; i++)
    p.rect(
      (at[i] - view.t0) * scale - 0.5,
      y + height - Math.min(5, height / 2),
      1,
      Math.min(5, height / 2),
      "tick",
    );
}

/** Bars of tokens per step against the dashed budget. Several steps in one pixel: the fullest. */
function paintBars(p, pane, layout, view) {
  const { steps } = pane,
    { width, bars: height } = layout,
    scale = width / (view.t1 - view.t0);
  const unit = (height - 4) / pane.most;
  let i = Math.max(0, stepAt(pane, view.t0)),
    cell = -1,
    best = -1,
    budgetY = null,
    budgetX = 0;
  const bar = (step, x0, x1) => {
    const decode = steps.decode[step],
      prefill = steps.prefill[step];
    const low = decode ? Math.max(2, decode * unit) : 0,
      high = prefill ? Math.max(2, prefill * unit) : 0;
    const w = Math.max(1, x1 - x0 - (x1 - x0 > 4 ? 1 : 0));
    if (decode) p.rect(x0, height - low, w, low, "decode");
    if (prefill) p.rect(x0, height - low - high, w, high, "prefill");
  };
  for (; i < steps.start.length && steps.start[i] < view.t1; i++) {
    const x0 = Math.max(0, (steps.start[i] - view.t0) * scale),
      x1 = Math.min(width, (steps.end[i] - view.t0) * scale);
    if (x1 < 0) continue;
    if (x1 - x0 >= 2) {
      if (best >= 0) {
        bar(best, cell * 2, cell * 2 + 2);
        best = -1;
        cell = -1;
      }
      bar(i, x0, x1);
    } else {
      const at = Math.floor(x0 / 2);
      if (at !== cell) {
        if (best >= 0) bar(best, cell * 2, cell * 2 + 2);
        cell = at;
        best = i;
      } else if (steps.prefill[i] + steps.decode[i] > steps.prefill[best] + steps.decode[best])
        best = i;
    }
    const y = Math.round(height - steps.budget[i] * unit) + 0.5;
    if (budgetY === null) {
      budgetY = y;
      budgetX = 0;
    }
    if (y !== budgetY) {
      p.line(budgetX, budgetY, x0, budgetY, "text", 1, [5, 4]);
      budgetY = y;
      budgetX = x0;
    }
  }
  if (best >= 0) bar(best, cell * 2, cell * 2 + 2);
  if (budgetY !== null) p.line(budgetX, budgetY, width, budgetY, "text", 1, [5, 4]);
  p.line(0, height - 0.5, width, height - 0.5, "grid");
}

/** The scale of the bars: the budget at its line, and the fullest step if that is more. */
function paintBarMarks(p, pane, place) {
  const budget = pane.steps.budget.length ? Math.max(...pane.steps.budget.slice(0, 1)) : 0;
  const y = clamp(place.bars - (budget / pane.most) * (place.bars - 4) + 3.5, 8, place.bars - 3);
  if (budget)
    p.text(place.gutter - 8, y, grouped(budget), { size: 9.5, anchor: "end", colour: "muted" });
  if (y > 20 || !budget)
    p.text(place.gutter - 8, 9, grouped(pane.most), {
      size: 9.5,
      anchor: "end",
      colour: "muted",
    });
  if (y < place.bars - 14)
    p.text(place.gutter - 8, place.bars - 2, "tokens", {
      size: 9.5,
      anchor: "end",
      colour: "muted",
    });
}

/** Texts and marks over the lanes: only where there is room, so nothing ever overlaps. */
function paintMarks(p, pane, layout, view, state) {
  const [from, to] = visibleLanes(pane, layout),
    { width } = layout,
    scale = width / (view.t1 - view.t0);
  const size = clamp(layout.lane * 0.5, 8, 10.5);
  for (let lane = from; lane < to; lane++) {
    const { y, height, tall } = laneBox(layout, lane),
      base = y + height / 2 + size * 0.36;
    const selected = state.selection === pane.requests.id[lane];
    if (height >= 9) {
      const label = (x0, x1, choices, colour, halo) => {
        const fits = choices.find((choice) => textWidth(choice, size) + 5 <= x1 - x0);
        if (!fits) return;
        const plate = textWidth(fits, size) + 6; // letters on a hatch need a ground of their own
        if (halo === "plate") p.rect((x0 + x1 - plate) / 2, y + 1, plate, height - 2, "background");
        p.text((x0 + x1) / 2, base, fits, {
          size,
          anchor: "middle",
          colour,
          weight: 600,
          halo: halo === true,
        });
      };
      eachRun(pane.excess, lane, view, width, (x0, x1, kind, row) => {
        if (kind !== STALL || row < 0) return;
        const gap = pane.stalls.end[row] - pane.stalls.start[row];
        const factor =
          pane.stalls.floor[row] > 0 ? ` = ${times(gap / pane.stalls.floor[row])}×` : "";
        // Where a recomputed chunk lies over the stall, the chunk's own label has the room.
        if (!overlaps(pane.front, lane, pane.stalls.start[row], pane.stalls.end[row]))
          label(x0, x1, [`stall ${duration(gap)}${factor}`, duration(gap)], "text", "plate");
      });
      eachRun(pane.front, lane, view, width, (x0, x1, kind, row) => {
        if (kind === PREEMPTED) label(x0, x1, ["preempted"], "text", true);
        else if (row >= 0) {
          const i = pane.spans.chunk[row],
            n = pane.spans.chunks[row];
          label(x0, x1, [`chunk ${i}/${n}`, `${i}/${n}`], "onPrefill");
        }
      });
      eachRun(pane.base, lane, view, width, (x0, x1, kind) => {
        if (kind === QUEUED) label(x0, x1, ["queued"], "muted", true);
      });
    }
    const reason = pane.requests.reason[lane];
    if (reason === "cancelled" || reason === "timeout") {
      const x = (pane.finish[lane] - view.t0) * scale,
        r = Math.min(4, height / 2),
        mid = y + height / 2;
      if (x >= 0 && x <= width) {
        p.line(x - r, mid - r, x + r, mid + r, "text", 2);
        p.line(x - r, mid + r, x + r, mid - r, "text", 2);
        if (height >= 9) {
          const left = x + 6 + textWidth(reason, size) > width;
          p.text(x + (left ? -8 : 8), base, reason, {
            size,
            anchor: left ? "end" : "start",
            halo: true,
          });
        }
      }
    }
    if (tall || selected) paintTtft(p, pane, lane, layout, view, y + height + (tall ? 4.5 : 0));
  }
}

function overlaps(segments, lane, t0, t1) {
  const i = above(segments.stop, t0, segments.offsets[lane], segments.offsets[lane + 1]);
  return i < segments.offsets[lane + 1] && segments.start[i] < t1;
}

function paintTtft(p, pane, lane, layout, view, y) {
  const { token_offsets: offsets, token_times: at, arrival } = pane.requests;
  if (offsets[lane] === offsets[lane + 1]) return;
  const scale = layout.width / (view.t1 - view.t0),
    end = at[offsets[lane]];
  const x0 = (arrival[lane] - view.t0) * scale,
    x1 = (end - view.t0) * scale;
  if (x1 < 0 || x0 > layout.width || x1 - x0 < 3) return;
  const a = Math.max(0, x0),
    b = Math.min(layout.width, x1);
  p.line(a, y, b, y, "text");
  if (x0 >= 0) p.line(x0 + 0.5, y - 2.5, x0 + 0.5, y + 2.5, "text");
  if (x1 <= layout.width) p.line(x1 - 0.5, y - 2.5, x1 - 0.5, y + 2.5, "text");
  const label = `TTFT ${duration(end - arrival[lane])}`;
  // To the right of the bracket, under the decodes that follow: there it covers nothing.
  if (layout.lane >= 20 && x1 + textWidth(label, 8.5) + 6 < layout.width)
    p.text(x1 + 4, y + 3.2, label, { size: 8.5, colour: "muted" });
}

/** Lane names; when lanes are thin, every k-th, so that two names never touch. */
function paintNames(p, pane, layout, state) {
  const [from, to] = visibleLanes(pane, layout),
    size = clamp(layout.lane * 0.62, 9, 11.5);
  const every = Math.max(1, Math.ceil((size + 2) / layout.lane)),
    room = layout.gutter - 10;
  for (let lane = from; lane < to; lane++) {
    const selected = state.selection === pane.requests.id[lane];
    if (lane % every && !selected) continue;
    if (
      !selected &&
      every > 1 &&
      pane.requests.id.slice(Math.max(0, lane - every + 1), lane + every).includes(state.selection)
    )
      continue;
    const { y, height } = laneBox(layout, lane);
    const mid = y + height / 2 + size * 0.36;
    if (mid < size * 0.7 || mid > layout.height) continue;
    p.text(layout.gutter - 8, mid, shorten(pane.requests.id[lane], room, size), {
      size,
      anchor: "end",
      weight: selected ? 700 : 400,
      colour: selected ? "text" : "muted",
    });
  }
}

function shorten(string, room, size) {
  const most = Math.max(3, Math.floor(room / (size * 0.58)));
  const letters = Array.from(string);
  return letters.length <= most ? string : letters.slice(0, most - 1).join("") + "…";
}

/** Time ticks of the view: values and texts; the unit follows the zoom. */
function timeTicks(view, width) {
  const step = tickStep(view.t1 - view.t0, width / 90),
    ticks = [];
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (let k = Math.ceil(view.t0 / step - 1e-9); k * step <= view.t1 + step * 1e-9; k++) {
    const t = k * step;
    ticks.push([
      t,
      step < 1e-3 ? `${(t * 1e3).toFixed(Math.max(0, digits - 3))} ms` : `${t.toFixed(digits)} s`,
    ]);
  }
  return ticks;
}

function paintGrid(p, view, width, height) {
  for (const [t] of timeTicks(view, width)) {
    const x = Math.round(((t - view.t0) / (view.t1 - view.t0)) * width);
    if (x > 0 && x < width) p.rect(x, 0, 1, height, "grid");
  }
}

function paintAxis(p, view, width, left) {
  p.line(left, 0.5, left + width, 0.5, "muted");
  for (const [t, label] of timeTicks(view, width)) {
    const x = left + ((t - view.t0) / (view.t1 - view.t0)) * width;
    const anchor = x + textWidth(label) / 2 > left + width ? "end" : "middle";
    p.line(x, 0, x, 5, "muted");
    p.text(x, 24, label, { anchor, colour: "muted" });
  }
}

/** The picture for export: everything that the screen shows, in one painter. */
function paintPicture(p, panes, layouts, state, size) {
  p.rect(0, 0, size.width, size.height, "background");
  let y = 8;
  panes.forEach((pane, k) => {
    const layout = layouts[k];
    p.x = 0;
    p.y = y;
    p.text(12, 14, pane.name, { size: 14, weight: 700 });
    p.text(12, 30, [pane.headline, pane.policy].join(" · "), { size: 11, colour: "muted" });
    if (!state.predict) p.text(size.width - 12, 14, stallLine(pane), { size: 11, anchor: "end" });
    y += 40;
    p.x = layout.gutter;
    p.y = y;
    paintGrid(p, state, layout.width, layout.height + layout.bars + 8);
    paintLanes(p, pane, layout, state, state);
    paintMarks(p, pane, layout, state, state);
    p.x = 0;
    paintNames(p, pane, layout, state);
    p.x = layout.gutter;
    p.y = y + layout.height + 8;
    paintBars(p, pane, layout, state);
    p.x = 0;
    paintBarMarks(p, pane, layout);
    p.x = layout.gutter;
    const scale = layout.width / (state.t1 - state.t0),
      x = (state.cursor - state.t0) * scale;
    p.y = y;
    if (x >= 0 && x <= layout.width)
      p.line(x, 0, x, layout.height + layout.bars + 8, "cursor", 1.5);
    y += layout.height + layout.bars + 24;
  });
  p.x = 0;
  p.y = y - 12;
  paintAxis(p, state, layouts[0].width, layouts[0].gutter);
  p.y = y + 24;
  let x = layouts[0].gutter;
  for (const [colour, label] of LEGEND) {
    p.rect(x, 0, 14, 10, colour === "stall" ? "hatch" : colour);
    p.text(x + 19, 9, label, { size: 11 });
    x += 32 + textWidth(label);
  }
}

function stallLine(pane) {
  const { stalls } = pane;
  if (!stalls.start.length) return "no stalls";
  let worst = 0;
  stalls.start.forEach((_, i) => {
    if (stalls.end[i] - stalls.start[i] > stalls.end[worst] - stalls.start[worst]) worst = i;
  });
  const gap = stalls.end[worst] - stalls.start[worst],
    floor = stalls.floor[worst];
  return `${plural(stalls.start.length, "stall")} · longest ${duration(gap)}${floor > 0 ? ` = ${times(gap / floor)}× a decode step` : ""}`;
}

const picture = (layouts) => ({
  width: layouts[0].gutter + layouts[0].width + 16,
  height: layouts.reduce((sum, layout) => sum + layout.height + layout.bars + 64, 8) + 46,
});

// ── 6. Side panel: what one step was ─────────────────────────────────────────────────────────────

const MAX_ROWS = 40;

function stepPanel(pane, step, state, select) {
  const { steps } = pane,
    idle = state.cursor >= steps.end[step];
  const prefill = steps.prefill[step],
    decode = steps.decode[step],
    budget = steps.budget[step];
  const most = Math.max(budget, prefill + decode, 1);
  const share = (n) => `width:${((n / most) * 100).toFixed(2)}%`;
  const rows = batchAt(pane, step);
  const batch = rows.slice(0, MAX_ROWS).map((row) => {
    const { request, prefill: isPrefill, position, tokens, first, chunk, chunks } = pane.spans;
    const start = position[row] + (isPrefill[row] ? 0 : step - first[row]),
      lane = request[row];
    const what = isPrefill[row]
      ? `chunk ${chunk[row]}/${chunks[row]}: ${grouped(start)}–${grouped(start + tokens[row] - 1)} of ${grouped(Math.max(pane.requests.prompt[lane], start + tokens[row]))}`
      : `decode: ${grouped(start)}`;
    return h(
      "li",
      {},
      h(`i.${isPrefill[row] ? "prefill" : "decode"}`, { "aria-hidden": "true" }),
      requestButton(pane, lane, state, select),
      h("span", {}, what),
    );
  });
  if (rows.length > MAX_ROWS)
    batch.push(h("li.more", {}, `and ${grouped(rows.length - MAX_ROWS)} more`));
  const skipped = skipsAt(pane, step).map(([lane, reason, count]) =>
    h(
      "li",
      {},
      h("i.queued", { "aria-hidden": "true" }),
      requestButton(pane, lane, state, select),
      h(
        "span",
        {},
        reason === "behind"
          ? `head of the queue; ${plural(count, "request")} behind it`
          : (REASONS[reason] ?? reason),
      ),
    ),
  );
  return [
    h(
      "div.meter",
      {
        role: "img",
        "aria-label": `${prefill} prefill and ${decode} decode tokens of a budget of ${budget}`,
      },
      h("b.decode", { style: share(decode) }),
      h("b.prefill", { style: share(prefill) }),
    ),
    h(
      "p.numbers",
      {},
      `${grouped(prefill)} prefill + ${grouped(decode)} decode of ${grouped(budget)} tokens`,
    ),
    idle ? h("p.note", {}, "The engine is idle here; this is the step before.") : null,
    h("h4", {}, `In the batch: ${plural(rows.length, "request")}, at positions`),
    h("ul", {}, batch),
    skipped.length ? [h("h4", {}, "Not in the batch"), h("ul", {}, skipped)] : null,
  ];
}

function requestButton(pane, lane, state, select) {
  const id = pane.requests.id[lane];
  return h(
    "button.name",
    {
      type: "button",
      title: nameOf(pane, lane),
      "aria-pressed": String(state.selection === id),
      onclick: () => select(id),
    },
    id,
  );
}

function skipsAt(pane, step) {
  const { request, first, last, reason, count } = pane.skips,
    found = [];
  for (let i = 0; i < first.length && found.length < MAX_ROWS; i++) {
    if (first[i] <= step && step <= last[i]) found.push([request[i], reason[i], count[i]]);
  }
  return found;
}

function blocksPanel(pane, step, state, palette, select) {
  const { steps } = pane,
    total = pane.num_blocks;
  const words =
    `${grouped(steps.used[step])} used, ${grouped(steps.free[step])} free` +
    (steps.reserved[step] ? ` (${grouped(steps.reserved[step])} promised)` : "");
  const pool = poolAt(pane, step);
  if (!pool)
    return [
      h("p.numbers", {}, words),
      h(
        "p.note",
        {},
        pane.notes.find((note) => note.includes("block")) ?? "This trace has no block events.",
      ),
    ];
  const width = 264,
    cell =
      [12, 10, 8, 6, 5, 4, 3, 2].find(
        (c) => Math.floor(width / c) * Math.floor(150 / c) >= total,
      ) ?? 1;
  const group = cell > 1 ? 1 : Math.ceil(total / (width * 200)),
    across = Math.floor(width / cell);
  const cells = Math.ceil(total / group),
    ratio = ratioOf();
  const canvas = h("canvas.pool", { role: "img", "aria-label": `KV block pool: ${words}` });
  canvas.width = width * ratio;
  canvas.height = Math.ceil(cells / across) * cell * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  canvas.dataset.used = pool.holders.reduce((sum, holders) => sum + (holders > 0), 0);
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  const chosen = new Set(pool.tables.get(pane.requests.id.indexOf(state.selection)) ?? []);
  const prefilling = new Set(
    batchAt(pane, step)
      .filter((row) => pane.spans.prefill[row])
      .map((row) => pane.spans.request[row]),
  );
  const gap = cell >= 4 ? 1 : 0;
  for (let k = 0; k < cells; k++) {
    const b = k * group,
      owner = pool.owner[b];
    c.fillStyle = chosen.has(b)
      ? palette.cursor
      : owner < 0
        ? palette.grid
        : pool.holders[b] > 1
          ? palette.preempted
          : prefilling.has(owner)
            ? palette.prefill
            : palette.decode;
    c.fillRect((k % across) * cell, Math.floor(k / across) * cell, cell - gap, cell - gap);
  }
  const holders = [...pool.tables].filter(([, table]) => table.length).slice(0, MAX_ROWS);
  const listed = holders.map(([lane, table]) =>
    h(
      "li",
      {},
      requestButton(pane, lane, state, select),
      h(
        "span",
        {},
        `${plural(table.length, "block")}: ${blockRuns(table, state.selection === pane.requests.id[lane] ? 24 : 2)}`,
      ),
    ),
  );
  const swatch = (colour, label) =>
    h("span.key", {}, h("i", { style: `background:${palette[colour]}` }), label);
  return [
    h(
      "p.numbers",
      {},
      `${words} of ${grouped(total)} blocks` +
        (pane.block_size ? ` of ${pane.block_size} tokens` : ""),
    ),
    canvas,
    h(
      "p.keys",
      {},
      swatch("decode", "decoding"),
      swatch("prefill", "in prefill"),
      swatch("preempted", "shared"),
      swatch("grid", "free"),
      chosen.size ? swatch("cursor", "selected") : null,
    ),
    group > 1 ? h("p.note", {}, `One cell stands for ${group} blocks.`) : null,
    h("h4", {}, "Block tables"),
    h("ul", {}, listed),
  ];
}

/** Block numbers in table order, consecutive ones as a range. */
function blockRuns(table, most) {
  const parts = [];
  for (let i = 0; i < table.length;) {
    let j = i;
    while (j + 1 < table.length && table[j + 1] === table[j] + 1) j++;
    parts.push(j > i ? `${table[i]}–${table[j]}` : `${table[i]}`);
    if (parts.length === most && j + 1 < table.length) {
      parts.push("…");
      break;
    }
    i = j + 1;
  }
  return parts.join(", ");
}

function rooflinePanel(pane, step, palette, prefix) {
  const { flops, bytes, start, end } = pane.steps,
    points = [];
  flops.forEach((f, i) => {
    if (f > 0 && bytes[i] > 0 && end[i] > start[i])
      points.push([f / bytes[i], f / (end[i] - start[i]), i]);
  });
  if (!points.length)
    return [h("p.note", {}, "This trace counts no FLOPs and bytes, so it has no roofline.")];
  const roof = pane.peak_flops && pane.peak_bandwidth;
  const range = (k, extra) => {
    const values = points.map((point) => Math.log10(point[k])).concat(extra.map(Math.log10));
    const low = values.reduce((a, b) => Math.min(a, b)),
      high = values.reduce((a, b) => Math.max(a, b));
    return [Math.floor(low - 0.05), Math.max(Math.ceil(high + 0.05), Math.floor(low - 0.05) + 1)];
  };
  const [x0, x1] = range(0, roof ? [pane.peak_flops / pane.peak_bandwidth] : []),
    [y0, y1] = range(1, roof ? [pane.peak_flops] : []);
  const W = 264,
    H = 190,
    left = 44,
    bottom = 30,
    p = new SvgPainter(palette, prefix);
  const X = (v) => left + ((Math.log10(v) - x0) / (x1 - x0)) * (W - left - 8),
    Y = (v) => H - bottom - ((Math.log10(v) - y0) / (y1 - y0)) * (H - bottom - 8);
  for (let k = x0; k <= x1; k++) {
    p.rect(X(10 ** k), 8, 1, H - bottom - 8, "grid");
    p.text(X(10 ** k), H - bottom + 12, bulk(10 ** k).trim(), {
      size: 9,
      anchor: k === x1 ? "end" : "middle",
      colour: "muted",
    });
  }
  for (let k = y0; k <= y1; k++) {
    p.rect(left, Y(10 ** k), W - left - 8, 1, "grid");
    p.text(left - 4, Y(10 ** k) + 3, bulk(10 ** k).trim(), {
      size: 9,
      anchor: "end",
      colour: "muted",
    });
  }
  p.text(left + (W - left) / 2, H - 4, "FLOPs per byte", {
    size: 9.5,
    anchor: "middle",
    colour: "muted",
  });
  p.text(left + 5, 18, "FLOP/s", { size: 9.5, colour: "muted", halo: true });
  if (roof) {
    const ridge = pane.peak_flops / pane.peak_bandwidth,
      low = Math.max(10 ** x0, 10 ** y0 / pane.peak_bandwidth);
    p.line(X(low), Y(low * pane.peak_bandwidth), X(ridge), Y(pane.peak_flops), "text", 1.5);
    p.line(X(ridge), Y(pane.peak_flops), X(10 ** x1), Y(pane.peak_flops), "text", 1.5);
  }
  const every = Math.max(1, Math.ceil(points.length / 1500));
  for (let k = 0; k < points.length; k += every)
    p.dot(
      X(points[k][0]),
      Y(points[k][1]),
      2,
      pane.steps.prefill[points[k][2]] ? "prefill" : "decode",
      0.55,
    );
  const now = points.find((point) => point[2] === step);
  if (now) {
    p.dot(X(now[0]), Y(now[1]), 6, "cursor");
    p.dot(X(now[0]), Y(now[1]), 3.5, pane.steps.prefill[step] ? "prefill" : "decode");
  }
  const svg = h("svg", {
    viewBox: `0 0 ${W} ${H}`,
    width: W,
    height: H,
    role: "img",
    "aria-label": "Roofline: one dot per step",
  });
  svg.innerHTML = p.parts.join("");
  const words = now
    ? `This step: ${bulk(flops[step])}FLOP and ${bulk(bytes[step])}B, ${+now[0].toPrecision(3)} FLOPs per byte: ` +
      (roof
        ? now[0] < pane.peak_flops / pane.peak_bandwidth
          ? "limited by memory."
          : "limited by arithmetic."
        : "the roof of this device is not known.")
    : "This step was not counted.";
  return [svg, h("p.numbers", {}, words)];
}

/** "Who gets tokens in the next step?" One checkbox per live request; an answer that reveals. */
function predictPanel(pane, step, answer) {
  const next = step + 1;
  if (next >= pane.steps.start.length)
    return [h("p.note", {}, "The run ends here: nothing is left to predict.")];
  const t = pane.steps.start[next];
  const live = pane.requests.id
    .map((_, i) => i)
    .filter((i) => pane.requests.arrival[i] <= t && pane.finish[i] > t);
  const boxes = live
    .slice(0, 60)
    .map((lane) =>
      h(
        "label",
        {},
        h("input", { type: "checkbox", value: lane }),
        h("span", {}, pane.requests.id[lane]),
      ),
    );
  const box = h(
    "form.predict",
    {
      onsubmit: (event) => {
        event.preventDefault();
        const guess = new Set(
          [...box.querySelectorAll("input:checked")].map((input) => +input.value),
        );
        const truth = new Set(batchAt(pane, next).map((row) => pane.spans.request[row]));
        const asked = live.slice(0, 60);
        answer(
          next,
          asked.filter((lane) => guess.has(lane) === truth.has(lane)).length,
          asked.length,
        );
      },
    },
    h("p", {}, `Who gets tokens in step ${next + 1}?`),
    h("div.boxes", {}, boxes),
    h(
      "div.actions",
      {},
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            const inputs = [...box.querySelectorAll("input")],
              on = !inputs.every((i) => i.checked);
            inputs.forEach((i) => {
              i.checked = on;
            });
          },
        },
        "All / none",
      ),
      h("button.primary", { type: "submit" }, "Check"),
    ),
  );
  return [box];
}

/** What a lane says at a time; at its name (time null), what became of the request. */
function laneTip(pane, lane, time, width, state) {
  if (lane < 0 || lane >= pane.count) return [];
  const { requests, spans, stalls, gaps } = pane,
    title = nameOf(pane, lane);
  const tokens = requests.token_offsets[lane + 1] - requests.token_offsets[lane];
  if (time === null) {
    const prompt = plural(requests.prompt[lane], "prompt token");
    if (state.predict) return [title, prompt]; // the rest lies in the future
    let worst = -1;
    stalls.request.forEach((request, i) => {
      const longer =
        worst < 0 || stalls.end[i] - stalls.start[i] > stalls.end[worst] - stalls.start[worst];
      if (request === lane && longer) worst = i;
    });
    const first = tokens
      ? requests.token_times[requests.token_offsets[lane]] - requests.arrival[lane]
      : null;
    return [
      title,
      `${prompt}, ${plural(tokens, "output token")}`,
      first === null ? "no token yet" : `TTFT ${duration(first)}`,
      worst < 0 ? "no stall" : `Longest stall: ${stalls.text[worst]}`,
      requests.tenant[lane] === "default" ? "" : `tenant ${requests.tenant[lane]}`,
      requests.reason[lane] ? `finished: ${requests.reason[lane]}` : "",
      requests.note[lane],
    ].filter(Boolean);
  }
  const slack = (1.5 / width) * (state.t1 - state.t0),
    find = (segments) => {
      const i = above(
        segments.stop,
        time - slack,
        segments.offsets[lane],
        segments.offsets[lane + 1],
      );
      return i < segments.offsets[lane + 1] && segments.start[i] <= time + slack ? i : -1;
    };
  const lines = [];
  let i = find(pane.excess);
  if (i >= 0 && pane.excess.kind[i] === STALL)
    lines.push(`Stall. ${stalls.text[pane.excess.row[i]]}`);
  else if (i >= 0) {
    const g = pane.excess.row[i],
      gap = gaps.end[g] - gaps.start[g];
    lines.push(
      `Interference: this gap of ${duration(gap)} is ${duration(gaps.excess[g])} longer than a decode step alone`,
    );
  }
  i = find(pane.front);
  if (i >= 0 && pane.front.kind[i] === PREEMPTED)
    lines.push("Preempted: its blocks were taken, it recomputes later");
  else if (i >= 0) {
    const row = pane.front.row[i];
    lines.push(
      `Prefill chunk ${spans.chunk[row]}/${spans.chunks[row]}: ${plural(spans.tokens[row], "token")} from position ${grouped(spans.position[row])}, ${duration(pane.front.stop[i] - pane.front.start[i])}`,
    );
  }
  i = find(pane.base);
  if (i >= 0 && pane.base.kind[i] === QUEUED)
    lines.push(`Queued for ${duration(pane.base.stop[i] - pane.base.start[i])}`);
  else if (i >= 0 && !lines.length) {
    const from = requests.token_offsets[lane],
      at = above(requests.token_times, time, from, requests.token_offsets[lane + 1]);
    lines.push(
      `Decode: output token ${grouped(Math.min(at - from + 1, tokens))} of ${grouped(tokens)}` +
        (at > from && at < requests.token_offsets[lane + 1]
          ? `, ${duration(requests.token_times[at] - requests.token_times[at - 1])} after the one before`
          : ""),
    );
  }
  if (!lines.length && time < requests.arrival[lane]) lines.push("Not here yet");
  if (!lines.length && time > pane.finish[lane])
    lines.push(requests.reason[lane] ? `Finished: ${requests.reason[lane]}` : "The trace ends");
  if (!lines.length) lines.push("Waits between two steps");
  return [title, ...lines];
}

/** What the bar of a step says. */
function barTip(pane, time) {
  const step = stepAt(pane, time),
    { steps } = pane;
  if (step < 0 || time > steps.end[step]) return [];
  return [
    `Step ${grouped(step)}: ${duration(steps.end[step] - steps.start[step])}`,
    `${grouped(steps.prefill[step])} prefill + ${grouped(steps.decode[step])} decode tokens of a budget of ${grouped(steps.budget[step])}`,
    steps.floor[step] ? `its decodes alone: ${duration(steps.floor[step])}` : "",
  ].filter(Boolean);
}

/** The requests of every pane as tables: the same facts without a picture. */
function requestTables(panes) {
  const head = ["request", "prompt", "outputs", "TTFT", "longest gap", "stalls", "finish"];
  return panes.map((pane) => {
    const { requests, stalls } = pane,
      stalled = new Map();
    stalls.request.forEach((lane) => stalled.set(lane, (stalled.get(lane) ?? 0) + 1));
    const rows = requests.id.map((id, i) => {
      const from = requests.token_offsets[i],
        to = requests.token_offsets[i + 1],
        at = requests.token_times;
      let longest = 0;
      for (let j = from + 1; j < to; j++) longest = Math.max(longest, at[j] - at[j - 1]);
      return [
        id,
        grouped(requests.prompt[i]),
        grouped(to - from),
        to > from ? duration(at[from] - requests.arrival[i]) : "none",
        longest ? duration(longest) : "none",
        grouped(stalled.get(i) ?? 0),
        requests.reason[i] || "unfinished",
      ];
    });
    return h(
      "div.scroller",
      { tabindex: "0", role: "region", "aria-label": `Table of ${pane.name}` },
      h(
        "table",
        {},
        h("caption", {}, `${pane.name}, ${pane.headline}`),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            head.map((text) => h("th", { scope: "col" }, text)),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h(
              "tr",
              {},
              row.map((text, i) => h(i ? "td" : "th", i ? {} : { scope: "row" }, text)),
            ),
          ),
        ),
      ),
    );
  });
}

// ── 7. Exports ───────────────────────────────────────────────────────────────────────────────────

/** The same events that `core/chrome_trace.py` writes, from the columns; opens in Perfetto. */
export function chromeTrace(payload) {
  const events = [];
  payload.panes.forEach((pane, k) => {
    const requestsPid = 2 * k + 1,
      enginePid = 2 * k + 2,
      { requests, steps, spans, stalls, events: life } = pane;
    const us = (t) => Math.round(t * 1e7) / 10;
    const slice = (pid, tid, name, t0, t1, args) =>
      events.push({
        ph: "X",
        pid,
        tid,
        name,
        ts: us(t0),
        dur: Math.max(0, Math.round((us(t1) - us(t0)) * 10) / 10),
        ...(args ? { args } : {}),
      });
    const named = (what, pid, tid, name) =>
      events.push({ ph: "M", name: what, pid, tid, ts: 0, args: { name } });
    named(
      "process_name",
      requestsPid,
      0,
      payload.panes.length > 1 ? `${pane.name}: requests` : "requests",
    );
    named(
      "process_name",
      enginePid,
      0,
      `${payload.panes.length > 1 ? `${pane.name}: ` : ""}engine, ${pane.simulated ? "simulated" : "measured"}`,
    );
    requests.id.forEach((id, i) => named("thread_name", requestsPid, i + 1, id));
    steps.start.forEach((start, i) => {
      slice(enginePid, 1, `step ${i}`, start, steps.end[i], {
        prefill_tokens: steps.prefill[i],
        decode_tokens: steps.decode[i],
        budget: steps.budget[i],
      });
      events.push({
        ph: "C",
        pid: enginePid,
        tid: 0,
        name: "budget use",
        ts: us(start),
        args: { prefill: steps.prefill[i], decode: steps.decode[i] },
      });
      events.push({
        ph: "C",
        pid: enginePid,
        tid: 0,
        name: "free blocks",
        ts: us(start),
        args: { free: steps.free[i] },
      });
    });
    spans.request.forEach((lane, row) => {
      if (spans.prefill[row])
        slice(
          requestsPid,
          lane + 1,
          `chunk ${spans.chunk[row]}/${spans.chunks[row]}`,
          steps.start[spans.first[row]],
          steps.end[spans.last[row]],
          { first_position: spans.position[row], tokens: spans.tokens[row] },
        );
      else
        for (let s = spans.first[row]; s <= spans.last[row]; s++)
          slice(requestsPid, lane + 1, "decode", steps.start[s], steps.end[s]);
    });
    life.request.forEach((lane, i) =>
      events.push({
        ph: "i",
        s: "t",
        pid: requestsPid,
        tid: lane + 1,
        name: life.kind[i],
        ts: us(life.time[i]),
        args: { tokens: life.tokens[i] },
      }),
    );
    stalls.request.forEach((lane, i) => {
      slice(requestsPid, lane + 1, "stall", stalls.start[i], stalls.end[i], {
        what: stalls.text[i],
      });
      if (stalls.cause_request[i] < 0) return;
      const flow = { cat: "stall", id: `${k}.${i}`, name: "caused by", pid: requestsPid };
      const at = us(Math.max(stalls.start[i], steps.start[stalls.cause_step[i]]));
      events.push(
        { ph: "s", ...flow, tid: lane + 1, ts: at },
        { ph: "f", bp: "e", ...flow, tid: stalls.cause_request[i] + 1, ts: at },
      );
    });
  });
  return { displayTimeUnit: "ms", traceEvents: events };
}

function download(name, data, type) {
  const url = URL.createObjectURL(data instanceof Blob ? data : new Blob([data], { type }));
  const link = h("a", { href: url, download: name, style: "display:none" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Fills the page template: the same file that `viz/html.py` fills. */
function fillPage({ page, css, source }, payload, options) {
  const values = {
    title: escapeXml(payload.panes.map((pane) => pane.name).join(" and ")),
    css,
    source: source.replace(/<\/(script)/gi, "<\\/$1"),
    data: scriptSafe({ payload, options, page }),
  };
  return page.replace(/\{\{(title|css|source|data)\}\}/g, (_, key) => values[key]);
}

// ── 8. Mount ─────────────────────────────────────────────────────────────────────────────────────

/**
 * Draws `payload` (see viz/columns.py) into `root`. Options: cursor (seconds), view ([t0, t1]),
 * selection (a request id), theme ("auto" | "light" | "dark"), height (pixels of one pane's lanes),
 * onChange(state), assets {source, css, page} for the HTML export. Returns a handle with
 * `update(payload)`, `set({cursor, view, selection})`, `state` and `destroy()`.
 */
export function mount(root, payload, options = {}) {
  const prefix = `mc${++instances}-${Math.random().toString(36).slice(2, 8)}`;
  const state = {
    cursor: 0,
    t0: 0,
    t1: 1,
    selection: options.selection ?? null,
    tab: "step",
    active: 0,
    predict: false,
    score: [0, 0],
    answer: "",
    playing: false,
    speed: 0.1,
    readable: true,
  };
  let panes = [],
    layouts = [],
    extent = [0, 1],
    palette = {},
    frame = 0,
    stale = new Set(),
    revision = 0;
  let drag = null,
    lastTick = 0,
    hoverText = "",
    announceAt = 0;
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const cleanups = [];
  const listen = (target, type, handler, how) => {
    target.addEventListener(type, handler, how);
    cleanups.push(() => target.removeEventListener(type, handler, how));
  };

  // The skeleton: toolbar, panes (plot and side panel), axis with the scrubber, legend, table.
  const button = (label, text, action, extra = {}) =>
    h(
      "button",
      { type: "button", title: label, "aria-label": label, onclick: action, ...extra },
      text,
    );
  const playButton = button("Play (Space)", "▶", () => play(!state.playing), {
    "data-action": "play",
  });
  const speed = h(
    "select",
    {
      "aria-label": "Speed of play",
      "data-action": "speed",
      onchange: () => {
        state.speed = +speed.value;
      },
    },
    SPEEDS.map(([value, label]) => h("option", { value, selected: value === state.speed }, label)),
  );
  const predictButton = button(
    "Hide what follows and predict the next step",
    "Predict",
    () => setPredict(!state.predict),
    { "aria-pressed": "false", "data-action": "predict" },
  );
  const fitButton = button(
    "Fit all lanes, or make them readable",
    "All lanes",
    () => {
      state.readable = !state.readable;
      layout();
    },
    { "data-action": "lanes", "aria-pressed": "false" },
  );
  const clock = h("output.clock", { "aria-hidden": "true" });
  const saves = { PNG: savePng, SVG: saveSvg, "Chrome trace": saveChrome, HTML: saveHtml };
  const menu = h(
    "details.menu",
    {},
    h("summary", { "aria-label": "Export the timeline" }, "Export"),
    h(
      "div",
      {},
      Object.entries(saves).map(([label, action]) =>
        button(
          `Export as ${label}`,
          label,
          () => {
            menu.open = false;
            action();
          },
          { "data-export": label },
        ),
      ),
    ),
  );
  const group = (...children) => h("span.group", {}, children);
  const toolbar = h(
    "div.toolbar",
    { role: "toolbar", "aria-label": "Timeline controls" },
    group(
      button("Previous step (←)", "◂", () => moveSteps(-1), { "data-action": "back" }),
      playButton,
      button("Next step (→)", "▸", () => moveSteps(1), { "data-action": "forward" }),
      speed,
    ),
    clock,
    group(
      button("Previous stall ([)", "‹ stall", () => moveStall(-1), {
        "data-action": "previous-stall",
      }),
      button("Next stall (])", "stall ›", () => moveStall(1), { "data-action": "next-stall" }),
    ),
    group(
      button("Zoom out (−)", "−", () => zoom(1.6), { "data-action": "zoom-out" }),
      button("Zoom in (+)", "+", () => zoom(1 / 1.6), { "data-action": "zoom-in" }),
      button("Show everything (0)", "0", () => setView(...extent), { "data-action": "zoom-all" }),
    ),
    group(fitButton, predictButton),
    menu,
  );
  const body = h("div.body");
  const axisSvg = h("svg", { "aria-hidden": "true" });
  const thumb = h("span.thumb", {
    role: "slider",
    tabindex: "0",
    "aria-label": "Scrubber: time",
    "aria-valuemin": "0",
  });
  const axis = h("div.axis", {}, axisSvg, thumb);
  const legend = h(
    "div.legend",
    { "aria-hidden": "true" },
    LEGEND.map(([kind, label]) => h("span", {}, h(`i.${kind}`), label)),
    h("span.help", {}, "← → step · [ ] stall · Space plays · Ctrl+wheel zooms · drag pans"),
  );
  const live = h("p.live", { role: "status", "aria-live": "polite" });
  const tableBox = h("details.table", {}, h("summary", {}, "The same as a table"));
  tableBox.addEventListener("toggle", () => {
    if (tableBox.open) showTables();
  });
  const tip = h("div.tip", { role: "tooltip", id: `${prefix}-tip`, hidden: true });
  const main = h(
    "div.main",
    {
      tabindex: "0",
      role: "application",
      "aria-label": "Scheduling timeline",
      "aria-describedby": `${prefix}-help`,
    },
    body,
    axis,
  );
  const help = h(
    "p.live",
    { id: `${prefix}-help` },
    "Arrow keys move by step, with Shift by ten steps; brackets go to the previous or next stall; Space plays; plus, minus and zero zoom.",
  );
  const frameBox = h("div.frame", {}, toolbar, main, legend, live, help, tableBox, tip);
  root.classList.add("mc-timeline");
  root.replaceChildren(frameBox);
  let paneNodes = [];

  function load(next, keep) {
    const previous = { ...state };
    payload = next;
    panes = payload.panes.map(indexPane);
    extent = [
      Math.min(...panes.map((pane) => pane.start)),
      Math.max(...panes.map((pane) => pane.end)),
    ];
    if (!Number.isFinite(extent[0])) extent[0] = 0;
    if (!(extent[1] > extent[0])) extent[1] = extent[0] + 1;
    extent[1] += (extent[1] - extent[0]) * 0.01;
    state.active = Math.min(state.active, panes.length - 1);
    [state.t0, state.t1] = extent;
    state.cursor = extent[0];
    if (keep) {
      state.cursor = clamp(previous.cursor, ...extent);
      // A zoomed view stays where it is; one that showed everything shows everything again.
      if (keep.zoomed) setRange(previous.t0, previous.t1);
    }
    buildPanes();
    layout();
    root.dataset.revision = ++revision;
    announce("");
    if (tableBox.open) showTables();
  }

  function buildPanes() {
    paneNodes = panes.map((pane, k) => {
      const title = h("span.title", { title: pane.name }, pane.name);
      const badge = h(`span.badge.${pane.simulated ? "simulated" : "measured"}`, {}, pane.headline);
      const stalls = h(
        "span.chip.stalls",
        {},
        h("i.stall", { "aria-hidden": "true" }),
        h("b", {}, stallLine(pane)),
      );
      const chips = Object.entries(pane.summary).map(([label, value]) =>
        h("span.chip", {}, `${label} `, h("b", {}, value)),
      );
      const head = h(
        "header",
        {},
        title,
        badge,
        h("span.policy", {}, pane.policy),
        h("span.chips", {}, stalls, chips),
      );
      const canvas = h("canvas.lanes", {
        role: "img",
        "aria-label": `${pane.name}: ${plural(pane.count, "request")}, ${stallLine(pane)}`,
      });
      const bars = h("canvas.bars", {
        role: "img",
        "aria-label": `${pane.name}: tokens per step against the budget`,
      });
      const names = h("svg.names", { "aria-hidden": "true" }),
        marks = h("svg.marks", { "aria-hidden": "true" }),
        barMarks = h("svg.barmarks", { "aria-hidden": "true" });
      const line = h("div.cursor"),
        veil = h("div.veil", {}, h("span", {}, "?")),
        scroll = h("div.scroll", {}, h("i"));
      const plot = h("div.plot", {}, names, canvas, marks, bars, barMarks, veil, line, scroll);
      const tabs = h(
        "div.tabs",
        { role: "tablist", "aria-label": `${pane.name}: details of the step` },
        ["step", "blocks", "roofline"].map((tab) =>
          h(
            "button",
            {
              type: "button",
              role: "tab",
              id: `${prefix}-${k}-${tab}`,
              "aria-controls": `${prefix}-${k}-panel`,
              "data-tab": tab,
              onclick: () => {
                state.tab = tab;
                draw("panel");
              },
            },
            { step: "Batch", blocks: "KV blocks", roofline: "Roofline" }[tab],
          ),
        ),
      );
      const stepTitle = h("h3", {}),
        content = h("div.content", { role: "tabpanel", id: `${prefix}-${k}-panel`, tabindex: "0" });
      const side = h(
        "aside.side",
        { "aria-label": `${pane.name}: the step at the scrubber` },
        stepTitle,
        tabs,
        content,
      );
      const node = h(
        "section.pane",
        { "aria-label": pane.name, "data-pane": k },
        head,
        h("div.row", {}, plot, side),
      );
      plot.addEventListener("pointerdown", (event) => startDrag(event, k));
      plot.addEventListener("pointermove", (event) => hover(event, k));
      plot.addEventListener("pointerleave", hideTip);
      plot.addEventListener("wheel", (event) => wheel(event, k), { passive: false });
      return {
        node,
        plot,
        canvas,
        bars,
        names,
        marks,
        barMarks,
        line,
        veil,
        scroll,
        side,
        tabs,
        stepTitle,
        content,
        shownStep: null,
      };
    });
    body.replaceChildren(...paneNodes.map((pane) => pane.node));
  }

  // Sizes. Lanes share the height; below a readable size they scroll, or all fit as thin lines.
  function layout() {
    const outer = frameBox.clientWidth - 24; // the frame's padding
    if (outer <= 0) return;
    const narrow = outer < 720;
    root.dataset.narrow = String(narrow);
    const longest = panes.reduce(
      (a, pane) => pane.requests.id.reduce((b, id) => Math.max(b, Array.from(id).length), a),
      0,
    );
    const gutter = clamp(Math.ceil(longest * 6.6) + 18, 46, narrow ? 92 : 150);
    const most = options.height ?? (panes.length > 1 ? 300 : 440);
    layouts = panes.map((pane, k) => {
      const width = Math.max(120, (narrow ? outer : outer - 296) - gutter - 14);
      const ideal = clamp(Math.floor(most / Math.max(1, pane.count)), 1, 24);
      const lane = state.readable
        ? Math.max(ideal, 9)
        : Math.max(1, Math.min(24, most / Math.max(1, pane.count)));
      const full = lane * pane.count,
        height = Math.max(60, Math.min(most, full));
      // With few lanes the bars take the room that the side panel needs anyway.
      const bars = narrow ? 56 : clamp(242 - height, 56, 110);
      return {
        gutter,
        width,
        lane,
        height,
        full,
        bars,
        scroll: clamp(layouts[k]?.scroll ?? 0, 0, Math.max(0, full - height)),
      };
    });
    const crowded = panes.some((pane) => pane.count * 9 > most);
    fitButton.hidden = !crowded;
    fitButton.setAttribute("aria-pressed", String(!state.readable));
    paneNodes.forEach((pane, k) => {
      const { gutter: left, width, height, bars } = layouts[k];
      const total = height + bars + 8;
      pane.plot.style.cssText = `height:${total}px;width:${left + width + 14}px`;
      pane.side.style.height = narrow ? "" : `${Math.max(total, 250)}px`;
      const place = (node, x, y, w, hgt) => {
        node.style.cssText = `left:${x}px;top:${y}px;width:${w}px;height:${hgt}px`;
      };
      place(pane.canvas, left, 0, width, height);
      place(pane.marks, left, 0, width, height);
      place(pane.bars, left, height + 8, width, bars);
      place(pane.barMarks, 0, height + 8, left + width, bars);
      place(pane.names, 0, 0, left, height);
      for (const canvas of [pane.canvas, pane.bars]) {
        const ratio = ratioOf(),
          hgt = canvas === pane.canvas ? height : bars;
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(hgt * ratio);
      }
    });
    axis.style.cssText = `height:30px;width:${gutter + layouts[0].width + 14}px`;
    draw("all");
  }

  // Drawing happens once per frame, whatever asked for it; a hidden timeline waits until it is seen.
  function draw(what) {
    stale.add(what);
    if (!frame)
      frame = requestAnimationFrame(() => {
        frame = 0;
        paint();
      });
  }

  function paint() {
    if (!layouts.length || !frameBox.clientWidth) return;
    if (!coloured()) retheme();
    const began = performance.now(),
      what = stale;
    stale = new Set();
    const all = what.has("all"),
      zoomed = all || what.has("view");
    if (zoomed || what.has("lanes")) {
      panes.forEach((pane, k) => {
        const node = paneNodes[k],
          place = layouts[k],
          ratio = ratioOf();
        const context = node.canvas.getContext("2d");
        context.setTransform(ratio, 0, 0, ratio, 0, 0);
        context.clearRect(0, 0, place.width, place.height);
        const lanes = new CanvasPainter(context, palette, ratio);
        paintGrid(lanes, state, place.width, place.height);
        paintLanes(lanes, pane, place, state, state);
        const barContext = node.bars.getContext("2d");
        barContext.setTransform(ratio, 0, 0, ratio, 0, 0);
        barContext.clearRect(0, 0, place.width, place.bars);
        paintBars(new CanvasPainter(barContext, palette, ratio), pane, place, state);
        const svg = (paintInto) => {
          const p = new SvgPainter(palette, prefix);
          paintInto(p);
          return p.parts.join("");
        };
        node.marks.innerHTML = svg((p) => paintMarks(p, pane, place, state, state));
        node.names.innerHTML = svg((p) => paintNames(p, pane, place, state));
        node.barMarks.innerHTML = svg((p) => paintBarMarks(p, pane, place));
        const ratioShown = place.height / place.full;
        node.scroll.hidden = ratioShown >= 0.999;
        node.scroll.style.cssText = `left:${place.gutter + place.width + 3}px;height:${place.height}px`;
        node.scroll.firstChild.style.cssText = `height:${Math.max(24, ratioShown * place.height)}px;top:${(place.scroll / Math.max(1, place.full - place.height)) * (place.height - Math.max(24, ratioShown * place.height))}px`;
        node.node.dataset.lanes = visibleLanes(pane, place).join("-");
      });
      const p = new SvgPainter(palette, prefix);
      paintAxis(p, state, layouts[0].width, layouts[0].gutter);
      axisSvg.innerHTML = p.parts.join("");
    }
    placeCursor();
    paintPanels(all || what.has("panel") || what.has("lanes"));
    const took = performance.now() - began;
    Object.assign(root.dataset, {
      drawMs: took.toFixed(1),
      draws: String(+(root.dataset.draws ?? 0) + 1),
    });
    root.dataset.firstDrawMs ??= (performance.now() - mountedAt).toFixed(1);
  }

  function placeCursor() {
    const place = layouts[0],
      x = ((state.cursor - state.t0) / (state.t1 - state.t0)) * place.width,
      visible = x >= -0.5 && x <= place.width + 0.5;
    paneNodes.forEach((node, k) => {
      const { gutter, width, height, bars } = layouts[k];
      node.line.hidden = !visible;
      node.line.style.cssText = `left:${gutter + x}px;height:${height + bars + 8}px`;
      node.node.classList.toggle("mc-active", panes.length > 1 && k === state.active);
      const step = stepAt(panes[k], state.cursor);
      node.node.dataset.step = step;
      const from = clamp(((hiddenFrom(k) - state.t0) / (state.t1 - state.t0)) * width, 0, width);
      node.veil.hidden = !state.predict || from >= width;
      node.veil.style.cssText = `left:${gutter + from}px;width:${width - from}px;height:${height + bars + 8}px`;
    });
    thumb.hidden = !visible;
    thumb.style.left = `${place.gutter + x}px`;
    thumb.setAttribute("aria-valuemin", extent[0].toFixed(4));
    thumb.setAttribute("aria-valuemax", extent[1].toFixed(4));
    thumb.setAttribute("aria-valuenow", state.cursor.toFixed(4));
    thumb.setAttribute("aria-valuetext", cursorText());
    clock.textContent = duration(state.cursor);
    const step = stepAt(panes[state.active], state.cursor);
    Object.assign(root.dataset, {
      cursor: String(+state.cursor.toFixed(7)),
      step: String(step),
      viewStart: String(+state.t0.toFixed(7)),
      viewEnd: String(+state.t1.toFixed(7)),
      selection: state.selection ?? "",
      panes: String(panes.length),
      playing: String(state.playing),
      predict: String(state.predict),
      tab: state.tab,
      stalls: panes.map((pane) => pane.stalls.start.length).join(","),
      headline: panes.map((pane) => pane.headline).join(" | "),
    });
  }

  /** In predict mode: what lies after the current step is covered. */
  function hiddenFrom(k) {
    const pane = panes[k],
      step = stepAt(pane, state.cursor);
    return step < 0 ? pane.start : pane.steps.end[step];
  }

  function paintPanels(force) {
    paneNodes.forEach((node, k) => {
      const pane = panes[k],
        step = stepAt(pane, state.cursor);
      const key = `${step}:${state.tab}:${state.predict}:${state.cursor >= (pane.steps.end[step] ?? 0)}`;
      if (!force && node.shownStep === key) return;
      node.shownStep = key;
      for (const tab of node.tabs.children)
        tab.setAttribute("aria-selected", String(tab.dataset.tab === state.tab));
      node.content.setAttribute("aria-labelledby", `${prefix}-${k}-${state.tab}`);
      const children = [];
      if (step < 0) {
        node.stepTitle.textContent = "Before the first step";
        children.push(h("p.note", {}, "Nothing has been scheduled yet."));
      } else {
        const { start, end } = pane.steps;
        node.stepTitle.replaceChildren(
          `Step ${grouped(step)}`, // counted from 0, as trace.why and the rows of a trace do
          h(
            "small",
            {},
            `of 0 to ${state.predict ? "?" : grouped(start.length - 1)}, at ${duration(start[step])}, ${duration(end[step] - start[step])} long`,
          ),
        );
        if (state.tab === "step") children.push(...stepPanel(pane, step, state, select));
        else if (state.tab === "blocks")
          children.push(...blocksPanel(pane, step, state, palette, select));
        else if (state.predict) children.push(h("p.note", {}, "Hidden while you predict."));
        else children.push(...rooflinePanel(pane, step, palette, prefix));
      }
      if (state.predict && k === state.active)
        children.unshift(
          state.answer ? h("p.answer", {}, state.answer) : null,
          ...predictPanel(pane, step, (next, right, asked) => answer(k, next, right, asked)),
        );
      node.content.replaceChildren(...children.flat().filter(Boolean));
    });
  }

  // Moving. Every change goes through these, so that Python and the page see the same state.
  function changed() {
    options.onChange?.({
      cursor: state.cursor,
      view: [state.t0, state.t1],
      selection: state.selection,
    });
  }

  function setRange(t0, t1) {
    const whole = extent[1] - extent[0],
      span = clamp(t1 - t0, MIN_VIEW, whole);
    state.t0 = clamp(t0, extent[0], extent[1] - span);
    state.t1 = state.t0 + span;
  }

  function setView(t0, t1) {
    setRange(t0, t1);
    hideTip();
    draw("view");
    changed();
  }

  function setCursor(time, { speak = false, follow = true } = {}) {
    state.cursor = clamp(time, ...extent);
    const span = state.t1 - state.t0;
    if (follow && (state.cursor < state.t0 || state.cursor > state.t1)) {
      setRange(
        state.cursor - span * (state.cursor < state.t0 ? 0.8 : 0.2),
        state.cursor + span * (state.cursor < state.t0 ? 0.2 : 0.8),
      );
      draw("view");
    }
    draw("cursor");
    changed();
    if (speak) announce(cursorText());
  }

  function select(id) {
    state.selection = state.selection === id ? null : id;
    draw("lanes");
    changed();
  }

  function moveSteps(by) {
    const pane = panes[state.active],
      count = pane.steps.start.length;
    if (!count) return;
    state.answer = "";
    setCursor(pane.steps.start[clamp(stepAt(pane, state.cursor) + by, 0, count - 1)], {
      speak: true,
    });
  }

  function moveStall(by) {
    if (state.predict) return announce("Stalls are hidden while you predict.");
    const all = panes
      .flatMap((pane, k) => pane.stallOrder.map((i) => [pane.stalls.start[i], k, i]))
      .sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
    if (!all.length) return announce("This run has no stalls.");
    // Stalls that begin together are one stop: ten readers who wait for the same chunk.
    const stops = all.filter(
      (stall, i) => !i || stall[0] - all[i - 1][0] > 1e-9 || stall[1] !== all[i - 1][1],
    );
    const at = stops.findIndex((stop) => stop[0] > state.cursor + 1e-9);
    const here = stops.findIndex(
      (stop) => Math.abs(stop[0] - state.cursor) <= 1e-9 && stop[1] === state.active,
    );
    const next =
      here >= 0
        ? here + by
        : by > 0
          ? at < 0
            ? stops.length - 1
            : at
          : at < 0
            ? stops.length - 1
            : at - 1;
    const [time, k, i] = stops[clamp(next, 0, stops.length - 1)];
    state.active = k;
    const pane = panes[k],
      request = pane.stalls.request[i];
    state.selection = pane.requests.id[request];
    showLane(k, request);
    setCursor(time);
    draw("lanes");
    const together = all.filter(
      (stall) => stall[1] === k && Math.abs(stall[0] - time) <= 1e-9,
    ).length;
    announce(pane.stalls.text[i] + (together > 1 ? ` (${together} requests stall here)` : ""));
  }

  function showLane(k, lane) {
    const place = layouts[k],
      y = lane * place.lane;
    if (y < place.scroll || y + place.lane > place.scroll + place.height)
      place.scroll = clamp(y - place.height / 2, 0, Math.max(0, place.full - place.height));
  }

  function scrollLanes(k, to) {
    const place = layouts[k];
    place.scroll = clamp(to, 0, Math.max(0, place.full - place.height));
    draw("lanes");
  }

  function zoom(factor, centre = null) {
    const middle =
      centre ??
      (state.cursor >= state.t0 && state.cursor <= state.t1
        ? state.cursor
        : (state.t0 + state.t1) / 2);
    setView(middle - (middle - state.t0) * factor, middle + (state.t1 - middle) * factor);
  }

  function play(on) {
    if (on && state.cursor >= extent[1] - 1e-9) state.cursor = extent[0];
    state.playing = on;
    playButton.textContent = on ? "❚❚" : "▶";
    playButton.setAttribute("aria-label", on ? "Pause (Space)" : "Play (Space)");
    draw("cursor");
    if (!on) return changed();
    lastTick = performance.now();
    const tick = (now) => {
      if (!state.playing) return;
      const since = now - lastTick;
      if (!calm.matches) {
        lastTick = now;
        setCursor(state.cursor + (since / 1000) * state.speed);
      } else if (since > 700) {
        lastTick = now;
        moveSteps(1);
      } // reduced motion: step by step
      const pane = panes[state.active];
      if (
        state.cursor >= extent[1] - 1e-9 ||
        (calm.matches && stepAt(pane, state.cursor) >= pane.steps.start.length - 1)
      )
        return play(false);
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  function setPredict(on) {
    state.predict = on;
    state.answer = "";
    state.score = [0, 0];
    if (on) play(false);
    predictButton.setAttribute("aria-pressed", String(on));
    root.classList.toggle("mc-predicting", on);
    tableBox.hidden = on;
    draw("panel");
  }

  function answer(k, next, right, asked) {
    const pane = panes[k];
    state.score = [state.score[0] + right, state.score[1] + asked];
    const chunks = batchAt(pane, next)
      .filter((row) => pane.spans.prefill[row])
      .map(
        (row) =>
          `${nameOf(pane, pane.spans.request[row])} got chunk ${pane.spans.chunk[row]}/${pane.spans.chunks[row]} (${grouped(pane.spans.tokens[row])} tokens)`,
      );
    state.answer = `${right} of ${asked} right. ${chunks.length ? `${chunks.join("; ")}. ` : ""}${plural(pane.steps.decode[next], "decode")}. Score so far: ${state.score[0]} of ${state.score[1]}.`;
    root.dataset.score = state.score.join("/");
    setCursor(pane.steps.start[next]);
    draw("panel");
    announce(state.answer);
  }

  function cursorText() {
    const pane = panes[state.active],
      step = stepAt(pane, state.cursor);
    if (step < 0) return `${duration(state.cursor)}: before the first step`;
    const chunks = batchAt(pane, step)
      .filter((row) => pane.spans.prefill[row])
      .slice(0, 3)
      .map(
        (row) =>
          `chunk ${pane.spans.chunk[row]}/${pane.spans.chunks[row]} of ${nameOf(pane, pane.spans.request[row])}`,
      );
    return `Step ${step} at ${duration(state.cursor)}: ${plural(pane.steps.decode[step], "decode token")}, ${plural(pane.steps.prefill[step], "prefill token")}${chunks.length ? `: ${chunks.join(", ")}` : ""}`;
  }

  function announce(text) {
    live.textContent = text;
    root.dataset.live = text;
  }

  // The pointer: click puts the cursor, drag pans (lanes) or scrubs (bars, axis), hover explains.
  const timeAt = (event, k = 0) => {
    const box = paneNodes[k].plot.getBoundingClientRect(),
      place = layouts[k];
    return (
      state.t0 + ((event.clientX - box.left - place.gutter) / place.width) * (state.t1 - state.t0)
    );
  };

  function startDrag(event, k) {
    if (event.button !== 0) return;
    main.focus({ preventScroll: true });
    state.active = k;
    const box = paneNodes[k].plot.getBoundingClientRect(),
      place = layouts[k],
      y = event.clientY - box.top,
      x = event.clientX - box.left;
    const mode = x > place.gutter + place.width ? "scroll" : y > place.height + 2 ? "scrub" : "pan";
    drag = {
      k,
      mode,
      x: event.clientX,
      y: event.clientY,
      t0: state.t0,
      t1: state.t1,
      scroll: place.scroll,
      moved: false,
      inGutter: x < place.gutter,
      lane: Math.floor((y + place.scroll) / place.lane),
    };
    paneNodes[k].plot.setPointerCapture(event.pointerId);
    if (mode === "scrub" && !drag.inGutter) setCursor(timeAt(event, k));
  }

  function moveDrag(event) {
    if (!drag) return;
    const dx = event.clientX - drag.x,
      dy = event.clientY - drag.y,
      place = layouts[drag.k ?? 0];
    if (!drag.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
    drag.moved = true;
    hideTip();
    if (drag.mode === "scrub") setCursor(timeAt(event, drag.k));
    else if (drag.mode === "scroll")
      scrollLanes(drag.k, drag.scroll + dy * (place.full / place.height));
    else {
      const shift = (dx / place.width) * (drag.t1 - drag.t0);
      setView(drag.t0 - shift, drag.t1 - shift);
      if (place.full > place.height) scrollLanes(drag.k, drag.scroll - dy);
    }
  }

  function endDrag(event) {
    if (!drag) return;
    const { k, mode, moved, inGutter, lane } = drag;
    drag = null;
    if (moved || mode !== "pan" || event.type === "pointercancel") return;
    if (lane >= 0 && lane < panes[k].count) select(panes[k].requests.id[lane]);
    if (!inGutter) setCursor(timeAt(event, k), { speak: true });
  }

  function wheel(event, k) {
    if (!(event.ctrlKey || event.shiftKey || event.altKey || event.metaKey)) return hideTip(); // the page scrolls
    event.preventDefault();
    event.stopPropagation();
    const amount = event.deltaY || event.deltaX;
    zoom(Math.exp(clamp(amount, -120, 120) * 0.0025), clamp(timeAt(event, k), state.t0, state.t1));
  }

  function hover(event, k) {
    if (drag || event.pointerType === "touch") return;
    const pane = panes[k],
      place = layouts[k],
      box = paneNodes[k].plot.getBoundingClientRect();
    const x = event.clientX - box.left - place.gutter,
      y = event.clientY - box.top,
      time = timeAt(event, k);
    let lines = [];
    if (state.predict && time > hiddenFrom(k)) lines = ["Hidden: predict first."];
    else if (y > place.height + 8 && x >= 0) lines = barTip(pane, time);
    else if (y < place.height)
      lines = laneTip(
        pane,
        Math.floor((y + place.scroll) / place.lane),
        x < 0 ? null : time,
        place.width,
        state,
      );
    if (!lines.length || x > place.width + 2) return hideTip();
    hoverText = lines.join("\n");
    tip.replaceChildren(...lines.map((line, i) => h(i ? "div" : "b", {}, line)));
    tip.hidden = false;
    root.dataset.hover = hoverText;
    const outer = frameBox.getBoundingClientRect(),
      size = tip.getBoundingClientRect();
    const left = clamp(
      event.clientX - outer.left + 14,
      4,
      Math.max(4, outer.width - size.width - 4),
    );
    const below = event.clientY - outer.top + 18,
      over = event.clientY - outer.top - size.height - 10;
    tip.style.left = `${left}px`;
    tip.style.top = `${event.clientY + 18 + size.height > window.innerHeight && over > -40 ? over : below}px`;
  }

  function hideTip() {
    if (!tip.hidden) {
      tip.hidden = true;
    }
    root.dataset.hover = "";
  }

  // Keys. What we handle goes no further, least of all to a notebook's command mode.
  const SCROLLING = new Set([" ", "Home", "End", "PageUp", "PageDown"]);
  const KEYS = {
    ArrowLeft: (event) => moveSteps(event.shiftKey ? -10 : -1),
    ArrowRight: (event) => moveSteps(event.shiftKey ? 10 : 1),
    Home: () => moveSteps(-Infinity),
    End: () => moveSteps(Infinity),
    "[": () => moveStall(-1),
    "]": () => moveStall(1),
    " ": () => play(!state.playing),
    "+": () => zoom(1 / 1.6),
    "=": () => zoom(1 / 1.6),
    "-": () => zoom(1.6),
    "−": () => zoom(1.6),
    0: () => setView(...extent),
    PageDown: () =>
      scrollLanes(state.active, layouts[state.active].scroll + layouts[state.active].height * 0.9),
    PageUp: () =>
      scrollLanes(state.active, layouts[state.active].scroll - layouts[state.active].height * 0.9),
    Escape: () => {
      hideTip();
      if (state.selection !== null) select(state.selection);
    },
  };

  function key(event) {
    const action = KEYS[event.key],
      at = (selector) => event.target.closest?.(selector);
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    // A field keeps all its keys, a button its Space, and what scrolls the keys that scroll it.
    if (at("input, select, textarea") || (at("button, summary") && event.key === " ")) return;
    if (at(".mc-content, .mc-scroller") && SCROLLING.has(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    action(event);
  }

  // Exports.
  const fileName = (extension) =>
    `${
      panes
        .map((pane) => pane.name)
        .join("-vs-")
        .replace(/[^\w.-]+/g, "_")
        .slice(0, 80) || "timeline"
    }.${extension}`;

  function svgText() {
    const p = new SvgPainter(palette, `${prefix}-export`),
      size = picture(layouts);
    paintPicture(p, panes, layouts, state, size);
    return `<svg xmlns="${SVG_NS}" width="${size.width}" height="${size.height}" viewBox="0 0 ${size.width} ${size.height}" font-family="system-ui, sans-serif">${p.hatchDefinition()}${p.parts.join("")}</svg>`;
  }
  function saveSvg() {
    download(fileName("svg"), svgText(), "image/svg+xml");
  }
  function savePng() {
    const size = picture(layouts),
      canvas = document.createElement("canvas");
    canvas.width = size.width * 2;
    canvas.height = size.height * 2;
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    paintPicture(new CanvasPainter(context, palette, 2), panes, layouts, state, size);
    canvas.toBlob((blob) => download(fileName("png"), blob, "image/png"), "image/png");
  }
  function saveChrome() {
    download(fileName("json"), JSON.stringify(chromeTrace(payload)), "application/json");
  }
  function saveHtml() {
    const assets = options.assets?.();
    if (!assets) return announce("This host gives no page template; use to_html() in Python.");
    download(
      fileName("html"),
      fillPage(assets, payload, {
        cursor: state.cursor,
        view: [state.t0, state.t1],
        selection: state.selection,
      }),
      "text/html",
    );
  }

  function showTables() {
    tableBox.replaceChildren(tableBox.firstChild, ...requestTables(panes));
  }

  // Themes: the host's own background decides, then the system; the palette follows from CSS.
  function retheme() {
    const wanted =
      options.theme && options.theme !== "auto"
        ? options.theme
        : isDark(root, media)
          ? "dark"
          : "light";
    root.dataset.theme = wanted;
    const style = getComputedStyle(root),
      read = (name) => style.getPropertyValue(`--mc-${name}`).trim();
    palette = Object.fromEntries(
      [...COLOURS, "text", "muted", "grid", "cursor", "selected", "tick"].map((name) => [
        name,
        read(name),
      ]),
    );
    palette.stallTint = read("stall-tint");
    palette.onPrefill = read("on-prefill");
    palette.background = resolved(root, "--mc-background");
    draw("all");
  }

  /** A host may attach us, or our style sheet, only after mounting: until then no colour is known. */
  const coloured = () => Boolean(palette.decode);

  const mountedAt = performance.now();
  retheme();
  load(payload, null);
  if (options.view) setRange(...options.view);
  if (options.cursor != null) state.cursor = clamp(options.cursor, ...extent);
  listen(frameBox, "keydown", key);
  listen(window, "pointermove", moveDrag);
  listen(window, "pointerup", endDrag);
  listen(window, "pointercancel", endDrag);
  listen(window, "blur", hideTip);
  listen(window, "scroll", hideTip, { capture: true, passive: true });
  listen(media, "change", retheme);
  listen(document, "pointerdown", (event) => {
    if (!event.composedPath().includes(menu)) menu.open = false;
  });
  listen(axis, "pointerdown", (event) => {
    if (event.button) return;
    main.focus({ preventScroll: true });
    drag = { k: 0, mode: "scrub", x: event.clientX, y: event.clientY, moved: false };
    axis.setPointerCapture(event.pointerId);
    setCursor(timeAt(event));
  });
  listen(axis, "wheel", (event) => wheel(event, 0), { passive: false });
  const resized = new ResizeObserver(() => {
    retheme();
    layout();
  });
  resized.observe(frameBox);
  const seen = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) draw("all");
  });
  seen.observe(frameBox);
  const themed = new MutationObserver(retheme);
  for (const node of [document.documentElement, document.body])
    themed.observe(node, {
      attributes: true,
      attributeFilter: [
        "class",
        "data-theme",
        "data-jp-theme-name",
        "data-jp-theme-light",
        "data-vscode-theme-kind",
        "style",
      ],
    });
  cleanups.push(() => {
    resized.disconnect();
    seen.disconnect();
    themed.disconnect();
    cancelAnimationFrame(frame);
    state.playing = false;
  });
  paint();

  return {
    state,
    svg: svgText,
    update(next) {
      const zoomed = state.t1 - state.t0 < (extent[1] - extent[0]) * 0.999;
      load(next, { zoomed });
      changed();
    },
    set({ cursor, view, selection }) {
      if (view && (view[0] !== state.t0 || view[1] !== state.t1)) {
        setRange(...view);
        draw("view");
      }
      if (selection !== undefined && selection !== state.selection) {
        state.selection = selection;
        draw("lanes");
      }
      if (cursor != null && cursor !== state.cursor) {
        state.cursor = clamp(cursor, ...extent);
        draw("cursor");
      }
    },
    destroy() {
      cleanups.forEach((cleanup) => cleanup());
      root.replaceChildren();
    },
  };
}

/** A custom property as the browser resolves it: variables and keywords become a colour. */
function resolved(root, name) {
  const probe = h("span", { style: `display:none;color:var(${name})` });
  root.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function isDark(root, media) {
  const dark = (colour) => {
    const [r, g, b, a = 1] = (colour.match(/[\d.]+/g) ?? []).map(Number);
    return b === undefined || a < 0.5 ? null : 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
  };
  const declared = getComputedStyle(root);
  for (const name of ["--jp-layout-color0", "--vscode-editor-background"]) {
    if (declared.getPropertyValue(name)) return dark(resolved(root, name)) ?? media.matches;
  }
  // Out of a shadow root, too: there the host element is the next to ask.
  for (let node = root.parentElement; node; node = node.parentElement ?? node.getRootNode().host) {
    const found = dark(getComputedStyle(node).backgroundColor);
    if (found !== null) return found;
  }
  return media.matches;
}

// ── 9. The same module as an anywidget, and as a page of its own ─────────────────────────────────

function render({ model, el }) {
  const node = h("div");
  el.append(node);
  let sending = 0,
    own = null;
  const handle = mount(node, model.get("payload"), {
    cursor: model.get("cursor"),
    view: model.get("view")?.length ? model.get("view") : null,
    selection: model.get("selection") || null,
    theme: model.get("theme"),
    height: model.get("height") || undefined,
    assets: () => ({ source: model.get("_esm"), css: model.get("_css"), page: model.get("page") }),
    onChange(state) {
      own = state;
      // One message per frame at most, however fast the pointer moves.
      sending ||= requestAnimationFrame(() => {
        sending = 0;
        model.set({ cursor: own.cursor, view: own.view, selection: own.selection ?? "" });
        model.save_changes();
      });
    },
  });
  const follow = () =>
    handle.set({
      cursor: model.get("cursor"),
      view: model.get("view")?.length ? model.get("view") : null,
      selection: model.get("selection") || null,
    });
  const replace = () => handle.update(model.get("payload"));
  model.on("change:cursor change:view change:selection", follow);
  model.on("change:payload", replace);
  return () => {
    model.off("change:cursor change:view change:selection", follow);
    model.off("change:payload", replace);
    cancelAnimationFrame(sending);
    handle.destroy();
  };
}

export default { render };

const holder = globalThis.document?.getElementById("minichunk-data");
if (holder) {
  const { payload, options, page } = JSON.parse(holder.textContent);
  const text = (id) => document.getElementById(id).textContent;
  const start = () =>
    mount(document.getElementById("minichunk-timeline"), payload, {
      ...options,
      assets: () => ({ source: text("minichunk-source"), css: text("minichunk-style"), page }),
    });
  globalThis.minichunk = { timeline: start() };
}
