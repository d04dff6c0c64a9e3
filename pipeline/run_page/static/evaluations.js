// The run's evaluations as a table: means with intervals, pass@k, majority, and the change since version 0.

import { h, visible } from "./dom.js";

const COLUMNS = ["set", "version", "prompts", "sampled", "greedy", "figures"];

export function evaluationsTable(run) {
  if (!run.evaluations.length) return [];
  const rows = run.evaluations.map((e) => [
    visible(e.name),
    `${e.version}`,
    `${e.num_prompts}`,
    e.sampled_mean,
    e.greedy_mean,
    e.lines.map((line) => h("div", {}, line)),
  ]);
  return [
    h("h2", {}, "Evaluations"),
    h(
      "p",
      { class: "quiet" },
      "Mean reward ± standard error over prompts [95 % interval]; p of a sign-flip test over prompts.",
    ),
    table(COLUMNS, rows),
  ];
}

/** A table of rows of cells. */
export function table(columns, rows) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "rows" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((name) => h("th", {}, name)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((cell, i) => h("td", { "data-name": columns[i] }, cell)),
          ),
        ),
      ),
    ),
  );
}
