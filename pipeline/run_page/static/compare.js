// Two branches of one run: the same trajectories with other rewards.

import { ask, changed, go, to, value } from "./address.js";
import { Board } from "./charts.js";
import { h, many, short } from "./dom.js";

const LISTED = 60;

export async function compareView(run) {
  if (run.branches.length < 2) {
    return {
      title: "Branches",
      nodes: [
        h("h1", {}, "Branches"),
        h(
          "p",
          {},
          "This run has one branch. Score its responses again with another reward, and the two can be compared here:",
        ),
        h("pre", { class: "prompt" }, `staleflow store rescore ${run.folder} --reward mine.py:score --branch better`),
        h("p", {}, "Or compute their logprobs under another model, which colours tokens by importance ratio:"),
        h(
          "pre",
          { class: "prompt" },
          `staleflow store recompute-logprobs ${run.folder} --model CHECKPOINT --branch other`,
        ),
      ],
    };
  }
  const first = value("first", "main"),
    second = value(
      "second",
      run.branches.find((name) => name !== first),
    );
  const pick = (name, present) =>
    h(
      "select",
      { name, onchange: (event) => go(changed({ [name]: event.target.value })) },
      run.branches.map((one) => h("option", { value: one, selected: one === present }, one)),
    );
  const tools = h("div", { class: "tools" }, pick("first", first), " and ", pick("second", second));
  let found;
  try {
    found = await ask("compare", { first, second });
  } catch (error) {
    return { title: "Branches", nodes: [h("h1", {}, "Branches"), tools, h("p", { class: "error" }, error.message)] };
  }
  const { by_step: bySteps } = found;
  const board = new Board({ pick: (step) => go(to(`/step/${step}`, { branch: second })), zoom: () => {} });
  const chart = board.add({
    title: "reward",
    unit: "",
    hint: "mean of each step’s batch",
    lines: [
      { name: "a", label: first, doc: "" },
      { name: "b", label: second, doc: "" },
    ],
  });
  board.update(
    { step: bySteps.step, lines: { a: bySteps.means[0], b: bySteps.means[1] }, drops: {} },
    [0, Math.max(1, bySteps.step.at(-1) ?? 0)],
    bySteps.step.length < 30 ? 1 : Math.max(5, Math.round(bySteps.step.length / 40)),
  );
  const share = (count, of) => (of ? `${short((100 * count) / of)} % of ${of.toLocaleString("en")}` : "");
  const tile = (name, figure, detail) =>
    h(
      "div",
      { class: "tile" },
      h("span", { class: "quiet" }, name),
      h("b", {}, figure),
      h("span", { class: "quiet" }, detail),
    );
  return {
    title: `${first} and ${second}`,
    nodes: [
      h("h1", {}, "Branches"),
      tools,
      h(
        "div",
        { class: "figures" },
        tile("mean reward", `${short(found.mean[0])} → ${short(found.mean[1])}`, `${first} → ${second}`),
        tile("rewards that differ", found.changed.toLocaleString("en"), share(found.changed, found.trajectories)),
        tile(
          "order of members changed",
          found.order_changed.length.toLocaleString("en"),
          `groups, ${share(found.order_changed.length, found.groups)}`,
        ),
        tile("signal gained", found.signal_second_only.length.toLocaleString("en"), `groups only ${second} learns from`),
        tile("signal lost", found.signal_first_only.length.toLocaleString("en"), `groups only ${first} learns from`),
      ),
      h("div", { class: "board two" }, chart, histogram(found, first, second)),
      ...[
        ["Groups whose order changed", found.order_changed],
        [`Groups with signal in ${second} only`, found.signal_second_only],
        [`Groups with signal in ${first} only`, found.signal_first_only],
      ].map(([name, ids]) => groups(name, ids, first, second)),
      ...Object.entries(found.lineage)
        .filter(([, lineage]) => Object.keys(lineage).length)
        .map(([name, lineage]) =>
          h(
            "section",
            {},
            h("h2", {}, `How ${name} was made`),
            h(
              "dl",
              { class: "facts" },
              Object.entries(lineage).map(([key, one]) =>
                h(
                  "div",
                  {},
                  h("dt", {}, key.replaceAll("_", " ")),
                  h("dd", {}, typeof one === "object" ? JSON.stringify(one) : String(one)),
                ),
              ),
            ),
          ),
        ),
    ],
  };
}

function groups(name, ids, first, second) {
  if (!ids.length) return "";
  return h(
    "section",
    {},
    h("h2", {}, `${name}: ${many(ids.length, "group")}`),
    h(
      "p",
      { class: "chips" },
      ids
        .slice(0, LISTED)
        .map((id) => h("a", { class: "chip", href: to(`/group/${id}`, { branch: first, other: second }) }, String(id))),
      ids.length > LISTED ? h("span", { class: "quiet" }, `and ${ids.length - LISTED} more`) : null,
    ),
  );
}

function histogram(found, first, second) {
  const most = Math.max(1, ...found.histogram.flatMap(([, a, b]) => [a, b]));
  const bar = (count, colour) =>
    h("span", { class: `bar ${colour}` }, h("i", { style: { width: `${(100 * count) / most}%` } }), short(count));
  return h(
    "section",
    { class: "card" },
    h("h3", {}, "rewards", h("span", { class: "hint" }, "trajectories by reward")),
    h("div", { class: "legend" }, h("span", { class: "key c1" }, first), h("span", { class: "key c2" }, second)),
    h(
      "table",
      { class: "bars" },
      found.histogram.map(([edge, a, b]) =>
        h("tr", {}, h("th", {}, `from ${short(edge)}`), h("td", {}, bar(a, "c1"), bar(b, "c2"))),
      ),
    ),
  );
}
