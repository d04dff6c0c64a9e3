// Line charts and stacked bars over steps, drawn as SVG. Charts of one board share a cursor and a range.

import { h, onWidth, short, svg } from "./dom.js";

const HEIGHT = 176;
const LEFT = 46,
  RIGHT = 10,
  TOP = 8,
  BOTTOM = 20;
const BARS = 110; // at most, however many steps

/** The mean of the last `span` values at each place; missing ones are left out. */
export function smoothed(values, span) {
  if (span <= 1) return values;
  const means = [];
  let sum = 0,
    count = 0;
  values.forEach((value, i) => {
    if (value !== null) {
      sum += value;
      count++;
    }
    const gone = i >= span ? values[i - span] : null;
    if (gone !== null) {
      sum -= gone;
      count--;
    }
    means.push(value === null || !count ? null : sum / count);
  });
  return means;
}

/** Round numbers for an axis, about `count` of them. */
export function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++)
    found.push(Number((i * step).toPrecision(10)));
  return found;
}

/** Numbers of an axis as text, with as many digits as tell them apart. */
export function labelled(marks) {
  const step = marks.length > 1 ? Math.abs(marks[1] - marks[0]) : 0;
  const exact = (count) => {
    const whole = Math.round(step * 10 ** count);
    return whole >= 1 && Math.abs(step * 10 ** count - whole) < 1e-6;
  };
  const digits = step ? [0, 1, 2, 3, 4].find(exact) : undefined;
  const large = Math.max(...marks.map(Math.abs)) >= 1e4;
  return marks.map((mark) => (digits === undefined || large ? short(mark) : mark.toFixed(digits)));
}

/** Charts that share a cursor. on: {pick(step), zoom(from, to)}. */
export class Board {
  constructor(on) {
    this.on = on;
    this.charts = [];
  }

  /** A card with a chart. spec: {title, unit, hint, lines: [{name, label, doc, colour}], eta, points(), keys()}. */
  add(spec) {
    const chart = new LineChart(this, spec);
    this.charts.push(chart);
    return chart.card;
  }

  /** A card with stacked bars. spec: {title, unit, hint}. */
  addBars(spec) {
    const chart = new BarChart(this, spec);
    this.charts.push(chart);
    return chart.card;
  }

  /** Draw again. data: {step: [S], lines: {name: [S]}, drops: {reason: [S]}}; range: [first, last] steps; span: of the
   * smoothing. */
  update(data, range, span) {
    for (const chart of this.charts) chart.update(data, range, span);
  }

  cursor(step) {
    for (const chart of this.charts) chart.cursor(step);
  }
}

class Chart {
  constructor(board, spec) {
    this.board = board;
    this.spec = spec;
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot" });
    const unit = spec.unit ? h("span", { class: "unit" }, spec.unit) : null;
    this.card = h(
      "section",
      { class: "card chart", "aria-label": spec.title },
      h("h3", {}, spec.title, " ", unit, h("span", { class: "hint" }, spec.hint ?? "")),
      this.legend,
      this.plot,
    );
    this.listen();
    onWidth(this.plot, () => this.draw());
  }

  update(data, range, span) {
    this.data = data;
    this.range = range;
    this.span = span;
    this.select();
    this.draw();
  }

  x(step) {
    const [first, last] = this.range;
    return LEFT + ((step - first) / Math.max(1, last - first)) * (this.width - LEFT - RIGHT);
  }

  stepAt(clientX) {
    const [first, last] = this.range;
    const share = (clientX - this.plot.getBoundingClientRect().left - LEFT) / (this.width - LEFT - RIGHT);
    return Math.round(first + Math.min(1, Math.max(0, share)) * (last - first));
  }

  y(value) {
    return TOP + (1 - (value - this.low) / (this.high - this.low || 1)) * (HEIGHT - TOP - BOTTOM);
  }

  axes() {
    const bottom = HEIGHT - BOTTOM;
    const marks = ticks(this.low, this.high, 4, this.whole);
    const labels = labelled(marks);
    return [
      marks.map((value, i) => [
        svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(value), y2: this.y(value) }),
        svg("text", { class: "tick", x: LEFT - 6, y: this.y(value) + 3.5, "text-anchor": "end" }, labels[i]),
      ]),
      ticks(...this.range, Math.max(2, this.width / 90), true).map((step) =>
        svg(
          "text",
          {
            class: "tick",
            x: this.x(step),
            y: bottom + 15,
            "text-anchor": this.x(step) > this.width - 24 ? "end" : "middle",
          },
          String(step),
        ),
      ),
    ];
  }

  listen() {
    let from = null,
      moved = false;
    const { plot, board } = this;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      from = event.clientX;
      moved = false;
    });
    plot.addEventListener("pointermove", (event) => {
      if (!this.range) return;
      board.cursor(this.stepAt(event.clientX));
      if (from === null) return;
      if (Math.abs(event.clientX - from) > 8 && !moved) {
        moved = true;
        plot.setPointerCapture(event.pointerId);
      }
      if (moved) this.mark(from, event.clientX);
    });
    plot.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [a, b] = [this.stepAt(from), this.stepAt(event.clientX)].sort((one, two) => one - two);
      if (moved && b > a) board.on.zoom(a, b);
      else if (!moved) board.on.pick(b);
      from = null;
      this.mark(0, 0);
    });
    for (const name of ["pointercancel", "pointerleave"]) {
      plot.addEventListener(name, () => {
        if (name === "pointerleave" && moved && from !== null) return;
        from = null;
        this.mark(0, 0);
        board.cursor(null);
      });
    }
  }

  mark(from, until) {
    if (!this.selection) return;
    const left = this.plot.getBoundingClientRect().left;
    const [a, b] = [from - left, until - left].sort((one, two) => one - two);
    this.selection.setAttribute("x", Math.max(LEFT, a));
    this.selection.setAttribute("width", Math.max(0, Math.min(b, this.width - RIGHT) - Math.max(LEFT, a)));
  }

  draw() {
    this.width = this.plot.clientWidth;
    if (!this.width || !this.data) return;
    this.selection = svg("rect", { class: "selection", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
    this.hair = svg("line", { class: "hair", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.plot.replaceChildren(
      svg(
        "svg",
        { width: this.width, height: HEIGHT, role: "img", "aria-label": this.spec.title },
        this.axes(),
        this.marks(),
        this.selection,
        this.hair,
      ),
    );
    this.cursor(null);
  }

  cursor(step) {
    if (!this.hair) return;
    const i = step === null ? this.data.step.length - 1 : this.data.step.indexOf(step);
    this.hair.setAttribute("visibility", step !== null && i >= 0 ? "visible" : "hidden");
    if (step !== null) for (const end of ["x1", "x2"]) this.hair.setAttribute(end, this.x(step));
    this.tell(i, step !== null);
  }
}

class LineChart extends Chart {
  select() {
    const { spec, data, range, span } = this;
    this.lines = spec.lines
      .map((line, i) => ({ ...line, colour: line.colour ?? `c${(i % 6) + 1}`, raw: data.lines[line.name] }))
      .filter((line) => line.raw && line.raw.some((value) => value !== null))
      .map((line) => ({ ...line, mean: smoothed(line.raw, span) }));
    const inside = (i) => data.step[i] >= range[0] && data.step[i] <= range[1];
    let low = Infinity,
      high = -Infinity;
    const see = (value) => {
      if (value < low) low = value;
      if (value > high) high = value;
    };
    for (const line of this.lines) line.raw.forEach((value, i) => value !== null && inside(i) && see(value));
    for (const point of this.points()) {
      see(point.mean - point.error);
      see(point.mean + point.error);
    }
    if (spec.eta !== null && spec.eta !== undefined) {
      see(0);
      see(spec.eta * 1.12);
    }
    if (low > high) [low, high] = [0, 1];
    if (low > 0 && low < 0.6 * high) low = 0;
    if (low === high) [low, high] = low ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2] : [0, 1];
    const room = (high - low) * 0.05;
    this.low = low === 0 ? 0 : low - room;
    this.high = high + room;
    this.card.classList.toggle("empty", !this.lines.length);
  }

  points() {
    return (this.spec.points?.() ?? []).filter((p) => p.at >= this.range[0] && p.at <= this.range[1] + 1);
  }

  marks() {
    const marks = [];
    const { eta } = this.spec;
    if (eta !== null && eta !== undefined) {
      marks.push(
        svg("line", { class: "bound", x1: LEFT, x2: this.width - RIGHT, y1: this.y(eta), y2: this.y(eta) }),
      );
      marks.push(
        svg(
          "text",
          { class: "tick bound", x: this.width - RIGHT, y: this.y(eta) - 4, "text-anchor": "end" },
          `eta ${eta}`,
        ),
      );
    }
    for (const line of this.lines) {
      const dense = this.range[1] - this.range[0] > this.width ? "dense" : "";
      if (this.span > 1) marks.push(svg("path", { class: `raw ${dense} ${line.colour}`, d: this.path(line.raw) }));
      marks.push(svg("path", { class: `line ${line.colour}`, d: this.path(line.mean) }));
    }
    for (const point of this.points()) {
      const x = this.x(Math.min(point.at, this.range[1]));
      marks.push(
        svg(
          "g",
          { class: `point ${point.colour}` },
          svg("title", {}, point.text),
          svg("line", { x1: x, x2: x, y1: this.y(point.mean - point.error), y2: this.y(point.mean + point.error) }),
          svg("circle", { cx: x, cy: this.y(point.mean), r: 4 }),
        ),
      );
    }
    return marks;
  }

  /** The line as a path; where several values fall on one pixel, from the smallest to the largest of them. */
  path(values) {
    const { step } = this.data;
    const parts = [];
    let column = null,
      low = 0,
      high = 0,
      last = 0,
      pen = "M";
    const flush = () => {
      if (column === null) return;
      const x = column.toFixed(1);
      parts.push(`${pen}${x} ${this.y(low).toFixed(1)}`);
      if (high !== low) parts.push(`L${x} ${this.y(high).toFixed(1)}L${x} ${this.y(last).toFixed(1)}`);
      pen = "L";
      column = null;
    };
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      if (step[i] < this.range[0] || step[i] > this.range[1]) continue;
      if (value === null) {
        flush();
        pen = "M";
        continue;
      }
      const x = Math.round(this.x(step[i]) * 2) / 2;
      if (x !== column) {
        flush();
        column = x;
        low = high = value;
      }
      low = Math.min(low, value);
      high = Math.max(high, value);
      last = value;
    }
    flush();
    if (parts.length === 1) parts.push(`${parts[0].replace("M", "L")}h.01`);
    return parts.join("");
  }

  tell(i, exact) {
    const label = exact ? h("b", {}, `step ${this.data.step[i] ?? "–"}`) : null;
    this.legend.replaceChildren(
      ...[label].filter(Boolean),
      ...this.lines.map((line) =>
        h(
          "span",
          { class: `key ${line.colour}`, title: line.doc },
          line.label,
          " ",
          h("b", {}, short(exact ? line.raw[i] : line.mean.findLast((value) => value !== null))),
        ),
      ),
      ...(exact ? [] : (this.spec.keys?.() ?? [])).map((key) =>
        h("span", { class: `key dot ${key.colour}` }, key.label),
      ),
    );
  }
}

class BarChart extends Chart {
  select() {
    const { step, drops } = this.data;
    const at = step.flatMap((s, i) => (s >= this.range[0] && s <= this.range[1] ? [i] : []));
    this.reasons = Object.keys(drops)
      .map((name) => ({ name, total: at.reduce((sum, i) => sum + drops[name][i], 0) }))
      .sort((one, two) => two.total - one.total)
      .map((reason, i) => ({ ...reason, colour: `c${(i % 6) + 1}` }));
    const wide = Math.max(1, Math.ceil(at.length / BARS));
    this.bars = [];
    for (let from = 0; from < at.length; from += wide) {
      const part = at.slice(from, from + wide);
      this.bars.push({
        first: step[part[0]],
        last: step[part.at(-1)],
        counts: this.reasons.map(({ name }) => part.reduce((sum, i) => sum + drops[name][i], 0) / part.length),
      });
    }
    this.whole = true;
    this.low = 0;
    this.high = Math.max(1, ...this.bars.map((bar) => bar.counts.reduce((a, b) => a + b, 0))) * 1.05;
    this.card.classList.toggle("empty", !this.reasons.length);
  }

  marks() {
    return this.bars.flatMap((bar) => {
      const left = this.x(bar.first - 0.4),
        right = this.x(bar.last + 0.4);
      let below = 0;
      return bar.counts.map((count, i) => {
        const y = this.y(below + count),
          height = this.y(below) - y;
        below += count;
        const x = Math.max(LEFT, left);
        return svg("rect", {
          class: `bar ${this.reasons[i].colour}`,
          x,
          y,
          width: Math.max(1, Math.min(right, this.width - RIGHT) - x),
          height,
        });
      });
    });
  }

  tell(i, exact) {
    this.legend.replaceChildren(
      ...(exact ? [h("b", {}, `step ${this.data.step[i] ?? "–"}`)] : []),
      ...this.reasons.map(({ name, total, colour }) =>
        h("span", { class: `key ${colour}` }, name, " ", h("b", {}, short(exact ? this.data.drops[name][i] : total))),
      ),
      this.reasons.length ? "" : "none so far",
    );
  }
}
