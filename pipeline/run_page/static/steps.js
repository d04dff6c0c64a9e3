// All steps of the run: a line of figures, and the charts.

import { ask, changed, go, to, value } from "./address.js";
import { Board } from "./charts.js";
import { h, short, visible } from "./dom.js";
import { evaluationsTable } from "./evaluations.js";

const SPANS = [
  ["", "auto"],
  ["1", "none"],
  ["10", "10 steps"],
  ["50", "50 steps"],
  ["200", "200 steps"],
];

export async function stepsView(run) {
  const own = run.num_steps ? await ask("steps") : empty();
  const askOther = async () => (run.other ? ask("steps", { run: "other", branch: "main" }) : null);
  let other = await askOther();
  let data = other ? together(own, other) : own;
  const notes = h("ul", { class: "notes" });
  const figures = h("div", { class: "figures" });
  const evaluations = h("section", {});
  const board = new Board({
    pick: (step) => own.step.includes(step) && go(to(`/step/${step}`)),
    zoom: (from, until) => go(changed({ from, to: until })),
  });
  const cards = run.charts.map((chart) => board.add(withPoints(chart, run)));
  cards.splice(3, 0, board.addBars({ title: "dropped", unit: "trajectories", hint: "a step, by reason" }));

  const from = value("from") === "" ? 0 : Number(value("from"));
  const until = value("to") === "" ? Infinity : Number(value("to"));
  const range = () => {
    const last = data.step.at(-1) ?? 0;
    return [Math.max(data.step[0] ?? 0, from), Math.max(1, Math.min(last, until))];
  };
  const draw = () => {
    notes.replaceChildren(...run.notes.map((note) => h("li", {}, visible(note))));
    figures.replaceChildren(...tiles(run, own));
    evaluations.replaceChildren(...evaluationsTable(run));
    const [first, last] = range();
    board.update(data, [first, last], Number(value("smooth")) || automatic(last - first + 1));
  };
  const zoomed = value("from") !== "" || value("to") !== "";
  const tools = h(
    "div",
    { class: "tools" },
    h(
      "label",
      {},
      "Smoothing ",
      h(
        "select",
        { onchange: (event) => go(changed({ smooth: event.target.value }), { replace: true }) },
        SPANS.map(([span, name]) => h("option", { value: span, selected: span === value("smooth") }, name)),
      ),
    ),
    zoomed
      ? h("a", { class: "button", href: changed({ from: "", to: "" }) }, `Steps ${range().join(" to ")} · show all`)
      : null,
    h("span", { class: "quiet" }, "Drag over a chart to zoom, click for a step’s groups."),
    run.other ? h("span", { class: "quiet" }, "Dashed: ", visible(run.other.name)) : null,
  );
  draw();
  return {
    title: "Steps",
    nodes: [
      figures,
      notes,
      tools,
      h("div", { class: "board" }, cards),
      evaluations,
      data.step.length
        ? null
        : h("p", { class: "quiet" }, "No step is stored yet; this page shows the first as soon as it is."),
    ].filter(Boolean),
    follow: async (now) => {
      const is = (part) => JSON.stringify(now[part]) === JSON.stringify(run[part]);
      if (["snapshot", "state", "notes", "other"].every(is)) return;
      if (now.snapshot) {
        const more = await ask("steps", { first: own.step.length, after: own.snapshot });
        if (more.reload) return go(changed({}), { replace: true }); // resumed: later steps were undone
        append(own, more);
      }
      if (!is("other")) other = await askOther();
      const sameCharts = is("charts");
      Object.assign(run, now);
      if (!sameCharts) return go(changed({}), { replace: true }); // the first steps show whether there are many turns
      if (other) data = together(own, other);
      draw();
    },
  };
}

const empty = () => ({ snapshot: "", step: [], lines: {}, drops: {} });
const automatic = (count) => (count < 30 ? 1 : Math.max(5, Math.round(count / 40)));

function append(data, more) {
  const before = data.step.length;
  data.snapshot = more.snapshot;
  data.step.push(...more.step);
  for (const part of ["lines", "drops"]) {
    for (const name of new Set([...Object.keys(data[part]), ...Object.keys(more[part])])) {
      const missing = part === "lines" ? null : 0;
      data[part][name] ??= Array(before).fill(missing);
      data[part][name].push(...(more[part][name] ?? Array(more.step.length).fill(missing)));
    }
  }
}

const OTHER = "other:"; // before the names of the second run's lines

/** The values of two runs over the steps of both. */
function together(own, other) {
  const step = [...new Set([...own.step, ...other.step])].sort((a, b) => a - b);
  const spread = (data, values, missing) => {
    const byStep = new Map(data.step.map((at, i) => [at, values[i]]));
    return step.map((at) => byStep.get(at) ?? missing);
  };
  const all = (data, part, before, missing) =>
    Object.entries(data[part]).map(([name, values]) => [before + name, spread(data, values, missing)]);
  return {
    step,
    lines: Object.fromEntries([...all(own, "lines", "", null), ...all(other, "lines", OTHER, null)]),
    drops: Object.fromEntries(all(own, "drops", "", 0)),
  };
}

/** A chart's lines, and after each that of the second run, dashed in the same colour. */
const withOther = (lines, name) =>
  lines.flatMap((line, i) => [
    { ...line, colour: `c${(i % 6) + 1}` },
    { ...line, name: OTHER + line.name, label: "", doc: `${line.doc}, of ${name}`, colour: `c${(i % 6) + 1} other` },
  ]);

function withPoints(chart, run) {
  const spec = { ...chart, eta: chart.staleness_bound ? run.eta : null };
  if (run.other) spec.lines = withOther(chart.lines, run.other.name);
  if (!chart.held_out) return spec;
  spec.points = () => heldOut(run); // a run that goes on evaluates again
  spec.keys = () =>
    run.evaluations.length
      ? [
          { label: `${run.evaluations[0].name}, sampled`, colour: "c2" },
          { label: `${run.evaluations[0].name}, greedy`, colour: "c3" },
        ]
      : [];
  return spec;
}

// The evaluations of the first set, which is the job's own if that is evaluated.
const ofFirstSet = (run) => run.evaluations.filter((e) => e.name === run.evaluations[0].name);

function heldOut(run) {
  return ofFirstSet(run).flatMap((e) =>
    [
      ["sampled", "c2"],
      ["greedy", "c3"],
    ]
      .filter(([kind]) => e[kind] !== null && e[kind] !== undefined)
      .map(([kind, colour]) => ({
        at: e.version,
        mean: e[kind],
        error: e[`${kind}_stderr`] ?? 0,
        colour,
        text: `${e.name}, ${kind}, version ${e.version}: ${withError(e[kind], e[`${kind}_stderr`])} (${e.num_prompts} prompts)`,
      })),
  );
}

const withError = (mean, error) => (error ? `${mean.toFixed(3)} ± ${error.toFixed(3)}` : mean.toFixed(3));

function tiles(run, data) {
  const { lines } = data;
  const mean = (name, from, until) => {
    const values = (lines[name] ?? []).slice(from, until).filter((value) => value !== null);
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  };
  const count = data.step.length,
    tail = Math.max(0, count - 10);
  const held = ofFirstSet(run).filter((e) => e.sampled !== null);
  const staleness = Math.max(...(lines.staleness_max ?? []).filter((value) => value !== null), 0);
  const dropped = Object.entries(run.ended).filter(([why]) => !why.startsWith("consumed"));
  return [
    tile(
      "steps",
      `${count}`,
      `of ${run.steps}`,
      h("progress", { max: run.steps, value: count, "aria-label": "steps done" }),
    ),
    count > 10
      ? tile("reward, last 10 steps", short(mean("reward", tail)), `first 10: ${short(mean("reward", 0, 10))}`)
      : tile("reward, all steps", short(mean("reward", 0)), ""),
    held.length
      ? tile(
          "held-out reward, sampled",
          withError(held.at(-1).sampled, held.at(-1).sampled_stderr),
          held.length > 1
            ? `version ${held[0].version}: ${withError(held[0].sampled, held[0].sampled_stderr)}`
            : `version ${held[0].version}`,
        )
      : null,
    tile("largest staleness", `${staleness}`, `eta ${run.eta}`),
    tile(`throughput, ${count > 10 ? "last 10" : "all"} steps`, short(mean("tokens_per_s", tail)), "tokens/s trained on"),
    tile(
      "trajectories",
      short(run.ended.consumed ?? 0),
      `trained on; ${short(dropped.reduce((sum, [, n]) => sum + n, 0))} dropped, ${short(run.in_flight)} in flight`,
    ),
  ].filter(Boolean);
}

function tile(name, figure, detail, ...more) {
  return h(
    "div",
    { class: "tile" },
    h("span", { class: "quiet" }, name),
    h("b", {}, figure),
    h("span", { class: "quiet" }, detail),
    more,
  );
}
