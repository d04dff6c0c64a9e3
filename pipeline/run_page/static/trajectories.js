// All trajectories: filtered, sorted and paged by the server, with the distribution of one column.

import { ask, changed, to, value } from "./address.js";
import { h, onWidth, seconds, short, showTip, svg, visible } from "./dom.js";
import { choice, failure, filter, pager, trajectoryLink } from "./parts.js";
import { ticks } from "./charts.js";

const COLUMNS = [
  "trajectory",
  "group",
  "step",
  "fate",
  "reward",
  "advantage",
  "staleness",
  "response_tokens",
  "finish",
  "text",
];
const OF_MANY_TURNS = ["turns", "tool_s"];
const WORDS = { response_tokens: "length", tool_s: "tools", trajectory: "id", loss_mask: "gradient" };
const FATES = { consumed: "c1", filtered: "c2", aborted: "c5" };
const EXAMPLES = [
  "reward == 0",
  "finish == 'length'",
  "staleness > 0 and advantage < 0",
  "fate != 'consumed'",
  "v_max > v_min",
];

export async function trajectoriesView(run) {
  const by = value("by", "reward");
  const tools = h("div", { class: "tools" }, filter("step > 100 and reward < 0.5"));
  const examples = h(
    "p",
    { class: "examples quiet" },
    "For example ",
    [...EXAMPLES, ...(run.many_turns ? ["turns > 2 and tool_s > 1"] : [])].map((one, i) => [i ? " · " : "", h("a", { href: changed({ where: one, page: "" }) }, h("code", {}, one))]),
  );
  let found, spread;
  try {
    [found, spread] = await Promise.all([
      ask("trajectories", { where: value("where"), sort: value("sort", "-step"), page: value("page", "1") }),
      ask("distribution", { where: value("where"), column: by }),
    ]);
  } catch (error) {
    return { title: "Trajectories", nodes: [h("h1", {}, "Trajectories"), tools, failure(error), examples] };
  }
  const numeric = Object.keys(found.names)
    .filter((name) => found.names[name] !== "U")
    .map((name) => [name, (WORDS[name] ?? name).replaceAll("_", " ")]);
  const shown = COLUMNS.flatMap((name) =>
    name === "finish" && run.many_turns ? [...OF_MANY_TURNS, name] : [name],
  );
  const rows = found.columns.trajectory.map((id, i) => row(found.columns, i, shown));
  fill(found.columns.trajectory, rows);
  return {
    title: "Trajectories",
    nodes: [
      h("h1", {}, "Trajectories"),
      tools,
      examples,
      h(
        "section",
        { class: "card chart histogram" },
        h(
          "h3",
          {},
          "distribution of ",
          choice("by", "", numeric, "reward"),
          h(
            "span",
            { class: "hint" },
            found.total === found.stored
              ? "all"
              : `${found.total.toLocaleString("en")} of ${found.stored.toLocaleString("en")}`,
          ),
        ),
        histogram(spread),
        fates(spread.by_fate),
        spread.bias.length
          ? h(
              "ul",
              { class: "notes" },
              spread.bias.map((line) => h("li", {}, `Of the whole run: ${line}`)),
            )
          : null,
      ),
      h(
        "div",
        { class: "tools" },
        pager(found, found.total === 1 ? "trajectory" : "trajectories"),
        h("span", { class: "narrow" }, choice("sort", "Sorted by", sorts(numeric), "-step")),
      ),
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "rows" },
          h("thead", {}, h("tr", {}, shown.map(heading))),
          h(
            "tbody",
            {},
            rows.map((one) => one.node),
          ),
        ),
      ),
      rows.length ? null : h("p", { class: "quiet" }, "No trajectory matches."),
      found.pages > 1 ? pager(found, "trajectories") : null,
    ].filter(Boolean),
  };
}

const sorts = (numeric) =>
  numeric.flatMap(([name, shown]) => [
    [`-${name}`, `${shown}, highest first`],
    [name, `${shown}, lowest first`],
  ]);

function heading(name) {
  const shown = (WORDS[name] ?? name).replaceAll("_", " ");
  if (name === "text") return h("th", {}, "prompt and response");
  const sort = value("sort", "-step"),
    now = sort.replace("-", "") === name;
  const next = now && sort.startsWith("-") ? name : `-${name}`;
  return h(
    "th",
    { "aria-sort": now ? (sort.startsWith("-") ? "descending" : "ascending") : null },
    h(
      "a",
      { href: changed({ sort: next === "-step" ? "" : next, page: "" }) },
      shown,
      now ? (sort.startsWith("-") ? " ↓" : " ↑") : "",
    ),
  );
}

function row(columns, i, shown) {
  const one = Object.fromEntries(Object.keys(columns).map((name) => [name, columns[name][i]]));
  const scored = one.rewarded_s > 0 || one.staleness >= 0;
  const words = h("td", { class: "words quiet" }, "…");
  const cells = {
    trajectory: trajectoryLink(one.trajectory),
    group: h("a", { href: to(`/group/${one.group}`) }, String(one.group)),
    step: h("a", { href: to(`/step/${one.step}`) }, String(one.step)),
    fate:
      one.fate === "consumed"
        ? "consumed"
        : h("span", { class: "warn" }, `${one.fate}: ${one.reason.replaceAll("_", " ")}`),
    reward: scored ? short(one.reward) : "–",
    advantage: one.fate === "consumed" ? short(one.advantage) : "–",
    staleness: one.staleness < 0 ? "–" : String(one.staleness),
    response_tokens: short(one.response_tokens),
    turns: String(one.turns),
    tool_s: one.tool_s > 0 ? seconds(one.tool_s) : "–",
    finish: one.finish,
  };
  const node = h(
    "tr",
    {},
    shown.slice(0, -1).map((name) =>
      h("td", { "data-name": (WORDS[name] ?? name).replaceAll("_", " ") }, cells[name]),
    ),
    words,
  );
  return { node, words };
}

async function fill(ids, rows) {
  if (!ids.length) return;
  try {
    const { texts } = await ask("excerpts", { ids: ids.join(" ") });
    const own = distinct(Object.values(texts).flatMap(({ prompt }) => (prompt === undefined ? [] : [flat(prompt)])));
    rows.forEach(({ words }, i) => {
      const found = texts[ids[i]];
      if (found.damaged) return words.replaceChildren(h("span", { class: "bad" }, found.damaged));
      words.replaceChildren(
        h(
          "a",
          { href: to(`/trajectory/${ids[i]}`) },
          h("bdi", { class: "quiet" }, visible(own(flat(found.prompt)))),
          h("bdi", {}, visible(flat(found.response))),
        ),
      );
    });
  } catch (error) {
    rows[0].words.textContent = error.message;
  }
}

/** A function that leaves out of a prompt what all prompts begin and end with, such as a template's text. */
function distinct(prompts) {
  const several = [...new Set(prompts)];
  if (several.length < 2) return (prompt) => prompt;
  const shared = (get) => {
    let count = 0;
    const shortest = Math.min(...several.map((one) => one.length));
    while (count < shortest && several.every((one) => get(one, count) === get(several[0], count))) count++;
    return count;
  };
  const head = shared((one, i) => one[i]),
    tail = shared((one, i) => one[one.length - 1 - i]);
  return (prompt) =>
    `${head > 3 ? "…" : prompt.slice(0, head)}${prompt.slice(head, Math.max(head + 1, prompt.length - tail))}${tail > 3 ? "…" : prompt.slice(prompt.length - tail)}`;
}

const flat = (words) => words.replace(/[ \t\n]+/g, " ");

/** What was trained on against what was not, if anything was not. */
function fates(rows) {
  if (rows.length < 2) return null;
  const where = (row) => `fate == '${row.fate}' and reason == '${row.reason}'`;
  return h(
    "div",
    { class: "scroll plain" },
    h(
      "table",
      { class: "rows fates" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["", "trajectories", "mean length", "mean reward", "cut off"].map((name) => h("th", {}, name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            h(
              "td",
              {},
              h(
                "a",
                { href: changed({ where: where(row), page: "" }) },
                row.fate === "consumed" ? "trained on" : `${row.fate}: ${row.reason.replaceAll("_", " ")}`,
              ),
            ),
            h("td", { "data-name": "trajectories" }, row.count.toLocaleString("en")),
            h("td", { "data-name": "mean length" }, short(row.response_tokens)),
            h("td", { "data-name": "mean reward" }, row.reward === null ? "not scored" : short(row.reward)),
            h("td", { "data-name": "cut off" }, `${short(100 * row.truncated)} %`),
          ),
        ),
      ),
    ),
  );
}

function histogram({ edges, fates }) {
  const plot = h("div", { class: "plot low" });
  const legend = h(
    "div",
    { class: "legend" },
    Object.entries(fates).map(([fate, counts]) =>
      h("span", { class: `key ${FATES[fate]}` }, fate, " ", h("b", {}, short(counts.reduce((a, b) => a + b, 0)))),
    ),
  );
  const totals = edges.slice(1).map((_, i) => Object.values(fates).reduce((sum, counts) => sum + counts[i], 0));
  const highest = Math.max(1, ...totals);
  onWidth(plot, (width) => {
    const height = 110,
      left = 46,
      bottom = 20,
      top = 6;
    const x = (value) => left + ((value - edges[0]) / (edges.at(-1) - edges[0] || 1)) * (width - left - 10);
    const y = (count) => top + (1 - count / highest) * (height - top - bottom);
    const below = totals.map(() => 0);
    plot.replaceChildren(
      svg(
        "svg",
        { width, height, role: "img", "aria-label": "histogram" },
        ticks(0, highest, 2, true).map((count) => [
          svg("line", { class: "grid", x1: left, x2: width - 10, y1: y(count), y2: y(count) }),
          svg("text", { class: "tick", x: left - 6, y: y(count) + 3.5, "text-anchor": "end" }, short(count)),
        ]),
        Object.entries(fates).flatMap(([fate, counts]) =>
          counts.map((count, i) => {
            const bar = svg("rect", {
              class: `bar ${FATES[fate]}`,
              x: x(edges[i]) + 0.5,
              width: Math.max(1, x(edges[i + 1]) - x(edges[i]) - 1),
              y: y(below[i] + count),
              height: y(below[i]) - y(below[i] + count),
            });
            below[i] += count;
            return bar;
          }),
        ),
        ticks(edges[0], edges.at(-1), Math.max(2, width / 90)).map((value) =>
          svg("text", { class: "tick", x: x(value), y: height - 5, "text-anchor": "middle" }, short(value)),
        ),
      ),
    );
    plot.onpointermove = (event) => {
      const value =
        edges[0] +
        ((event.clientX - plot.getBoundingClientRect().left - left) / (width - left - 10)) * (edges.at(-1) - edges[0]);
      const i = edges.findIndex((edge, j) => value >= edge && value < edges[j + 1]);
      if (i < 0) return showTip();
      showTip(
        event.clientX,
        event.clientY,
        `${short(edges[i])} to ${short(edges[i + 1])}`,
        ...Object.entries(fates).map(([fate, counts]) => `${fate}: ${counts[i].toLocaleString("en")}`),
      );
    };
    plot.onpointerleave = () => showTip();
  });
  return [legend, plot];
}
