// The run over time: what each instance served and ran, what the trainer trained, and what waited where.

import { ask, changed, go, to, value } from "./address.js";
import { h, onWidth, seconds, short, showTip, svg, visible } from "./dom.js";
import { ticks } from "./charts.js";
import { versionStyle } from "./parts.js";

const NAME = 92,
  LANE = 44,
  GAP = 8,
  AXIS = 24,
  RIGHT = 8;
const QUEUES = {
  "waiting for an instance": "c6",
  "being scored": "c2",
  "ready or waiting for siblings": "c3",
  "waiting for their environment": "c4",
};
const OF_MANY_TURNS = "waiting for their environment";

export async function lanesView(run) {
  const bins = Math.min(600, Math.max(120, Math.round(innerWidth / 3)));
  const asked = () =>
    ask("lanes", { ...(value("from") && { begin_s: value("from") }), ...(value("to") && { end_s: value("to") }), bins });
  let found = await asked();
  const [above, below] = [h("div"), h("div")];
  const plot = h("div", { class: "lanes" });
  const draw = () => {
    above.replaceChildren(...[heading(found), tools(found), ...notes(found)].filter(Boolean));
    if (plot.clientWidth) lanes(plot, found, run);
    if (found.events.length)
      below.replaceChildren(
        h("h2", {}, "What happened"),
        h(
          "ol",
          { class: "story" },
          found.events.map(([at, what]) => h("li", {}, h("time", {}, seconds(at)), visible(what))),
        ),
      );
  };
  onWidth(plot, draw);
  draw();
  return {
    title: "Time",
    nodes: [above, h("section", { class: "card" }, plot), below],
    follow: async (now) => {
      if (found.read_share >= 1 && now.state !== "running" && found.num_events) return;
      const before = found.num_events;
      found = await asked();
      if (found.num_events !== before) draw();
    },
  };
}

const heading = (found) =>
  h(
    "div",
    { class: "heading" },
    h("h1", {}, "Instances and trainer over time"),
    h("span", { class: "quiet" }, `${seconds(found.begin_s)} to ${seconds(found.end_s)} of ${seconds(found.last_s)}`),
  );

function tools(found) {
  const zoomed = value("from") !== "" || value("to") !== "";
  const span = found.end_s - found.begin_s;
  const part = (begin, end) =>
    changed({ from: Math.max(0, begin).toFixed(3), to: Math.min(found.last_s, end).toFixed(3) });
  const wider = (factor) => part(found.begin_s - (span * (factor - 1)) / 2, found.end_s + (span * (factor - 1)) / 2);
  const link = (address, words) => h("a", { class: "button", href: address }, words);
  return h(
    "div",
    { class: "tools" },
    link(wider(0.4), "Closer"),
    zoomed
      ? [
          link(wider(2.5), "Wider"),
          link(part(found.begin_s - span / 2, found.end_s - span / 2), "‹ earlier"),
          link(part(found.begin_s + span / 2, found.end_s + span / 2), "later ›"),
          link(changed({ from: "", to: "" }), "Whole run"),
        ]
      : null,
    h(
      "span",
      { class: "quiet" },
      "Drag to zoom. Height: trajectories being sampled. Colour: policy version. Stripes: loading weights.",
    ),
  );
}

const notes = (found) => [
  found.read_share < 1
    ? h("p", { class: "note" }, `The journal is being read: ${Math.round(100 * found.read_share)} % so far.`)
    : null,
  found.read_error ? h("p", { class: "note" }, visible(found.read_error)) : null,
  found.num_events ? null : h("p", { class: "quiet" }, "The run’s folder has no journal (events.jsonl)."),
];

function lanes(plot, found, run) {
  const width = plot.clientWidth,
    inner = width - NAME - RIGHT;
  const rows = [...found.instances.map((lane) => ({ lane })), { trainer: true }, { queues: true }];
  const height = rows.length * (LANE + GAP) + AXIS + 30;
  const bins = found.step.length,
    wide = inner / bins;
  const span = found.end_s - found.begin_s;
  const x = (at) => NAME + ((at - found.begin_s) / span) * inner;
  const label = (y, name, detail) => [
    svg("text", { class: "lane-name", x: 0, y: y + 17 }, name),
    svg("text", { class: "tick", x: 0, y: y + 32 }, detail),
  ];
  const parts = ticks(found.begin_s, found.end_s, Math.max(2, width / 110)).map((at) => [
    svg("line", { class: "grid", x1: x(at), x2: x(at), y1: 0, y2: height - AXIS }),
    svg(
      "text",
      { class: "tick", x: x(at), y: height - 8, "text-anchor": x(at) > width - 30 ? "end" : "middle" },
      seconds(at),
    ),
  ]);
  const pattern = svg(
    "pattern",
    { id: "stripes", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 2, height: 5, class: "stripe" }),
  );
  parts.push(svg("defs", {}, pattern));
  // Far away, where versions are too narrow to be told apart, colours go from the first to the last instead of around.
  const served = found.instances.flatMap((lane) => runs(lane.version));
  const low = Math.min(...found.step, ...served.map(([, , version]) => version).filter((version) => version >= 0)),
    high = Math.max(...found.step);
  const far = served.length / Math.max(1, found.instances.length) > inner / 12;
  const coloured = (kind, version) =>
    far && version >= 0
      ? { class: kind, style: { "--v": 205 + (150 * (version - low)) / Math.max(1, high - low) } }
      : { class: version < 0 ? `${kind} gone` : kind, style: versionStyle(version) };
  let y = 0;
  for (const lane of found.instances) {
    parts.push(
      label(y, lane.name, `of ${lane.max_running}`),
      svg("rect", { class: "back", x: NAME, y, width: inner, height: LANE }),
    );
    parts.push(
      runs(lane.version).map(([from, until, version]) => {
        // One shape per version: its top is how much ran.
        let d = `M${(NAME + from * wide).toFixed(1)} ${y + LANE}`;
        for (let i = from; i < until; i++) {
          const top = (y + LANE - Math.min(1, lane.running[i] / Math.max(1, lane.max_running)) * LANE).toFixed(1);
          d += `L${(NAME + i * wide).toFixed(1)} ${top}L${(NAME + (i + 1) * wide).toFixed(1)} ${top}`;
        }
        return svg("path", {
          ...coloured("served", version),
          d: `${d}L${(NAME + until * wide).toFixed(1)} ${y + LANE}Z`,
        });
      }),
    );
    lane.pulling.forEach(
      (share, i) =>
        share > 0.5 &&
        parts.push(svg("rect", { fill: "url(#stripes)", x: NAME + i * wide, y, width: wide, height: LANE })),
    );
    parts.push(
      runs(lane.version)
        .map(([from, until, version]) =>
          (until - from) * wide > 26 && version >= 0
            ? svg(
                "text",
                {
                  class: "lane-version",
                  x: NAME + ((from + until) / 2) * wide,
                  y: y + LANE - 5,
                  "text-anchor": "middle",
                },
                `v${version}`,
              )
            : null,
        )
        .filter(Boolean),
    );
    y += LANE + GAP;
  }
  parts.push(label(y, "trainer", "busy"), svg("rect", { class: "back", x: NAME, y, width: inner, height: LANE }));
  parts.push(
    found.training
      .map((share, i) =>
        share > 0.001
          ? svg("rect", {
              ...coloured("trained", found.step[i]),
              x: NAME + i * wide,
              width: wide + 0.4,
              y: y + LANE * (1 - share),
              height: LANE * share,
            })
          : null,
      )
      .filter(Boolean),
  );
  parts.push(
    runs(found.step.map((step, i) => (found.training[i] > 0.5 ? step : -1)))
      .map(([from, until, step]) =>
        (until - from) * wide > 34 && step >= 0
          ? svg(
              "text",
              {
                class: "lane-version",
                x: NAME + ((from + until) / 2) * wide,
                y: y + LANE - 5,
                "text-anchor": "middle",
              },
              String(step),
            )
          : null,
      )
      .filter(Boolean),
  );
  y += LANE + GAP;
  const queues = found.phases.filter(
    ({ name, count }) => name in QUEUES && (name !== OF_MANY_TURNS || count.some((one) => one > 0)),
  );
  const most = Math.max(1, ...queues.flatMap((phase) => phase.count));
  parts.push(
    label(y, "queues", `to ${short(Math.ceil(most))}`),
    svg("rect", { class: "back", x: NAME, y, width: inner, height: LANE + 24 }),
  );
  queues.forEach((phase) => {
    const d = phase.count
      .map(
        (count, i) =>
          `${i ? "L" : "M"}${(NAME + (i + 0.5) * wide).toFixed(1)} ${(y + (LANE + 24) * (1 - count / most)).toFixed(1)}`,
      )
      .join("");
    parts.push(svg("path", { class: `line ${QUEUES[phase.name]}`, d }));
  });
  for (const [at] of found.events)
    parts.push(svg("line", { class: "bound", x1: x(at), x2: x(at), y1: 0, y2: height - AXIS }));
  for (const at of found.starts)
    if (at > found.begin_s && at < found.end_s)
      parts.push(
        svg("line", { class: "bound", x1: x(at), x2: x(at), y1: 0, y2: height - AXIS }),
        svg("text", { class: "tick bound", x: x(at) + 4, y: height - AXIS - 4 }, "resumed"),
      );
  const selection = svg("rect", { class: "selection", y: 0, height: height - AXIS, width: 0 });
  const hair = svg("line", { class: "hair", y1: 0, y2: height - AXIS, visibility: "hidden" });
  const legend = h(
    "div",
    { class: "legend" },
    queues.map((phase) => h("span", { class: `key ${QUEUES[phase.name]}` }, phase.name)),
  );
  plot.replaceChildren(
    svg("svg", { width, height, role: "img", "aria-label": "instances and trainer over time" }, parts, selection, hair),
    legend,
  );
  listen(plot, { found, rows, inner, wide, selection, hair });
}

/** Runs of equal values: [first, end, value]. */
function runs(values) {
  const found = [];
  for (let i = 0, from = 0; i < values.length; i++) {
    if (values[i + 1] === values[i]) continue;
    found.push([from, i + 1, values[i]]);
    from = i + 1;
  }
  return found;
}

function listen(plot, { found, rows, inner, wide, selection, hair }) {
  const span = found.end_s - found.begin_s;
  let from = null;
  const inside = (event) => Math.min(inner, Math.max(0, event.clientX - plot.getBoundingClientRect().left - NAME));
  const at = (offset) => found.begin_s + (offset / inner) * span;
  plot.onpointerdown = (event) => {
    if (!event.button) from = inside(event);
  };
  plot.onpointermove = (event) => {
    const offset = inside(event);
    for (const end of ["x1", "x2"]) hair.setAttribute(end, NAME + offset);
    hair.setAttribute("visibility", "visible");
    if (from !== null && Math.abs(offset - from) > 6) {
      plot.setPointerCapture(event.pointerId);
      selection.setAttribute("x", NAME + Math.min(from, offset));
      selection.setAttribute("width", Math.abs(offset - from));
    }
    const i = Math.min(found.step.length - 1, Math.floor(offset / wide));
    const row = rows[Math.floor((event.clientY - plot.getBoundingClientRect().top) / (LANE + GAP))] ?? rows.at(-1);
    showTip(event.clientX, event.clientY, `at ${seconds(at(offset))}`, ...describe(row, found, i));
  };
  plot.onpointerup = (event) => {
    const until = inside(event);
    if (from !== null && Math.abs(until - from) > 6) {
      const [a, b] = [at(from), at(until)].sort((one, two) => one - two);
      showTip();
      go(changed({ from: a.toFixed(3), to: b.toFixed(3) }));
    } else if (from !== null) {
      const i = Math.min(found.step.length - 1, Math.floor(until / wide));
      const row = rows[Math.floor((event.clientY - plot.getBoundingClientRect().top) / (LANE + GAP))];
      if (row?.trainer && found.step[i] >= 0) {
        showTip();
        go(to(`/step/${found.step[i]}`));
      }
    }
    from = null;
  };
  plot.onpointerleave = plot.onpointercancel = () => {
    from = null;
    hair.setAttribute("visibility", "hidden");
    selection.setAttribute("width", 0);
    showTip();
  };
}

function describe(row, found, i) {
  if (row.lane) {
    const { version, running, max_running: most, pulling } = row.lane;
    return version[i] < 0
      ? [`${row.lane.name} is gone`]
      : [
          `${row.lane.name}: version ${version[i]}`,
          `${short(running[i])} of ${most} running`,
          ...(pulling[i] > 0.01 ? [`loads weights ${Math.round(100 * pulling[i])} % of this moment`] : []),
        ];
  }
  if (row.trainer)
    return found.step[i] < 0
      ? ["no step yet"]
      : [`trainer: step ${found.step[i]}, busy ${Math.round(100 * found.training[i])} %`, "click for its groups"];
  return found.phases.map((phase) => `${phase.name}: ${short(phase.count[i])}`);
}
